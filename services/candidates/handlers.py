"""Search: check a request against what is loaded, gather concurrent ones, scan once for all of them.

The event loop only checks and queues. One worker thread makes the masks and runs the index, so PyTorch works on one
batch at a time with the threads it was given.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.catalogue import Catalogue
from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.protocol import Index, Mask
from services.algorithms.states import QueryStates
from services.candidates.audit import Answered, Audit
from services.candidates.domain import Found, IndexInfo, SearchAnswer, SearchQuery, Stage
from services.candidates.metrics import CandidatesMetrics
from services.common.batching import Batcher
from services.common.errors import InvalidRequest, PreconditionFailed

MAX_K = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedIndexes:
    """Indexes by name, the first one for requests that name none, over one copy of the item states.

    states_nbytes: that copy, which every index counts as its own; copies_nbytes: what else holds the states.
    """

    indexes: Mapping[str, Index]
    states_nbytes: int
    copies_nbytes: int


class Search:
    """Answers searches from one catalogue through the indexes by name."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        loaded: LoadedIndexes,
        audit: Audit,
        metrics: CandidatesMetrics,
        max_batch: int,
        max_queue: int,
    ) -> None:
        self._catalogue, self._metrics, self._audit = catalogue, metrics, audit
        self._indexes = indexes = loaded.indexes
        self._names = _short_names(indexes)
        self._batcher: Batcher[SearchQuery, Found] = Batcher(
            self.find_all, max_batch=max_batch, max_queue=max_queue, name="candidates", on_batch=metrics.batch
        )
        added = {name: index.nbytes - loaded.states_nbytes for name, index in indexes.items()}
        held = loaded.states_nbytes + loaded.copies_nbytes + sum(added.values()) + catalogue.rules.nbytes
        self.info = IndexInfo(
            model_version=catalogue.model_version,
            index_version=catalogue.index_version,
            algorithm=next(iter(indexes)),
            num_items=catalogue.num_items,
            bytes_per_item=held / catalogue.num_items,
            added_bytes_per_item={name: size / catalogue.num_items for name, size in added.items()},
        )
        metrics.loaded(self.info)

    async def __call__(self, search: SearchQuery) -> SearchAnswer:
        """Answer one search.

        Raises: InvalidRequest naming the field, PreconditionFailed for a state of another model, Overloaded.
        """
        self._check(search)
        found, queue_s = await self._batcher.submit(search)
        self._metrics.queue.observe(queue_s)
        return SearchAnswer(
            found=found,
            model_version=self._catalogue.model_version,
            index_version=self._catalogue.index_version,
            queue_s=queue_s,
        )

    async def close(self) -> None:
        """Finish what is queued, and the audit that runs."""
        await self._batcher.close()
        self._audit.close()

    def _check(self, search: SearchQuery) -> None:
        if not 1 <= search.k <= MAX_K:
            raise InvalidRequest.of("k", search.k, f"1-{MAX_K}")
        if search.algorithm not in self._names:
            raise InvalidRequest.of("algorithm", search.algorithm, f"empty or one of {sorted(self._indexes)}")
        if search.model_version != self._catalogue.model_version:
            raise PreconditionFailed(
                f"query_state.model_version={search.model_version!r} but this index holds model "
                f"{self._catalogue.model_version!r}; encode the history again with that model"
            )
        try:
            self._catalogue.check(search.query)
        except ValueError as exc:
            raise InvalidRequest(f"query_state: {exc}") from exc

    def find_all(self, searches: Sequence[SearchQuery]) -> list[Found]:
        """Answer checked searches, those of one kind in one scan (worker thread)."""
        answers: dict[int, Found] = {}
        kinds: dict[tuple[str, Stage, int], list[int]] = {}
        for place, search in enumerate(searches):
            kinds.setdefault((self._names[search.algorithm], search.stage, search.k), []).append(place)
        for (algorithm, stage, k), places in kinds.items():
            found = self._find(algorithm, stage, k, [searches[place] for place in places])
            answers.update(zip(places, found, strict=True))
            self._metrics.searched(algorithm, stage.value, len(places))
        return [answers[place] for place in range(len(searches))]

    def _find(self, algorithm: str, stage: Stage, k: int, searches: Sequence[SearchQuery]) -> list[Found]:
        started = time.perf_counter()
        index = self._indexes[algorithm]
        queries = _stack([search.query for search in searches])
        allowed = self._masks([search.filter for search in searches])
        self._metrics.filter.observe(time.perf_counter() - started)
        if stage is Stage.FIRST:
            pool = index.first_stage(queries, k, allowed)
            rows, scores, passes = pool.item_indices, pool.scores, pool.passes
        else:
            top = index.search(queries, k, allowed)
            rows, scores, passes = top.item_indices, top.scores, top.passes
        seconds = time.perf_counter() - started
        self._metrics.passed(algorithm, passes)
        item_ids = self._catalogue.item_ids
        answers = []
        for query, search in enumerate(searches):
            found = rows[query][rows[query] >= 0]
            answer = Found(
                algorithm=algorithm,
                item_ids=[item_ids[row] for row in found.tolist()],
                scores=scores[query, : len(found)].tolist(),
                bound=pool.bound(query) if stage is Stage.FIRST else None,
                certificate=top.certificates[query] if stage is Stage.FULL else None,
                search_s=seconds,
                passes=passes,
                query=query,
            )
            answers.append(answer)
            if self._audit.wants():
                mask = allowed if allowed is None or allowed.ndim == 1 else allowed[query]
                self._audit.offer(
                    Answered(
                        algorithm=algorithm,
                        stage=stage,
                        query=search.query,
                        k=k,
                        allowed=mask,
                        rows=found,
                        scores=scores[query, : len(found)],
                        bound=answer.bound,
                        certificate=answer.certificate,
                    )
                )
        return answers

    def _masks(self, filters: Sequence[ItemFilter]) -> Mask | None:
        masks = [self._catalogue.rules.mask(wanted) for wanted in filters]
        if all(mask is None for mask in masks):
            return None
        if len(masks) == 1:
            return masks[0]
        everything = np.ones(self._catalogue.num_items, dtype=bool)
        return np.stack([everything if mask is None else mask for mask in masks])


def _stack(queries: Sequence[QueryStates]) -> QueryStates:
    if len(queries) == 1:
        return queries[0]
    gates = [query.gate for query in queries if query.gate is not None]
    return QueryStates(
        components=np.concatenate([query.components for query in queries]),
        gate=np.concatenate(gates) if gates else None,
    )


def _short_names(indexes: Mapping[str, Index]) -> dict[str, str]:
    """What a request may write for each index: its name with sizes, its bare name where no other has it, or nothing."""
    bare = [name.partition("(")[0] for name in indexes]
    names = {short: name for short, name in zip(bare, indexes, strict=True) if bare.count(short) == 1}
    return {"": next(iter(indexes)), **names, **{name: name for name in indexes}}

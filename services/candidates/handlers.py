"""Search: check a request against what is loaded, gather concurrent ones, scan once for all of them.

The event loop only checks and queues. One worker thread makes the masks and runs the index, so PyTorch works on one
batch at a time with the threads it was given.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from services.algorithms.catalogue import Catalogue
from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.protocol import Index, Mask
from services.algorithms.states import QueryStates
from services.candidates.domain import Found, IndexInfo, SearchAnswer, SearchQuery, Stage
from services.candidates.metrics import CandidatesMetrics
from services.common.batching import Batcher
from services.common.errors import InvalidRequest, PreconditionFailed

MAX_K = 10_000


class Search:
    """Answers searches from one catalogue through the indexes by name."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        indexes: Mapping[str, Index],
        algorithm: str,
        metrics: CandidatesMetrics,
        max_batch: int,
        max_queue: int,
    ) -> None:
        """`algorithm` names the index for requests that name none."""
        self._catalogue, self._indexes, self._algorithm, self._metrics = catalogue, indexes, algorithm, metrics
        self._batcher: Batcher[SearchQuery, Found] = Batcher(
            self.find_all, max_batch=max_batch, max_queue=max_queue, name="candidates", on_batch=metrics.batch
        )
        held = sum(index.nbytes for index in indexes.values()) - (len(indexes) - 1) * catalogue.scorer.nbytes
        self.info = IndexInfo(
            model_version=catalogue.model_version,
            index_version=catalogue.index_version,
            algorithm=algorithm,
            num_items=catalogue.num_items,
            bytes_per_item=(held + catalogue.rules.nbytes) / catalogue.num_items,
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
        """Finish what is queued."""
        await self._batcher.close()

    def _check(self, search: SearchQuery) -> None:
        if not 1 <= search.k <= MAX_K:
            raise InvalidRequest.of("k", search.k, f"1-{MAX_K}")
        if search.algorithm and search.algorithm not in self._indexes:
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
            kinds.setdefault((search.algorithm or self._algorithm, search.stage, search.k), []).append(place)
        for (algorithm, stage, k), places in kinds.items():
            found = self._find(self._indexes[algorithm], stage, k, [searches[place] for place in places])
            answers.update(zip(places, found, strict=True))
            self._metrics.searched(algorithm, stage.value, len(places))
        return [answers[place] for place in range(len(searches))]

    def _find(self, index: Index, stage: Stage, k: int, searches: Sequence[SearchQuery]) -> list[Found]:
        started = time.perf_counter()
        queries = _stack([search.query for search in searches])
        allowed = self._masks([search.filter for search in searches])
        masked = time.perf_counter()
        if stage is Stage.FIRST:
            pool = index.first_stage(queries, k, allowed)
            rows, scores = pool.item_indices, pool.scores
        else:
            top = index.search(queries, k, allowed)
            rows, scores = top.item_indices, top.scores
        seconds = time.perf_counter() - started
        self._metrics.filter.observe(masked - started)
        self._metrics.scan.observe(seconds - (masked - started))
        item_ids = self._catalogue.item_ids
        answers = []
        for query in range(len(searches)):
            found = [row for row in rows[query].tolist() if row >= 0]
            answers.append(
                Found(
                    item_ids=[item_ids[row] for row in found],
                    scores=scores[query, : len(found)].tolist(),
                    bound=pool.bound(query) if stage is Stage.FIRST else None,
                    certificate=top.certificates[query] if stage is Stage.FULL else None,
                    search_s=seconds,
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

"""Search: validate requests, batch concurrent ones, and scan once per kind of search.

The event loop validates and queues; one worker thread runs the index. A scan uses one version while the stream's thread
changes the catalogue.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from services.algorithms.indexes.mutable.lookup import components_of, similar_items
from services.algorithms.indexes.protocol import Pass
from services.algorithms.items.live_catalogue import LiveCatalogue, Served
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import FloatArray, QueryStates
from services.algorithms.scoring.voted_answers import voted_answers, voted_pools
from services.candidates.domain import (
    IndexInfo,
    SearchQuery,
    SearchResult,
    SimilarAnswer,
    Stage,
    VotesQuery,
)
from services.candidates.metrics import Answered, Audit, CandidatesMetrics
from services.candidates.votes import Voting
from services.contracts.shards import WHOLE, Shard
from services.contracts.wire import ItemVotes
from services.platform.errors import InvalidRequest, NotFound, PreconditionFailed
from services.platform.threads import Batcher
from services.platform.validation import validate_id

MAX_K = 10_000
# Most searches computed together, and most searches that may wait.
MAX_BATCH, MAX_QUEUE = 32, 256
_MEASURED_K = 100
_SHARE = 0.1
# Only chosen algorithms are measured. The expected cost halves every _HALF_LIFE_S, so that the others are tried again,
# unless the last measured cost exceeds _TRIED_SHARE of the time left.
_HALF_LIFE_S, _TRIED_SHARE = 30.0, 0.5
_WEIGHT = 0.2
# Limits between classes of gaps with similar chances of a proof.
_GAPS = (0.003, 0.01, 0.03, 0.1, 0.3)
_LEAST_CHANCE = 0.01


class Search:
    """Answers searches by named or chosen algorithms. copied_bytes_per_item: bytes of an item's states on a device."""

    def __init__(
        self,
        *,
        catalogue: LiveCatalogue,
        algorithms: Sequence[str],
        votes: Voting,
        audit: Audit,
        metrics: CandidatesMetrics,
        copied_bytes_per_item: int = 0,
        shard: Shard = WHOLE,
    ) -> None:
        self._catalogue, self._votes, self._metrics, self._audit = catalogue, votes, metrics, audit
        self.shard = shard
        self._algorithms, self._copied_bytes_per_item = list(algorithms), copied_bytes_per_item
        self._names, self._choice = _short_names(algorithms), Choice(algorithms)
        self._batcher: Batcher[SearchQuery, SearchResult] = Batcher(
            self.find_all, max_batch=MAX_BATCH, max_queue=MAX_QUEUE, name="candidates", on_batch=metrics.batch
        )
        metrics.loaded(self.info)
        if len(algorithms) > 1:
            self._measure()

    @property
    def info(self) -> IndexInfo:
        served, memory, votes = self._catalogue.served, self._catalogue.index.memory, self._votes.memory
        added: dict[str, int] = {}
        copied = 0
        if served.version.main is not None:
            segment = served.version.main.segment
            states, copied = segment.scorer.nbytes, self._copied_bytes_per_item * len(segment)
            # An algorithm's nbytes includes the shared states that it searches.
            searched = copied or states
            added = {name: segment.indexes[name].nbytes - searched for name in self._algorithms}
            copied -= len(added) * (searched - states)
        copied += self._votes.neighbours_nbytes
        num_items = max(1, served.version.num_items)
        return IndexInfo(
            model_version=self._catalogue.base.model_version,
            served=served,
            algorithm=self._algorithms[0],
            num_items=served.version.num_items,
            bytes_per_item=(memory.total + copied) / num_items,
            added_bytes_per_item={name: size / num_items for name, size in added.items()},
            num_remembered=0 if votes is None else len(votes),
            bytes_per_remembered=0.0 if votes is None else votes.index.bytes_per_entry,
            shard=self.shard,
        )

    async def __call__(self, search: SearchQuery) -> SearchResult:
        """Answer a search. Raises: InvalidRequest, PreconditionFailed for a state of another model, Overloaded."""
        self._check(search)
        found, queue_s = await self._batcher.submit(search)
        self._metrics.queue.observe(queue_s)
        return replace(found, queue_s=queue_s)

    def explain_votes(self, asked: VotesQuery) -> ItemVotes:
        """Return the votes for an item. Raises: as a search."""
        validate_id("item_id", asked.item_id)
        self._check_query(asked.query, asked.model_version)
        return self._votes.explain(asked, self._catalogue.served.name)

    def similar(self, item_id: str, k: int, wanted: ItemFilter, components: FloatArray | None = None) -> SimilarAnswer:
        """Return the items most similar to one item. components: the item's (P_x, d), flat, if another shard has it.

        Raises: InvalidRequest; NotFound for an item without a state.
        """
        validate_id("item_id", item_id)
        _check_k(k)
        self._check_filter(wanted)
        served, started = self._catalogue.served, time.perf_counter()
        if components is None:
            components = components_of(served.version, item_id)
        if components is None:
            raise NotFound(f"item_id={item_id!r} {self._catalogue.absence_of(item_id)} ({served.name})")
        shape = self._catalogue.index.shape
        if components.size != shape.num_components * shape.width or not np.isfinite(components).all():
            allowed = f"{shape.num_components} x {shape.width} finite numbers, the shape of this model"
            raise InvalidRequest.of("components", f"{components.size} numbers", allowed)
        components = components.reshape(shape.num_components, shape.width)
        return SimilarAnswer(
            found=similar_items(served.version, item_id, components, k, wanted),
            components=components,
            served=served,
            model_version=self._catalogue.base.model_version,
            search_s=time.perf_counter() - started,
        )

    async def close(self) -> None:
        await self._batcher.close()
        self._audit.close()

    def _measure(self) -> None:
        """Measure each algorithm by its second search with a random state, since the first loads memory."""
        shape, rng = self._catalogue.index.shape, np.random.default_rng(0)
        components = rng.standard_normal((1, shape.num_query_components, shape.width), dtype=np.float32)
        components /= np.linalg.norm(components, axis=2, keepdims=True)
        gate = np.zeros((1, shape.num_pairs), dtype=np.float32) if shape.gated else None
        query = QueryStates(components=components, gate=gate)
        for name in self._algorithms:
            for is_measured in (False, True):
                started = time.perf_counter()
                self._catalogue.served.version.search(query, _MEASURED_K, [ItemFilter()], name)
                if is_measured:
                    self._choice.took(name, time.perf_counter() - started)

    def _check(self, search: SearchQuery) -> None:
        _check_k(search.k)
        if search.algorithm and search.algorithm not in self._names:
            raise InvalidRequest.of("algorithm", search.algorithm, f"empty or one of {sorted(self._algorithms)}")
        if search.max_gap is not None and not 0 <= search.max_gap < inf:  # NaN fails too
            raise InvalidRequest.of("max_gap", search.max_gap, "a finite number, at least 0")
        self._check_filter(search.filter)
        self._check_query(search.query, search.model_version)

    def _check_filter(self, wanted: ItemFilter) -> None:
        try:
            wanted.check(self._catalogue.index.kinds)
        except ValueError as exc:
            raise InvalidRequest(f"filter.{exc}") from exc

    def _check_query(self, query: QueryStates, model_version: str) -> None:
        if model_version != self._catalogue.base.model_version:
            raise PreconditionFailed(
                f"query_state.model_version={model_version!r} but this index holds model "
                f"{self._catalogue.base.model_version!r}; encode the history again with that model"
            )
        try:
            self._catalogue.check(query)
        except ValueError as exc:
            raise InvalidRequest(f"query_state: {exc}") from exc

    def find_all(self, searches: Sequence[SearchQuery]) -> list[SearchResult]:
        """Answer validated searches."""
        newest = self._catalogue.served
        answers: dict[int, SearchResult] = {}
        tried: list[list[str]] = [[] for _ in searches]
        left: Sequence[int] = range(len(searches))
        while left:
            kinds: dict[tuple[str, Stage, int, str, float], list[int]] = {}
            for number in left:
                search = searches[number]
                name = self._chosen(search, len(left), tried[number])
                if name is None:
                    continue
                tried[number].append(name)
                version = "" if search.index_version == newest.name else search.index_version
                kinds.setdefault((name, search.stage, search.k, version, search.max_gap or 0.0), []).append(number)
            for (algorithm, stage, k, version, max_gap), numbers in kinds.items():
                served = self._catalogue.version_named(version)[0] if version else newest
                found = self._find(served, algorithm, stage, k, max_gap, [searches[number] for number in numbers])
                for number, one in zip(numbers, found, strict=True):
                    answers[number] = one.after(answers[number]) if number in answers else one
                    self._proved(searches[number], one)
                self._metrics.searched(algorithm, stage.value, len(numbers))
            asked = [number for numbers in kinds.values() for number in numbers]
            left = [number for number in asked if _is_open(searches[number], answers[number])]
        return [answers[number] for number in range(len(searches))]

    def _chosen(self, search: SearchQuery, num_searches: int, tried: Sequence[str]) -> str | None:
        """Return the next attempt's algorithm; None: no further attempt."""
        if search.algorithm:
            return self._names[search.algorithm]
        if search.max_gap is None:
            return self._choice.of(search.deadline, num_searches)
        others = tried
        if search.stage is Stage.FIRST:  # only exact and brute_force score pools by s
            others = [name for name in self._algorithms if not name.startswith(("exact", "brute_force"))]
        name = self._choice.proving(search.max_gap, search.deadline, num_searches, others)
        return name if name or tried else self._choice.of(search.deadline, num_searches)

    def _proved(self, search: SearchQuery, found: SearchResult) -> None:
        if search.max_gap is not None and found.certificate is not None:
            is_proven = found.certificate.proves(search.max_gap)
            self._choice.proved(found.algorithm, search.max_gap, is_proven)
            self._metrics.gap_asked(found.algorithm, is_proven)

    def _find(
        self,
        served: Served,
        algorithm: str,
        stage: Stage,
        k: int,
        max_gap: float,
        searches: Sequence[SearchQuery],
    ) -> list[SearchResult]:
        started = time.perf_counter()
        queries = _stack([search.query for search in searches])
        votes = self._votes.of(queries, searches)
        voted = time.perf_counter()
        filters, share = [search.filter for search in searches], self._votes.model_share
        bounds: list[float | None] = [None] * len(searches)
        catalogue = self._catalogue
        if stage is Stage.FIRST:
            joined, bounds, passes = voted_pools(catalogue, served, queries, k, filters, votes, algorithm)
        else:
            options = {"model_share": share, "max_gap": max_gap}
            joined, passes = voted_answers(catalogue, served, queries, k, filters, votes, algorithm, **options)
        if votes is not None:
            asked = np.full(len(searches), self._votes.num_asked, dtype=np.int64)
            passes = (Pass("votes", voted - started, asked), *passes)
        seconds = time.perf_counter() - started
        self._choice.took(algorithm, (seconds - (voted - started)) / len(searches))
        self._metrics.passed(algorithm, passes)
        answers = []
        for query, (search, one) in enumerate(zip(searches, joined, strict=True)):
            answer = SearchResult(
                algorithm=algorithm,
                item_ids=one.item_ids,
                scores=one.scores.tolist(),
                bound=bounds[query],
                certificate=one.certificate,
                search_s=seconds,
                passes=tuple(replace(done, touched=done.touched[query : query + 1]) for done in passes),
                served=served,
                model_version=self._catalogue.base.model_version,
                model_share=share,
                votes=None if votes is None else [votes[query].get(item_id, 0.0) for item_id in one.item_ids],
            )
            answers.append(answer)
            if self._audit.wants():
                own = None if votes is None else votes[query]
                self._audit.offer(Answered(search=search, found=answer, votes=own))
        return answers


def _stack(queries: Sequence[QueryStates]) -> QueryStates:
    if len(queries) == 1:
        return queries[0]
    return QueryStates.joined(queries)


def _is_open(search: SearchQuery, found: SearchResult) -> bool:
    if search.max_gap is None or search.algorithm or found.certificate is None:
        return False
    return not found.certificate.proves(search.max_gap)


def _check_k(k: int) -> None:
    if not 1 <= k <= MAX_K:
        raise InvalidRequest.of("k", k, f"1-{MAX_K}")


def _short_names(algorithms: Sequence[str]) -> dict[str, str]:
    """Return the algorithms by full name, and by the name without sizes if that is unique."""
    bare = [name.partition("(")[0] for name in algorithms]
    names = {short: name for short, name in zip(bare, algorithms, strict=True) if bare.count(short) == 1}
    return {**names, **{name: name for name in algorithms}}


class Choice:
    """Chooses a search's algorithm if it names none: the first whose measured cost is at most a tenth of the time left.

    Exact ones come before cheap ones, so an idle machine searches large catalogues exactly, a busy one cheaply.

    To prove a gap, the first attempt uses the algorithm with the least cost divided by its measured chance of a proof.
    It may use half of the time left (decision 091). Costs are per search. Not thread-safe.
    """

    def __init__(self, algorithms: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Seconds per search (0: not measured), and the time of the measurement.
        self._costs = {name: (0.0, clock()) for name in algorithms}
        # The share of searches that proved their gap, by algorithm and class of gaps.
        self._proofs: dict[tuple[str, int], float] = {}

    def took(self, algorithm: str, seconds: float) -> None:
        cost, _ = self._costs[algorithm]
        self._costs[algorithm] = (cost + _WEIGHT * (seconds - cost) if cost else seconds, self._clock())

    def proved(self, algorithm: str, max_gap: float, is_proven: bool) -> None:
        kind = (algorithm, bisect_right(_GAPS, max_gap))
        chance = self._proofs.get(kind, 1.0)
        self._proofs[kind] = chance + _WEIGHT * (is_proven - chance)

    def proving(
        self, max_gap: float, deadline: float | None, num_searches: int, tried: Sequence[str] = ()
    ) -> str | None:
        """Return the best algorithm, except those `tried`, to prove the gap for `num_searches` together until
        `deadline`; None if none is fast enough.
        """
        left = inf if deadline is None else max(0.0, deadline - self._clock()) / num_searches
        gaps = bisect_right(_GAPS, max_gap)
        costs = {
            name: cost / max(_LEAST_CHANCE, self._proofs.get((name, gaps), 1.0))
            for name, (cost, _) in self._costs.items()
            if name not in tried and cost <= _TRIED_SHARE * left
        }
        return min(costs, key=costs.__getitem__, default=None)

    def of(self, deadline: float | None, num_searches: int) -> str:
        """Return the first algorithm that answers `num_searches` together within `_SHARE` of the time until `deadline`,
        else the cheapest; without a deadline, the first.
        """
        now, cheapest = self._clock(), ("", float("inf"))
        for name, (cost, measured) in self._costs.items():
            if deadline is None:
                return name
            left = max(0.0, deadline - now) / num_searches
            expected = cost * 0.5 ** ((now - measured) / _HALF_LIFE_S)
            if expected <= _SHARE * left and cost <= _TRIED_SHARE * left:
                return name
            cheapest = min(cheapest, (name, cost), key=lambda one: one[1])
        return cheapest[0]

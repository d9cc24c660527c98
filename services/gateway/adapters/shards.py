"""A search asks all shards of the catalogue at once and merges their answers.

The largest of the shards' bounds is valid for the whole catalogue. All answers must be of one index version, so shards
that are ahead are asked once more for the oldest version. Without a shard's answer, the merged answer is an estimate.

A shard that takes three times as long as the fastest half is asked again, at most twice, through another replica (Dean
and Barroso, The Tail at Scale, 2013). At most a twentieth of calls are repeats.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from services.algorithms.indexes.protocol import ESTIMATE, EXACT, Certificate
from services.algorithms.rules.filters import ItemFilter
from services.contracts.shards import home_shard
from services.contracts.wire import ItemVotes, PackedQueryState
from services.gateway.adapters.processes import RemoteCandidates
from services.gateway.dependencies import Breaker
from services.gateway.domain import Found, Pool, Ranking, Seen
from services.gateway.ports import ServedIndex
from services.platform.errors import DependencyUnavailable, FreshetError

# Share of a call's time limit that is kept for merging.
_OWN_SHARE = 0.1
# Shortest wait before a repeat, once half of the shards have answered.
_HEDGE_FLOOR_S = 0.01
_HEDGED_SHARE, _MAX_HEDGES = 0.05, 20.0
# Most repeats per shard. Replicas take calls in turn: of two, the first repeat may reach the slow one again.
_HEDGES_OF_A_CALL = 2
_TINY = 2.0**-1022

A = TypeVar("A", Ranking, Pool)


@dataclass(frozen=True, slots=True)
class _Answers(Generic[A]):
    """Answers by shard (None: no answer). share: the searched share of the catalogue."""

    of: Sequence[A | None]
    share: float

    @property
    def there(self) -> list[A]:
        return [one for one in self.of if one is not None]

    @property
    def oldest(self) -> A:
        return min(self.there, key=_position)

    @property
    def is_whole(self) -> bool:
        """Whether all shards answered from one version."""
        return len(self.there) == len(self.of) and len({one.index_version for one in self.there}) == 1

    @property
    def version(self) -> str:
        names = sorted({one.index_version for one in self.there})
        return names[0] if len(names) == 1 else f"mixed.{blake2b(' '.join(names).encode(), digest_size=4).hexdigest()}"

    @property
    def found(self) -> dict[str, Any]:
        """The fields of `Found` for all answers together."""
        there = self.there
        return {
            "index_version": self.version,
            "index_freshness": self.oldest.index_freshness,
            "queue_ms": max(one.queue_ms for one in there),
            "stage_ms": max(one.stage_ms for one in there),
            "num_items": sum(one.num_items for one in there),
            "searched_share": self.share,
            "items_touched": sum(one.items_touched for one in there),
        }


class ShardedCandidates:
    """Implements `ports.Candidates` over shards, given in their order. Use it in one event loop only.

    patient_s: a call's full time limit; the breaker ignores time-outs of shorter calls. count: called with "missing" or
    "hedged" and the shard's number.
    """

    def __init__(
        self,
        shards: Sequence[RemoteCandidates],
        *,
        patient_s: float,
        open_s: float = 0.5,
        stalled_s: Callable[[float], float] = lambda since: 0.0,
        count: Callable[[str, int], None] = lambda what, shard: None,
    ) -> None:
        self._shards, self._patient_s, self._count = shards, patient_s, count
        self._breakers = [
            Breaker(f"candidates shard {number}/{len(shards)}", open_seconds=open_s, stalled_s=stalled_s)
            for number in range(len(shards))
        ]
        self._hedges = _MAX_HEDGES
        # Items per shard, as last reported; 0: unknown.
        self._num_items = [0] * len(shards)

    async def search(self, query_state: PackedQueryState, *, k: int, timeout_s: float, **asked: Any) -> Ranking:
        """Return the k best of all shards' k best. Raises: DependencyUnavailable if none answered."""

        async def ask(shard: RemoteCandidates, version: str, left_s: float) -> Ranking:
            return await shard.search(query_state, k=k, timeout_s=left_s, index_version=version, **asked)

        return _merged_rankings(await self._ask_one_version(ask, timeout_s), k)

    async def propose(self, query_state: PackedQueryState, *, k: int, timeout_s: float, **asked: Any) -> Pool:
        """Return all pools as one. Each shard is asked for its share of `k` plus three standard deviations.

        Raises: DependencyUnavailable if no shard answered.
        """
        size = share_of_pool(k, len(self._shards))

        async def ask(shard: RemoteCandidates, version: str, left_s: float) -> Pool:
            return await shard.propose(query_state, k=size, timeout_s=left_s, index_version=version, **asked)

        return _merged_pools(await self._ask_one_version(ask, timeout_s))

    async def similar(
        self, item_id: str, *, k: int, filter: ItemFilter, seen: Sequence[str], timeout_s: float
    ) -> Ranking:
        """Ask the item's shard, then send the item's components to the other shards.

        Raises: NotFound, and other errors of the item's shard.
        """
        until = time.monotonic() + (1 - _OWN_SHARE) * timeout_s
        home = self._home(item_id)

        async def first() -> tuple[Ranking, bytes]:
            return await self._shards[home].similar_with_components(
                item_id, k=k, filter=filter, seen=seen, timeout_s=timeout_s / 2
            )

        found, components = await self._breakers[home].run(first, patient=timeout_s >= self._patient_s)
        self._num_items[home] = found.num_items

        async def ask(shard: RemoteCandidates, version: str, left_s: float) -> Ranking:
            if shard is self._shards[home]:
                return found
            ranking, _ = await shard.similar_with_components(
                item_id, k=k, filter=filter, seen=seen, timeout_s=left_s, components=components
            )
            return ranking

        return _merged_rankings(await self._ask(ask, [""] * len(self._shards), until, timeout_s), k)

    async def explain_votes(
        self, query_state: PackedQueryState, item_id: str, *, seen: Seen, timeout_s: float
    ) -> ItemVotes:
        return await self._shards[self._home(item_id)].explain_votes(
            query_state, item_id, seen=seen, timeout_s=timeout_s
        )

    async def served(self, timeout_s: float) -> ServedIndex:
        found = await asyncio.gather(*(shard.served(timeout_s) for shard in self._shards))
        return min(found, key=lambda one: one.freshness.deltas_offset)

    def _home(self, item_id: str) -> int:
        return home_shard(item_id, len(self._shards))

    async def _ask_one_version(
        self, ask: Callable[[RemoteCandidates, str, float], Awaitable[A]], timeout_s: float
    ) -> _Answers[A]:
        """Ask all shards, then ask those with a newer version once more."""
        until = time.monotonic() + (1 - _OWN_SHARE) * timeout_s
        answers = await self._ask(ask, [""] * len(self._shards), until, timeout_s)
        wanted = answers.oldest.index_version
        ahead = [wanted if one is not None and one.index_version != wanted else None for one in answers.of]
        if not any(ahead):
            return answers
        again = await self._ask(ask, ahead, until, timeout_s, asks_all=False)
        return replace(answers, of=[new or old for new, old in zip(again.of, answers.of, strict=True)])

    async def _ask(
        self,
        ask: Callable[[RemoteCandidates, str, float], Awaitable[A]],
        versions: Sequence[str | None],
        until: float,
        timeout_s: float,
        *,
        asks_all: bool = True,
    ) -> _Answers[A]:
        """Ask each shard for its version in `versions` ("": the newest; None: not asked).

        Raises: DependencyUnavailable if `asks_all` and none answered.
        """
        patient, started = timeout_s >= self._patient_s, time.monotonic()
        asked = [number for number, version in enumerate(versions) if version is not None]
        answers: list[A | None] = [None] * len(versions)

        async def call(number: int) -> A:
            return await ask(self._shards[number], versions[number] or "", until - time.monotonic())

        async def again(number: int) -> A | None:
            try:
                return await call(number)
            except FreshetError:
                return None

        calls = {
            asyncio.ensure_future(self._breakers[number].attempt(partial(call, number), patient=patient)): number
            for number in asked
        }
        pending, late_at, left = set(calls), math.inf, _HEDGES_OF_A_CALL
        try:
            while pending:
                wait_s = None if late_at == math.inf or not left else max(0.0, late_at - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number, answer = calls[task], task.result()
                    if answer is not None and answers[number] is None:
                        answers[number] = answer
                        for other in [one for one in pending if calls[one] == number]:
                            other.cancel()
                            pending.remove(other)
                now = time.monotonic()
                if late_at == math.inf and 2 * sum(one is not None for one in answers) >= len(asked):
                    late_at = now + max(2 * (now - started), _HEDGE_FLOOR_S)
                if now >= late_at and left:
                    left, late_at = left - 1, now + (now - started)
                    for number in sorted({calls[task] for task in pending}):
                        if self._hedges >= 1:
                            self._hedges -= 1
                            self._count("hedged", number)
                            task = asyncio.ensure_future(again(number))
                            calls[task] = number
                            pending.add(task)
        finally:
            for task in pending:
                task.cancel()
        self._hedges = min(_MAX_HEDGES, self._hedges + _HEDGED_SHARE * len(asked))
        for number in asked:
            found = answers[number]
            if found is None:
                self._count("missing", number)
            else:
                self._num_items[number] = found.num_items
        if asks_all and not any(one is not None for one in answers):
            raise DependencyUnavailable(f"candidates: none of {len(asked)} shards answered")
        return _Answers(answers, self._share([one is not None for one in answers]))

    def _share(self, answered: Sequence[bool]) -> float:
        """Return the searched share of the catalogue. A shard of unknown size counts as one of mean size."""
        if all(answered):
            return 1.0
        heard = [count for count in self._num_items if count]
        mean = sum(heard) / max(1, len(heard))
        sizes = [count or mean for count in self._num_items]
        there = sum(size for size, is_there in zip(sizes, answered, strict=True) if is_there)
        return there / sum(sizes) if sum(sizes) else sum(answered) / len(answered)


def share_of_pool(size: int, count: int) -> int:
    """Return how many items of a pool each shard returns: three standard deviations above the mean of its binomial
    share of the best `size`.
    """
    share = 1 / count
    return min(size, math.ceil(size * share + 3 * math.sqrt(size * share * (1 - share))))


def _position(one: Found) -> int:
    return -1 if one.index_freshness is None else one.index_freshness.deltas_offset


def _merged_rankings(answers: _Answers[Ranking], k: int) -> Ranking:
    there = answers.there
    items = sorted((item for one in there for item in one.items), key=lambda item: (-item.score, item.item_id))[:k]
    kth = items[k - 1].score if len(items) == k else None
    proof = _certificate(there, k, kth) if answers.is_whole else ESTIMATE
    return Ranking(
        items=items,
        certificate=proof,
        **answers.found,
    )


def _certificate(rankings: Sequence[Ranking], k: int, kth: float | None) -> Certificate:
    """Return the merged certificate. What an exact shard omits ranks after the K-th item. What another shard omits
    scores at most that shard's last score plus its gap.
    """
    gaps = [(one, one.certificate.gap) for one in rankings if one.certificate != EXACT]
    if not gaps:
        return EXACT
    if kth is None or any(gap is None or not one.items for one, gap in gaps):
        return ESTIMATE
    bound = max(math.nextafter(one.items[-1].score + (gap or 0.0), math.inf) for one, gap in gaps)
    return EXACT if bound < kth else Certificate(max(bound - kth, _TINY))


def _merged_pools(answers: _Answers[Pool]) -> Pool:
    there = answers.there
    has_votes = any(one.votes for one in there)
    rows = sorted(
        (-score, item_id, vote)
        for one in there
        for item_id, score, vote in zip(one.item_ids, one.scores, one.votes or [0.0] * len(one.item_ids), strict=True)
    )
    bounds = [one.bound for one in there if one.bound is not None]
    return Pool(
        item_ids=[item_id for _, item_id, _ in rows],
        scores=[-score for score, _, _ in rows],
        bound=max(bounds) if answers.is_whole and len(bounds) == len(there) else None,
        votes=[vote for _, _, vote in rows] if has_votes else (),
        model_share=next((one.model_share for one in there if one.votes), 1.0),
        **answers.found,
    )

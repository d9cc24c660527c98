"""The gateway's ports in memory: each can fail, be slow, and shows what it was asked."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from services.algorithms.indexes.protocol import EXACT
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.dead_letters import Replayed
from services.contracts.operations import Operation
from services.contracts.topics.dead_letters import StoredLetter
from services.contracts.topics.exposures import Exposure
from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import Interaction
from services.contracts.topics.items import CatalogueItem
from services.contracts.wire import ExplainedPair, ExplainedScore, ItemVotes, PackedQueryState, VotingInteractions
from services.gateway.domain import (
    Encoded,
    Event,
    Hit,
    IndexFreshness,
    Pool,
    Ranking,
    RerankQuery,
    ScoredItem,
    Seen,
    SourceHits,
)
from services.gateway.ports import (
    Contributions,
    ItemProgress,
    Looked,
    PartitionProgress,
    SearchOptions,
    ServedIndex,
    Shown,
    StoredUser,
)
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, FreshetError, NotFound, PreconditionFailed
from services.platform.stream.kafka import partition_for
from services.platform.stream.records import Position, SourceRecord
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state.layout import num_partitions_of, pack_positions, reaches
from services.user_state.values import Progress, StoredState, UserView


@dataclass
class _Failing:
    """`failure` is raised by each call while set; `delay_s` passes before each answer."""

    failure: FreshetError | None = None
    delay_s: float = 0.0
    calls: int = 0

    async def _behave(self) -> None:
        self.calls += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure


@dataclass
class MemoryControl:
    """As `Control`, in memory; `apply` is called with what was written."""

    apply: Callable[[Any], object]
    last: Operation[Any] | None = None

    def read(self) -> "MemoryControl":
        return self

    def write(self, after: Any, operation: str, operator: str = "") -> Any:
        self.last = Operation(after=after, operation=operation, operator=operator, operation_id="1", time_ms=1)
        self.apply(after)
        return after


@dataclass
class MemorySessions(_Failing):
    """Lists by kind and user. They do not end: `ttls` says when they would. `unknown`: users without a history.
    `full`: what `push` raises where there is no room."""

    lists: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    ttls: dict[tuple[str, str], int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=lambda: {"nobody"})
    full: FreshetError | None = None

    async def push(self, kind: str, user_id: str, entry: bytes, *, most: int, ttl_seconds: int) -> bool:
        await self._behave()
        if user_id in self.unknown:
            return False
        if self.full is not None:
            raise self.full
        key = kind, user_id
        self.lists[key] = [entry, *self.lists.get(key, ())][:most]
        self.ttls[key] = ttl_seconds
        return True

    async def read(self, user_id: str, wanted: Mapping[str, int]) -> Mapping[str, list[bytes]]:
        await self._behave()
        return {kind: self.lists.get((kind, user_id), [])[:most] for kind, most in wanted.items()}


@dataclass
class MemoryUserStates(_Failing):
    """Users, their histories, and the watermarks of the stream. `on_read` runs before each read, counted from 1.

    `behind`: users whose state does not reflect their history, as after a model came back; `lost`: those without one;
    `incomplete`: users whose data the store reports as lost. `home`: of every user; None: Kafka's. `models`:
    those whose states were requested.
    """

    states: dict[str, StoredState] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)
    turned_down: dict[str, Sequence[str]] = field(default_factory=dict)
    histories: dict[str, Sequence[Event]] = field(default_factory=dict)
    watermarks: dict[int, int] = field(default_factory=dict)
    current_epoch: str | None = "epoch-1"
    behind: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    home: int | None = 3
    num_partitions: int = NUM_PARTITIONS
    on_read: Callable[[int], None] | None = None
    models: set[str] = field(default_factory=set)

    async def read_user(
        self, user_id: str, model_version: str, *, with_seen: bool = True, partition: int | None = None
    ) -> UserView:
        await self._behave()
        self.models.add(model_version)
        if self.on_read is not None:
            self.on_read(self.calls)
        home = partition_for(user_id.encode(), self.num_partitions) if self.home is None else self.home
        asked = home if partition is None else partition
        return UserView(
            state=self.states.get(user_id),
            seen=list(self.seen.get(user_id, ())) if with_seen else [],
            epoch=self.current_epoch,
            watermark=None if self.current_epoch is None else self.watermarks.get(asked, -1),
            partition=asked,
            has_history=user_id not in self.lost,
            is_lost=user_id in self.incomplete,
            reaches_history=user_id in self.states and user_id not in self.behind | self.lost,
            turned_down=self.turned_down.get(user_id, ()) if with_seen else (),
        )

    async def read_events(self, user_id: str) -> Sequence[Event]:
        await self._behave()
        return list(self.histories.get(user_id, ()))

    async def epoch(self) -> str | None:
        await self._behave()
        return self.current_epoch

    async def read_progress(self) -> tuple[str | None, Mapping[int, Progress]]:
        await self._behave()
        if self.current_epoch is None:
            return None, {}
        watermarks = [self.watermarks.get(number, -1) for number in range(self.num_partitions)]
        return self.current_epoch, {number: Progress(watermark=found) for number, found in enumerate(watermarks)}


@dataclass
class StoredUserStates(MemoryUserStates):
    """What the encoder process left in its store, read at each call, for one model version."""

    store: MemoryStore = field(default_factory=MemoryStore)
    model_version: str = ""
    home: int | None = None

    async def _behave(self) -> None:
        await super()._behave()
        store = self.store
        self.current_epoch = store.epoch()
        if self.current_epoch is not None:
            self.num_partitions = num_partitions_of(self.current_epoch)
        self.states = {user: state for (user, version), state in store.states.items() if version == self.model_version}
        self.seen = {
            user: sorted(times, key=lambda item_id: (times[item_id], item_id), reverse=True)
            for user, times in store.seen.items()
        }
        self.turned_down = store.turned_down
        self.histories = {user: history.events for user, history in store._histories.items()}
        self.behind = {user for user, state in self.states.items() if not self._reaches_history(user, state)}
        self.lost = {user for user in self.states if user not in store._positions}
        self.incomplete = set(*store.find_lost(range(self.num_partitions), self.current_epoch or ""))
        progress = store.progress(range(self.num_partitions), self.current_epoch or "")
        self.watermarks = {number: found.watermark for number, found in progress.items()}

    def _reaches_history(self, user: str, state: StoredState) -> bool:
        epoch = self.current_epoch or ""
        history = self.store.load_users([user], epoch)[user]
        position = pack_positions(epoch, history.positions, history.forgotten) if history.expected else None
        written = self.store.state_positions.get((user, self.model_version))
        return reaches(written, position)


@dataclass
class MemoryEncoder(_Failing):
    """Knows some items; the state of a history is a fixed one. A forget is applied by setting another of `users`."""

    query_state: PackedQueryState | None = None
    known_items: set[str] = field(default_factory=set)
    histories: list[tuple[str, list[Event]]] = field(default_factory=list)
    users: dict[str, StoredUser] = field(default_factory=dict)

    async def encode(self, user_id: str, history: Sequence[Event], timeout_s: float) -> Encoded:
        self.histories.append((user_id, list(history)))
        await self._behave()
        known = any(event.item_id in self.known_items for event in history)
        return Encoded(query_state=self.query_state if known else None, queue_ms=1.0, encode_ms=2.0)

    async def describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        await self._behave()
        return self.users.get(user_id, StoredUser(pseudonym=f"p-{user_id}", forgotten_up_to={}))


def _by_model(item_ids: Sequence[str], k: int) -> list[ScoredItem]:
    return [ScoredItem(one, 0.9 - place / 1000, "mol") for place, one in enumerate(list(reversed(item_ids))[:k])]


@dataclass
class MemoryCandidates(_Failing):
    """A catalogue in the first stage's order, the model's is the other way round; filters by id only. With a memory,
    the last item of a pool has the one vote."""

    item_ids: list[str] = field(default_factory=list)
    query_states: list[PackedQueryState] = field(default_factory=list)
    pool_sizes: list[int] = field(default_factory=list)
    seen: list[Sequence[str]] = field(default_factory=list)
    turned_down: list[Collection[str]] = field(default_factory=list)
    model_share: float = 1.0
    freshness: IndexFreshness = field(default_factory=lambda: IndexFreshness(deltas_offset=41, lag_seconds=0.25))

    async def search(self, query_state: PackedQueryState, **asked: Unpack[SearchOptions]) -> Ranking:
        found = await self._allowed(query_state, asked["filter"], asked["seen"])
        return Ranking(
            items=_by_model(found, asked["k"]),
            certificate=EXACT,
            index_version="index-1",
            index_freshness=self.freshness,
            queue_ms=1.0,
            stage_ms=3.0,
        )

    async def propose(self, query_state: PackedQueryState, **asked: Unpack[SearchOptions]) -> Pool:
        self.pool_sizes.append(asked["k"])
        found = (await self._allowed(query_state, asked["filter"], asked["seen"]))[: asked["k"]]
        scores = [1.0 - place / 1000 for place in range(len(found))]
        has_votes = self.model_share < 1.0 and bool(found)
        return Pool(
            item_ids=found,
            scores=scores,
            bound=0.5,
            votes=[0.0] * (len(found) - 1) + [0.5] if has_votes else (),
            model_share=self.model_share if has_votes else 1.0,
            index_version="index-1",
            index_freshness=self.freshness,
            queue_ms=1.0,
            stage_ms=3.0,
        )

    async def similar(
        self, item_id: str, *, k: int, filter: ItemFilter, seen: Sequence[str], timeout_s: float
    ) -> Ranking:
        """Those that come after the item in the catalogue's order."""
        self.seen.append(seen)
        await self._behave()
        if item_id not in self.item_ids:
            raise NotFound(f"item_id={item_id!r}: no item of this index")
        others = [one for one in self.item_ids if one != item_id]
        left_out = set(filter.deny_item_ids) | (set(seen) if filter.exclude_seen else set())
        found = [one for one in others if one not in left_out][:k]
        return Ranking(
            items=[ScoredItem(one, 0.9 - place / 1000, "similar") for place, one in enumerate(found)],
            certificate=EXACT,
            index_version="index-1",
            index_freshness=self.freshness,
        )

    async def _allowed(self, query_state: PackedQueryState, filter: ItemFilter, seen: Seen) -> list[str]:
        self.query_states.append(query_state)
        self.seen.append(seen.item_ids)
        self.turned_down.append(seen.turned_down)
        await self._behave()
        left_out = set(filter.deny_item_ids) | (set(seen.item_ids) if filter.exclude_seen else set())
        found = [item_id for item_id in self.item_ids if item_id not in left_out]
        if filter.allow_item_ids:
            found = [item_id for item_id in found if item_id in filter.allow_item_ids]
        return found

    async def explain_votes(
        self, query_state: PackedQueryState, item_id: str, *, seen: Seen, timeout_s: float
    ) -> ItemVotes:
        self.query_states.append(query_state)
        self.seen.append(seen.item_ids)
        self.turned_down.append(seen.turned_down)
        await self._behave()
        voters = [VotingInteractions(type="rating", count=2, newest_age_seconds=5.0, oldest_age_seconds=60.0, vote=0.5)]
        return ItemVotes(
            vote=0.5 if self.model_share < 1.0 else 0.0,
            num_neighbours=8 if self.model_share < 1.0 else 0,
            model_share=self.model_share,
            voters=voters if self.model_share < 1.0 else [],
            index_version="index-1",
        )

    async def served(self, timeout_s: float) -> ServedIndex:
        await self._behave()
        return ServedIndex(index_version="index-1", freshness=self.freshness)


@dataclass
class MemoryReranker(_Failing):
    """Turns the pool round, so that its order is told from the first stage's."""

    asked: list[tuple[int, float]] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    discounts: list[Mapping[str, float]] = field(default_factory=list)
    rules: list[Sequence[Rule]] = field(default_factory=list)
    titles: dict[str, str] = field(default_factory=dict)
    query_states: list[PackedQueryState] = field(default_factory=list)

    async def rerank(self, query_state: PackedQueryState, pool: Pool, wanted: RerankQuery, timeout_s: float) -> Ranking:
        self.query_states.append(query_state)
        self.rules.append(wanted.rules)
        self.asked.append((wanted.max_per_category, wanted.diversity))
        self.discounts.append(wanted.discounts)
        self.pools.append(pool)
        await self._behave()
        return Ranking(
            items=_by_model(pool.item_ids, wanted.k),
            certificate=EXACT,
            index_version=pool.index_version,
            index_freshness=pool.index_freshness,
            queue_ms=1.0,
            stage_ms=4.0,
        )

    async def explain(
        self, query_state: PackedQueryState, item_id: str, *, max_pairs: int, rules: Sequence[Rule], timeout_s: float
    ) -> ExplainedScore:
        self.query_states.append(query_state)
        await self._behave()
        if item_id not in self.titles:
            raise NotFound(f"reranker: item_id={item_id!r} is in no index")
        pairs = [
            ExplainedPair(
                query_component=component,
                item_component=0,
                weight=0.5,
                cosine=0.8,
                contribution=0.4,
                from_model=0.3,
            )
            for component in range(2)
        ]
        return ExplainedScore(
            score=0.8,
            from_model=0.6,
            from_interactions=0.2,
            model_share=0.75,
            num_interactions=12,
            pairs=pairs[: max_pairs or None],
            title=self.titles[item_id],
            index_version="index-1",
            rules=[place for place, rule in enumerate(rules) if item_id in rule.which.allow_item_ids],
        )

    async def served(self, timeout_s: float) -> ServedIndex:
        await self._behave()
        return ServedIndex(index_version="index-1", freshness=IndexFreshness(deltas_offset=40))


@dataclass
class MemoryTextSources:
    """What each source finds for any words, less what the filter denies by id; `failures` and `delays_s` by source.

    A source that is not in `found` is not loaded.
    """

    found: dict[str, list[Hit]] = field(default_factory=dict)
    failures: dict[str, FreshetError] = field(default_factory=dict)
    delays_s: dict[str, float] = field(default_factory=dict)
    asked: list[tuple[str, str, int, ItemFilter]] = field(default_factory=list)

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        self.asked += [(source, query, k, filter) for source in sources]
        said = await asyncio.gather(*(self._find(source, k, filter, 0.9 * timeout_s) for source in sources))
        return dict(zip(sources, said, strict=True))

    async def _find(self, source: str, k: int, filter: ItemFilter, within_s: float) -> SourceHits | FreshetError:
        await asyncio.sleep(min(within_s, self.delays_s.get(source, 0.0)))
        if self.delays_s.get(source, 0.0) > within_s:
            return DeadlineExceeded(f"{source}: no answer within {within_s * 1000:.0f} ms")
        if source in self.failures:
            return self.failures[source]
        if source not in self.found:
            return PreconditionFailed(f"{source} is not loaded")
        items = [item for item in self.found[source] if item.item_id not in filter.deny_item_ids]
        return SourceHits(items=items[:k], text_version="text-1")


@dataclass
class MemoryRefreshers:
    """What the refreshers that answer hold: partitions, and contributions by pseudonym."""

    held: list[PartitionProgress] = field(default_factory=list)
    of_users: dict[str, list[Contributions]] = field(default_factory=dict)
    of_items: dict[str, list[ItemProgress]] = field(default_factory=dict)
    all_answer: bool = True

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        return list(self.held), self.all_answer

    async def contributions(self, pseudonym: str, timeout_s: float) -> tuple[Sequence[Contributions], bool]:
        return list(self.of_users.get(pseudonym, ())), self.all_answer

    async def item(self, item_id: str, timeout_s: float) -> tuple[Sequence[ItemProgress], bool]:
        return self.of_items.get(item_id, []), self.all_answer


@dataclass
class MemoryStreamEnds(_Failing):
    """Set by hand; other partitions are empty."""

    ends: dict[int, int] = field(default_factory=dict)
    num_attribution_partitions: int = NUM_PARTITIONS
    stored: dict[tuple[int, int], SourceRecord] = field(default_factory=dict)

    async def records(self, offsets: Mapping[int, int], timeout_s: float) -> Mapping[int, SourceRecord]:
        return {at[0]: self.stored[at] for at in offsets.items() if at in self.stored}

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        await self._behave()
        return dict.fromkeys(range(NUM_PARTITIONS), 0) | self.ends

    async def attribution_partitions(self, timeout_s: float) -> int:
        if self.failure is not None:
            raise self.failure
        return self.num_attribution_partitions


@dataclass
class MemoryInteractionLog(_Failing):
    """One partition. `refuse_after` writes, every further one raises `refusal`."""

    written: list[Interaction] = field(default_factory=list)
    refuse_after: int | None = None
    refusal: FreshetError | None = None

    async def append(self, record: Interaction, timeout_s: float) -> Position:
        await self._behave()
        if self.refusal is not None and self.refuse_after is not None and len(self.written) >= self.refuse_after:
            raise self.refusal
        self.written.append(record)
        return Position(3, len(self.written) - 1)


@dataclass
class MemoryItemLog(_Failing):
    """What was put, in order. Every item of `refused` is not acknowledged."""

    written: list[CatalogueItem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    # Who reads the topic, at once.
    follower: Callable[[Sequence[CatalogueItem]], None] = lambda items: None

    async def append(self, record: CatalogueItem, timeout_s: float) -> Position:
        await self._behave()
        if record.item_id in self.refused:
            raise DependencyUnavailable("Kafka did not acknowledge")
        self.written.append(record)
        self.follower([replace(record, offset=len(self.written) - 1)])
        return Position(0, len(self.written) - 1)


@dataclass
class MemoryForgetLog(_Failing):
    """What was written. `on_append` plays the processes that read it."""

    written: list[Forget] = field(default_factory=list)
    on_append: Callable[[Forget], None] | None = None

    async def append(self, record: Forget, timeout_s: float) -> Position:
        await self._behave()
        self.written.append(record)
        if self.on_append is not None:
            self.on_append(record)
        return Position(0, len(self.written) - 1)


@dataclass
class MemoryExposureLog:
    """What was shown, with its user, in order."""

    written: list[tuple[str, Exposure]] = field(default_factory=list)

    def append(self, user_id: str, exposure: Exposure) -> None:
        self.written.append((user_id, exposure))


@dataclass
class MemoryStreamStatus:
    """Set by hand."""

    log_reachable: bool = True
    encoder_serving: bool = True


@dataclass
class MemoryParts:
    """By part why it is not ready."""

    found: dict[str, str] = field(default_factory=lambda: {"kafka": "", "redis": "", "encoder": "", "candidates": ""})
    looks: int = 0

    async def problems(self, timeout_s: float) -> Mapping[str, str]:
        self.looks += 1
        return dict(self.found)


def letter_at(place: Position, *, reason: str = "internal error", written_ms: int = 1_000) -> StoredLetter:
    """A dead letter of an interaction."""
    return StoredLetter(
        topic="interactions",
        position=place,
        written_ms=written_ms,
        reason=reason,
        key=b"ann",
        value=b"v",
        headers=[],
        is_whole=True,
    )


@dataclass
class MemoryDeadLetters(_Failing):
    """Dead letters, newest first. A replay is noted."""

    letters: list[StoredLetter] = field(default_factory=list)
    has_older: bool = False

    async def newest(self, topics: Collection[str], timeout_s: float) -> tuple[list[StoredLetter], bool]:
        await self._behave()
        return [one for one in self.letters if one.topic in topics], self.has_older

    async def replay(self, topic: str, place: Position, *, preview: bool, timeout_s: float) -> Replayed:
        await self._behave()
        names = [(letter.topic, letter.position) for letter in self.letters]
        if (topic, place) not in names:
            raise NotFound("no dead letter")
        at = names.index((topic, place))
        letter = self.letters[at]
        if letter.replayed_to is not None:
            return Replayed("it was replayed before", None, "")
        if preview:
            return Replayed("", None, "e-1")
        self.letters[at] = replace(letter, replayed_to=Position(0, 99))
        return Replayed("", Position(0, 99), "e-1")


@dataclass
class MemoryShownAnswers(_Failing):
    """What a `MemoryExposureLog` has, by its users."""

    log: MemoryExposureLog = field(default_factory=MemoryExposureLog)

    async def newest(self, user_id: str, most: int) -> Looked:
        await self._behave()
        found = self._of(user_id)[::-1]
        return Looked(found[:most], found[-1].exposure.shown_ms if found else None, len(found) <= most)

    async def at(self, user_id: str, exposure_id: str, shown_ms: int) -> Shown:
        await self._behave()
        for shown in self._of(user_id):
            if (shown.exposure.exposure_id, shown.exposure.shown_ms) == (exposure_id, shown_ms):
                return shown
        raise NotFound("no record")

    def _of(self, user_id: str) -> list[Shown]:
        return [Shown(one, Position(0, at)) for at, (user, one) in enumerate(self.log.written) if user == user_id]

"""Values of the state store, their bytes in Redis, and the arguments of its scripts."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from redis.exceptions import OutOfMemoryError

from services.contracts import stored_history
from services.contracts.stored_history import PackedHistory, RecentId, StoredEvent
from services.contracts.wire import PackedQueryState
from services.platform.errors import DependencyUnavailable
from services.platform.redis_clients import REDIS_ERRORS, advice_on
from services.user_state import layout
from services.user_state.layout import Home

DEFAULT_TTL_SECONDS = 90 * 24 * 3600
DEFAULT_MAX_SEEN = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """A user's query state, with the position of its newest applied record and the time of its newest event.

    traceparent: the span that made the state, or "".
    """

    query_state: PackedQueryState
    partition: int
    offset: int
    event_time_ms: int
    applied_ms: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserView:
    """A user's data for a recommendation.

    seen: newest first. epoch: None before anything was applied. watermark: of `partition`, which is the requested one
    or the user's home. reaches_history: the state reflects the whole history; it does not after the model's process was
    unavailable. is_lost: the store lost data of the user and has not restored it. turned_down: seen items that their
    newest event rejects.
    """

    state: StoredState | None
    seen: list[str]
    epoch: str | None
    watermark: int | None
    partition: int
    has_history: bool = True
    reaches_history: bool = True
    is_lost: bool = False
    turned_down: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UserHistory:
    """A user's stored history for the writer.

    forgotten: the last forgotten offset per partition. expected: the position text that `Store.apply` compares.
    is_lost: as in `UserView`. known: the home partition's last offset in the table of users (-1: unknown).
    """

    events: list[StoredEvent] = field(default_factory=list)
    recent: list[RecentId] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    forgotten: dict[int, int] = field(default_factory=dict)
    expected: bytes = b""
    is_lost: bool = False
    known: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class UserKeys:
    """How many events and seen items of a user are stored, and which model versions have a state."""

    history_events: int
    seen_items: int
    state_model_versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserUpdate:
    """One user's next history, seen items and state, written together.

    turned_down: replaces the stored items. state_change: "set" writes `state`, "drop" deletes the stored state of the
    model version, "keep" leaves it.
    """

    user_id: str
    model_version: str
    expected: bytes
    positions: Mapping[int, int]
    events: Sequence[StoredEvent]
    recent: Sequence[RecentId]
    seen_times: Mapping[str, int]
    unseen: Collection[str] = ()
    turned_down: Sequence[str] = ()
    forgotten: Mapping[int, int] = field(default_factory=dict)
    state: StoredState | None = None
    state_change: Literal["set", "drop", "keep"] = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A state of another model, from the history at these positions.

    change: as in `UserUpdate.state_change`. After "keep", a state that reflected the history position `before` (see
    `UserUpdate.expected`) reflects `positions`. "set" without a state records that the history has no state of this
    model.
    """

    user_id: str
    model_version: str
    positions: Mapping[int, int]
    forgotten: Mapping[int, int]
    state: StoredState | None = None
    change: Literal["set", "drop", "keep"] = "set"
    before: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A partition's progress in this epoch.

    watermark: the last applied offset, or -1. unfinished: number of users written since the watermark moved. counts:
    number of records by outcome. anchors: the writer's text that identifies the log, or "".
    """

    watermark: int = -1
    unfinished: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    anchors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The stored histories of the requested users, the lost users among them, and the progress at that time."""

    histories: Mapping[str, PackedHistory]
    lost: Collection[str]
    progress: Mapping[int, Progress]


@dataclass(frozen=True, slots=True, kw_only=True)
class Popularity:
    """A partition's items by level (`algorithms.items.popularity`), highest first."""

    half_life_s: float
    levels: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PopularityStep:
    """The levels (`algorithms.items.popularity`) that items gain (`joins`) and lose (`goes`)."""

    half_life_s: float
    joins: Mapping[str, float] = field(default_factory=dict)
    goes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceStep:
    """Moves one partition's watermark, and adds the counts and the popularity of the records in between.

    anchors: see `Progress`. unfinished: users of this home partition written since the last move; None if unknown.
    """

    partition: int
    from_watermark: int
    to_watermark: int
    counts: Mapping[str, int]
    anchors: str = ""
    unfinished: int | None = None
    popular: PopularityStep | None = None


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Redis' memory. removed: keys evicted or expired since Redis started. memory_share: used share of the limit
    (0 without one).
    """

    removed: int
    memory_share: float


@dataclass(slots=True)
class ForgetsApplied:
    """A reader's stored progress in `forgets`, one text per home partition.

    Writes compare and advance the text, so they detect a node that lost writes in a failover. offsets: for each
    partition the last record applied to all its users, or -1.
    """

    reader: str
    offsets: dict[int, int]
    texts: dict[int, str]

    @property
    def offset(self) -> int:
        """The offset of the last record applied in all these partitions."""
        return min(self.offsets.values(), default=-1)

    def of(self, partitions: Collection[int]) -> "ForgetsApplied":
        return ForgetsApplied(
            self.reader, {p: self.offsets[p] for p in partitions}, {p: self.texts[p] for p in partitions}
        )


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raise DependencyUnavailable in place of the client's errors."""
    try:
        yield
    except OutOfMemoryError as exc:
        raise DependencyUnavailable("Redis is full and takes no writes: give it more memory (maxmemory)") from exc
    except REDIS_ERRORS as exc:
        reason = advice_on(exc) or f"{type(exc).__name__}: {exc}"
        raise DependencyUnavailable(f"Redis does not answer: {reason}") from exc


def now_ms() -> int:
    """Return this machine's time in Unix milliseconds."""
    return time.time_ns() // 1_000_000


HISTORY_FIELDS = ("position", "events", "ids")
PROGRESS_FIELDS = ("epoch", "watermark", "unfinished", "anchors", *layout.COUNT_FIELDS)


def progress_of(values: Sequence[bytes | None], epoch: bytes | None) -> Progress:
    """Return the progress; an empty one if its epoch is not `epoch`. values: of PROGRESS_FIELDS."""
    if epoch is None or values[0] != epoch:
        return Progress()
    counts = {name: int(value or 0) for name, value in zip(layout.COUNT_FIELDS, values[4:], strict=True)}
    return Progress(
        watermark=int(values[1] or -1),
        unfinished=int(values[2] or 0),
        anchors=(values[3] or b"").decode(),
        counts=counts,
    )


def is_lost_user(
    epoch: str, home: Home, entry: bytes | None, position: bytes | None, *, events: bool, seen: bool
) -> bool:
    """Return whether a user is lost: keys are missing, behind the table of users, or have events but no seen items."""
    applied = layout.unpack_entry(entry, time.time())
    if applied is None:
        return False
    found = layout.unpack_positions(epoch, position)
    return found is None or found[0].get(home.partition, -1) < applied or (events and not seen)


def history_of(
    epoch: str, home: Home, entry: bytes | None, row: Sequence[bytes | None], *, has_seen: bool
) -> UserHistory:
    """Return the history. entry: the user's entry in the table of users. row: the values of HISTORY_FIELDS."""
    position, events, ids = row
    is_lost = is_lost_user(epoch, home, entry, position, events=bool(events), seen=has_seen)
    found = layout.unpack_positions(epoch, position)
    known = -1 if entry is None else int(entry.partition(b":")[0])
    if found is None:
        return UserHistory(expected=position or b"", is_lost=is_lost, known=known)
    positions, forgotten = found
    return UserHistory(
        events=stored_history.unpack_events(events),
        recent=stored_history.unpack_recent(ids),
        positions=positions,
        forgotten=forgotten,
        expected=position or b"",
        is_lost=is_lost,
        known=known,
    )


def dumped_history(
    epoch: str, position: bytes | None, events: bytes | None, ids: bytes | None, seen: bytes | None
) -> PackedHistory | None:
    """Return a user's history from the reply of DUMP; None without data of this epoch."""
    found = layout.unpack_positions(epoch, position)
    if found is None:
        return None
    words = seen.decode().split("\0") if seen else []
    times = map(int, map(float, words[1::2]))
    return PackedHistory(
        *found,
        stored_history.event_columns(events),
        ids or b"",
        *stored_history.pack_seen(dict(zip(words[::2], times, strict=True))),
    )


def state_of(values: Sequence[bytes | None], model_version: str, trace: bytes | None = None) -> StoredState | None:
    """Return the state; None if a value is missing. values, trace: of STATE_FIELDS and STATE_TRACE."""
    if None in values:
        return None
    components, gate, *texts = cast(list[bytes], values)
    num_components, width, partition, offset, event_time_ms, applied_ms = map(int, texts)
    return StoredState(
        query_state=PackedQueryState(
            model_version=model_version,
            components=components,
            gate=gate,
            num_components=num_components,
            component_width=width,
        ),
        partition=partition,
        offset=offset,
        event_time_ms=event_time_ms,
        applied_ms=applied_ms,
        traceparent="" if trace is None else layout.traceparent_of(trace, partition, offset),
    )


def state_words(state: StoredState) -> list[Any]:
    """Return the fields and values of a state's hash in turn. The inverse of `state_of`."""
    packed = state.query_state
    values: tuple[Any, ...] = (packed.components, packed.gate, packed.num_components, packed.component_width)
    values += (state.partition, state.offset, state.event_time_ms, state.applied_ms)
    words = [word for pair in zip(layout.STATE_FIELDS, values, strict=True) for word in pair]
    if state.traceparent:
        words += (layout.STATE_TRACE, layout.trace_text(state.partition, state.offset, state.traceparent))
    return words


def apply_words(
    update: UserUpdate, epoch: str, watermarks: Mapping[int, int], *, ttl_seconds: int, max_seen: int
) -> tuple[list[str], list[Any]]:
    """Return keys and arguments of the script APPLY. Those of REWRITE begin with them."""
    state, home = update.state, layout.home_of(update.user_id, epoch)
    keys = [
        layout.history_key(home),
        layout.seen_key(home),
        layout.state_key(home, update.model_version),
        layout.users_key(home.partition),
        layout.progress_key(home.partition),
    ]
    arguments: list[Any] = [
        update.expected,
        layout.pack_positions(epoch, update.positions, update.forgotten),
        ttl_seconds,
        stored_history.pack_events(update.events),
        stored_history.pack_recent(update.recent),
        max_seen,
        update.state_change,
        update.user_id,
        layout.pack_entry(update.positions.get(home.partition, -1), int(time.time()) + ttl_seconds),
        epoch,
        watermarks.get(home.partition, ""),
        "\0".join(update.turned_down),
        len(update.unseen),
        *update.unseen,
        len(update.seen_times),
    ]
    for item_id, event_time_ms in update.seen_times.items():
        arguments += (event_time_ms, item_id)
    if state is not None and update.state_change == "set":
        words = state_words(state)
        arguments += (len(words), *words)
    return keys, arguments


def forget_moves(
    forgets: ForgetsApplied | None, homes: Sequence[Home], epoch: str
) -> tuple[list[tuple[str, str, str]], dict[int, str]]:
    """Return REWRITE's last three arguments for each user, and the progress texts after the last user.

    forgets: None for a writer that does not apply the topic; the arguments are then empty.
    """
    if forgets is None:
        return [("", "", "")] * len(homes), {}
    texts, moves = dict(forgets.texts), []
    for home in homes:
        before = texts[home.partition]
        offset, rewritten = layout.unpack_forgets(epoch, before)
        texts[home.partition] = layout.forgets_text(epoch, offset, rewritten + 1)
        moves.append((forgets.reader, before, texts[home.partition]))
    return moves, texts


def popularity_words(step: PopularityStep | None, ttl_seconds: int) -> list[Any]:
    """Return ADVANCE's last arguments; none if no popular item changes."""
    if step is None or not (step.joins or step.goes):
        return []
    joins, goes = ([word for pair in some.items() for word in pair] for some in (step.joins, step.goes))
    return [step.half_life_s, layout.MAX_POPULAR, ttl_seconds, len(joins), *joins, *goes]

"""Values of the state store: views of a user, updates, progress; and Redis' errors."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from redis.exceptions import OutOfMemoryError

from services.contracts.query_state import PackedQueryState
from services.contracts.stored_history import PackedHistory, RecentId, StoredEvent
from services.platform.errors import DependencyUnavailable
from services.platform.redis_clients import REDIS_ERRORS, advice_on

DEFAULT_TTL_SECONDS = 90 * 24 * 3600
DEFAULT_MAX_SEEN = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """A user's query state, its newest applied position, and the newest event's time.

    traceparent: of the span that made it; "" if none was traced or asked for.
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

    seen: newest first. epoch: None before anything was applied. turned_down: seen items that their newest event
    rejects. watermark: of `partition`, the requested one or the user's home. reaches_history: the state reflects the
    whole history; false after the model's process was unavailable. is_lost: the store lost some of the user's data, not
    restored yet.
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
    """A user's stored history for the writer. `expected` is the position text that `apply` compares.

    forgotten: the last forgotten offset per partition, if any. is_lost: the store lost some data. known: the home
    partition's last offset in the table of users (-1: unknown).
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
    """A user's numbers of events and seen items, and the model versions with a state."""

    history_events: int
    seen_items: int
    state_model_versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserUpdate:
    """One user's next history, seen items and state, written together.

    turned_down: replaces the stored items. state_change: "set" writes `state`, "drop" deletes the model version's,
    "keep" changes nothing.
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

    change: as in `UserUpdate`. "keep" leaves the stored state; if it reflected the history position `before` (see
    `UserUpdate.expected`), it now reflects `positions`. "set" without a state records that the history has none of this
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
    """A partition's last applied offset (-1: none), and counts of its records' outcomes in this epoch.

    anchors: the writer's text that identifies the log, or "". unfinished: users written since the watermark moved.
    """

    watermark: int = -1
    unfinished: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    anchors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Some users' data, and progress when read.

    histories: of users in the store. lost: lost users.
    """

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
    """Added and removed levels of items (`algorithms.items.popularity`)."""

    half_life_s: float
    joins: Mapping[str, float] = field(default_factory=dict)
    goes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceStep:
    """Moves one partition's watermark, adds the counts of the records in between and their change of popularity.

    unfinished: users with their home here that the writer wrote since the last move; None if unknown. anchors: see
    `Progress`.
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
    """removed: keys evicted or expired since the store's start. memory_share: of the memory limit, 0 without one."""

    removed: int
    memory_share: float


@dataclass(slots=True)
class ForgetsApplied:
    """A reader's stored progress in `forgets`, one text per home partition.

    Writes compare and advance the text, so a node that lost writes in a failover is detected. offsets: per partition,
    the last record applied to all its users (-1: none).
    """

    reader: str
    offsets: dict[int, int]
    texts: dict[int, str]

    @property
    def offset(self) -> int:
        """The last record applied in all these partitions."""
        return min(self.offsets.values(), default=-1)

    def of(self, partitions: Collection[int]) -> "ForgetsApplied":
        """These partitions' progress only."""
        return ForgetsApplied(
            self.reader, {p: self.offsets[p] for p in partitions}, {p: self.texts[p] for p in partitions}
        )


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raises: DependencyUnavailable for the client's errors."""
    try:
        yield
    except OutOfMemoryError as exc:
        raise DependencyUnavailable("Redis is full and takes no writes: give it more memory (maxmemory)") from exc
    except REDIS_ERRORS as exc:
        reason = advice_on(exc) or f"{type(exc).__name__}: {exc}"
        raise DependencyUnavailable(f"Redis does not answer: {reason}") from exc


def now_ms() -> int:
    """This machine's time in Unix milliseconds."""
    return time.time_ns() // 1_000_000

"""What the state store gives and takes: views of a user, updates, progress. And what Redis' errors become."""

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
    """A user's query state and what it reflects: the newest applied position, the newest event's time.

    traceparent: of the span that made it; "" where no event of it was traced, or nobody wants to know.
    """

    query_state: PackedQueryState
    partition: int
    offset: int
    event_time_ms: int
    applied_ms: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserView:
    """What a recommendation needs to know of a user. seen: newest first. epoch None: no stream was applied yet.

    turned_down: the seen items that their newest event in the history speaks against.
    watermark: of `partition`, the one that was asked for, else the user's home.
    reaches_history: the state reflects the whole stored history; one of a model that was away for a while does not.
    is_lost: the store lost some of what it held of the user, and the encoder process has not brought it back yet.
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
    """A user's stored history as the writer needs it; `expected` is the position text that `apply` compares.

    forgotten: per partition, the last offset that was erased with the user; empty for who was never forgotten.
    is_lost: the store once held more of the user than this; known: the last offset of the home
    partition that the table of users says (-1: not known).
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
    """What is stored of a user: how many events and seen items, and the model versions that have a state."""

    history_events: int
    seen_items: int
    state_model_versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserUpdate:
    """One user's next history, seen items and state, written together.

    turned_down: as of `UserView`; what was stored before is replaced.
    state_change: "set" writes `state`, "drop" removes what is stored for the model version, "keep" leaves it alone.
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
    """A state of a model beside the writer's own, made of the history at these positions, as `UserHistory` has them.

    change: as of `UserUpdate`; "keep" lets a state that reflected `before` (of `expected`) reflect the positions, "set"
    without a state says that the model makes none of this history.
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
    """How far a partition is applied (-1: nothing yet), and what became of its records in this epoch.

    anchors: what the writer remembers of the partition's log, in its own form; "" where nothing is.
    unfinished: how many users were written since the watermark moved.
    """

    watermark: int = -1
    unfinished: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    anchors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What the store holds of some users, read together, and progress as it was when that was read.

    histories: of the users that it holds. lost: users of which it once held more.
    """

    histories: Mapping[str, PackedHistory]
    lost: Collection[str]
    progress: Mapping[int, Progress]


@dataclass(frozen=True, slots=True, kw_only=True)
class Popularity:
    """Items of a partition by level (`algorithms.items.popularity`), highest first."""

    half_life_s: float
    levels: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PopularityStep:
    """What records did to the popularity of items: levels (`algorithms.items.popularity`) that join, and that go."""

    half_life_s: float
    joins: Mapping[str, float] = field(default_factory=dict)
    goes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceStep:
    """Moves one partition's watermark, adding the counts of the records in between, and what they made popular.

    unfinished: how many users the writer wrote at home here since the watermark moved; None: it does not know.
    anchors: see `Progress`.
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
    """removed: keys that the store has evicted or let expire since it started. memory_share: how much of its limit is
    used, 1: full; 0 without a limit."""

    removed: int
    memory_share: float


@dataclass(slots=True)
class ForgetsApplied:
    """A reader's progress in `forgets` as the store has it, a text per home partition: each write of the reader is
    fenced by it and moves it on, so that a node that took over with users of before is told.

    offsets: by partition, the last record that is applied to all its users; -1: none yet.
    """

    reader: str
    offsets: dict[int, int]
    texts: dict[int, str]

    @property
    def offset(self) -> int:
        """The last record that is applied in all of these partitions."""
        return min(self.offsets.values(), default=-1)

    def of(self, partitions: Collection[int]) -> "ForgetsApplied":
        """The same, of these partitions alone."""
        return ForgetsApplied(
            self.reader, {p: self.offsets[p] for p in partitions}, {p: self.texts[p] for p in partitions}
        )


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raises: DependencyUnavailable for what the client raises."""
    try:
        yield
    except OutOfMemoryError as exc:
        raise DependencyUnavailable("Redis is full and takes no writes: give it more memory (maxmemory)") from exc
    except REDIS_ERRORS as exc:
        said = advice_on(exc) or f"{type(exc).__name__}: {exc}"
        raise DependencyUnavailable(f"Redis does not answer: {said}") from exc


def now_ms() -> int:
    """This machine's clock, Unix milliseconds."""
    return time.time_ns() // 1_000_000

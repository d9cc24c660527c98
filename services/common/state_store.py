"""User states in Redis: the gateway reads them in one round trip, the encoder process writes them exactly once.

Redis errors become DependencyUnavailable here; every wait is short. The reader is for an asyncio loop, the writer
for the encoder's own thread. What the keys and values look like is `state_layout`'s; what the states mean is not
known here.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from services.common import state_layout as layout
from services.common.errors import Conflict, DependencyUnavailable
from services.common.query_state import PackedQueryState
from services.common.state_layout import RecentId, StoredEvent

DEFAULT_TTL_SECONDS = 90 * 24 * 3600
DEFAULT_MAX_SEEN = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """A user's query state and what it reflects: the newest applied position, the newest event's time."""

    query_state: PackedQueryState
    partition: int
    offset: int
    event_time_ms: int
    applied_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserView:
    """What a recommendation needs to know of a user. seen: newest first. epoch None: no stream was applied yet.

    reaches_history: the state reflects the whole stored history; one of a model that was away for a while does not.
    """

    state: StoredState | None
    seen: list[str]
    epoch: str | None
    watermark: int | None
    has_history: bool = True
    reaches_history: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UserHistory:
    """A user's stored history as the writer needs it; `expected` is the position text that `apply` compares.

    forgotten: per partition, the last offset that was erased with the user; empty for who was never forgotten.
    """

    events: list[StoredEvent] = field(default_factory=list)
    recent: list[RecentId] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    forgotten: dict[int, int] = field(default_factory=dict)
    expected: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserKeys:
    """What is stored of a user: how many events and seen items, and the model versions that have a state."""

    history_events: int
    seen_items: int
    state_model_versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserUpdate:
    """One user's next history, seen items and state, written together.

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
    forgotten: Mapping[int, int] = field(default_factory=dict)
    state: StoredState | None = None
    state_change: Literal["set", "drop", "keep"] = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a partition is applied (-1: nothing yet), and what became of its records in this epoch.

    anchors: what the writer remembers of the partition's log, in its own form; "" where nothing is.
    """

    watermark: int = -1
    counts: Mapping[str, int] = field(default_factory=dict)
    anchors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceStep:
    """Moves one partition's watermark, adding the counts of the records in between. anchors: see `Progress`."""

    partition: int
    from_watermark: int
    to_watermark: int
    counts: Mapping[str, int]
    anchors: str = ""


@contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as exc:
        raise DependencyUnavailable(f"Redis does not answer: {type(exc).__name__}: {exc}") from exc


def _state(values: Sequence[bytes | None], model_version: str) -> StoredState | None:
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
    )


def _progress(values: Sequence[bytes | None], epoch: bytes | None) -> Progress:
    """values: epoch, watermark, then COUNT_FIELDS."""
    if epoch is None or values[0] != epoch:
        return Progress()
    counts = {name: int(value or 0) for name, value in zip(layout.COUNT_FIELDS, values[2:], strict=True)}
    return Progress(watermark=int(values[1] or -1), counts=counts)


class StateReader:
    """Reads users for an asyncio process. Connects when first used."""

    def __init__(self, url: str, *, timeout_s: float = 0.25, max_connections: int = 64) -> None:
        self._redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=max_connections,
            # One more try on a connection that Redis closed while it idled; never on a timeout.
            retry=AsyncRetry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )

    async def read_user(
        self, user_id: str, model_version: str, *, with_seen: bool = True, partition: int | None = None
    ) -> UserView:
        """State, seen items, epoch and (with a partition) that partition's watermark, in one round trip.

        Raises: DependencyUnavailable.
        """
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(layout.EPOCH_KEY)
        # Before the state: other clients' commands may run in between, and a watermark read later than the state
        # could promise an event that the state does not hold.
        if partition is not None:
            pipeline.hmget(layout.progress_key(partition), ("epoch", "watermark"))
        # Before the state as well: a state that is newer than this position reaches it, an older one is told.
        pipeline.hget(layout.history_key(user_id), "position")
        pipeline.hmget(layout.state_key(user_id, model_version), (*layout.STATE_FIELDS, layout.STATE_POSITION))
        if with_seen:
            pipeline.eval(layout.READ_SEEN, 1, layout.seen_key(user_id))
        with _redis_errors():
            replies = await pipeline.execute()
        seen: bytes = replies.pop() if with_seen else b""
        *state_values, state_position = replies.pop()
        history_position: bytes | None = replies.pop()
        state = _state(state_values, model_version)
        epoch: bytes | None = replies[0]
        watermark = None
        if partition is not None and epoch is not None:
            found_epoch, found = replies[1]
            watermark = int(found) if found_epoch == epoch and found is not None else -1
        return UserView(
            state=state,
            seen=seen.decode().split("\0") if seen else [],
            epoch=epoch.decode() if epoch is not None else None,
            watermark=watermark,
            has_history=bool(history_position),
            reaches_history=state is not None
            and layout.reaches(state_position, state.partition, state.offset, history_position),
        )

    async def read_progress(self, num_partitions: int) -> tuple[str | None, dict[int, Progress]]:
        """The epoch and every partition's progress. Raises: DependencyUnavailable."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(layout.EPOCH_KEY)
        for partition in range(num_partitions):
            pipeline.hmget(layout.progress_key(partition), ("epoch", "watermark", *layout.COUNT_FIELDS))
        with _redis_errors():
            epoch, *rows = await pipeline.execute()
        progress = {partition: _progress(row, epoch) for partition, row in enumerate(rows)}
        return (epoch.decode() if epoch is not None else None), progress

    async def read_events(self, user_id: str) -> list[StoredEvent]:
        """The user's history, oldest first; empty when none is stored. Raises: DependencyUnavailable."""
        with _redis_errors():
            blob = await cast(Awaitable[bytes | None], self._redis.hget(layout.history_key(user_id), "events"))
        return layout.unpack_events(blob)

    async def read_keys(self, user_id: str) -> UserKeys:
        """What is stored of the user, in two round trips. Raises: DependencyUnavailable."""
        with _redis_errors():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hget(layout.history_key(user_id), "events")
            pipeline.zcard(layout.seen_key(user_id))
            pipeline.smembers(layout.MODELS_KEY)
            events, seen_items, models = await pipeline.execute()
            versions = sorted(model.decode() for model in models)
            pipeline = self._redis.pipeline(transaction=False)
            for version in versions:
                pipeline.exists(layout.state_key(user_id, version))
            stored = await pipeline.execute() if versions else []
        return UserKeys(
            history_events=len(layout.unpack_events(events)),
            seen_items=seen_items,
            state_model_versions=tuple(v for v, found in zip(versions, stored, strict=True) if found),
        )

    async def ping(self) -> None:
        """Raises: DependencyUnavailable when Redis does not answer."""
        with _redis_errors():
            await self._redis.ping()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


class StateWriter:
    """Writes users and progress for the encoder's thread. Connects when first used; not for use by two threads."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        ttl_seconds: int = DEFAULT_TTL_SECONDS,
        max_seen: int = DEFAULT_MAX_SEEN,
    ) -> None:
        self._redis: redis.Redis = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )
        self._ttl_seconds = ttl_seconds
        self._max_seen = max_seen
        self._scripts: dict[str, str] = {}

    def epoch(self) -> str | None:
        """The current epoch, None when Redis has none. Raises: DependencyUnavailable."""
        with _redis_errors():
            found = cast(bytes | None, self._redis.get(layout.EPOCH_KEY))
        return found.decode() if found is not None else None

    def ensure_epoch(self) -> tuple[str, bool]:
        """The current epoch, made when missing, and whether it was made now. Raises: DependencyUnavailable."""
        with _redis_errors():
            made = bool(self._redis.set(layout.EPOCH_KEY, secrets.token_hex(8), nx=True))
            found = cast(bytes | None, self._redis.get(layout.EPOCH_KEY))
        if found is None:
            raise Conflict("the epoch vanished while it was made")
        return found.decode(), made

    def hold(self, seconds: int) -> None:
        """Ask whoever applies the stream to wait, for so long unless asked again. Raises: DependencyUnavailable."""
        with _redis_errors():
            self._redis.set(layout.HOLD_KEY, "1", ex=seconds)

    def release(self) -> None:
        """Take `hold` back. Raises: DependencyUnavailable."""
        with _redis_errors():
            self._redis.delete(layout.HOLD_KEY)

    def is_held(self) -> bool:
        """Whether the stream is to wait. Raises: DependencyUnavailable."""
        with _redis_errors():
            return bool(self._redis.exists(layout.HOLD_KEY))

    def progress(self, partitions: Collection[int], epoch: str) -> dict[int, Progress]:
        """Progress of the partitions in this epoch. Raises: DependencyUnavailable."""
        pipeline = self._redis.pipeline(transaction=False)
        for partition in partitions:
            pipeline.hmget(layout.progress_key(partition), ("epoch", "watermark", *layout.COUNT_FIELDS, "anchors"))
        with _redis_errors():
            rows = pipeline.execute() if partitions else []
        return {
            p: replace(
                _progress(row, epoch.encode()), anchors=(anchors or b"").decode() if row[0] == epoch.encode() else ""
            )
            for p, (*row, anchors) in zip(partitions, rows, strict=True)
        }

    def begin_anew(self, epoch: str) -> None:
        """Erase every user and put a new epoch in the place of `epoch`; nothing where that is not the current one.

        Until the end it may be done again: the old epoch stands. Raises: DependencyUnavailable.
        """
        with _redis_errors():
            if self._redis.get(layout.EPOCH_KEY) != epoch.encode():
                return
            pipeline = self._redis.pipeline(transaction=False)
            for key in self._redis.scan_iter(match=layout.USER_KEYS, count=1000):
                pipeline.unlink(key)
                if len(pipeline) >= 1000:
                    pipeline.execute()
            pipeline.execute()
            self._redis.eval(layout.REPLACE_EPOCH, 1, layout.EPOCH_KEY, epoch, secrets.token_hex(8))

    def load_users(self, user_ids: Collection[str], epoch: str) -> dict[str, UserHistory]:
        """The users' histories in one round trip; an unknown user's is empty. Raises: DependencyUnavailable."""
        pipeline = self._redis.pipeline(transaction=False)
        for user_id in user_ids:
            pipeline.hmget(layout.history_key(user_id), ("position", "events", "recent", "recent_items"))
        with _redis_errors():
            rows = pipeline.execute() if user_ids else []
        return {user_id: _history(epoch, *row) for user_id, row in zip(user_ids, rows, strict=True)}

    def apply(self, updates: Sequence[UserUpdate], epoch: str) -> None:
        """Write every update whose `expected` position still holds, each atomically, in one round trip.

        Raises: Conflict when another writer was quicker with some of them (the others are written; merging the same
        records again then skips what is applied); DependencyUnavailable.
        """

        def queue(pipeline: Any, sha: str) -> None:
            for update in updates:
                pipeline.evalsha(sha, 3, *self._apply_arguments(update, epoch))

        replies = self._run_script(layout.APPLY, queue) if updates else []
        lost = sum(1 for reply in replies if reply != 1)
        if lost:
            raise Conflict(f"{lost} of {len(updates)} users were changed by another writer")

    def forget(self, updates: Sequence[UserUpdate], epoch: str) -> None:
        """Erase all that is stored of each user, states of every model version included, and write the update in its
        place, in one transaction per user; a user without a history (`expected` is empty) is only erased.

        Raises: Conflict when another writer was quicker with some of them; DependencyUnavailable.
        """
        lost = 0
        with _redis_errors():
            models = sorted(model.decode() for model in cast(set[bytes], self._redis.smembers(layout.MODELS_KEY)))
            for update in updates:
                keys = [layout.history_key(update.user_id), layout.seen_key(update.user_id)]
                keys += [layout.state_key(update.user_id, version) for version in {*models, update.model_version}]
                pipeline = self._redis.pipeline(transaction=True)
                pipeline.eval(layout.ERASE, len(keys), *keys, update.expected)
                if update.expected:
                    pipeline.eval(layout.APPLY, 3, *self._apply_arguments(replace(update, expected=b""), epoch))
                lost += any(reply != 1 for reply in pipeline.execute())
        if lost:
            raise Conflict(f"{lost} of {len(updates)} users were changed by another writer")

    def add_model(self, model_version: str) -> None:
        """Name a model version before its first state is stored, so that a forget finds them all. Idempotent."""
        with _redis_errors():
            self._redis.sadd(layout.MODELS_KEY, model_version)

    def forgets_applied(self, reader: str, epoch: str) -> int:
        """The last record of `forgets` that `reader` applied to this store in this epoch; -1: none yet."""
        with _redis_errors():
            found = cast(bytes | None, self._redis.hget(layout.FORGETS_KEY, reader))
        written, _, offset = (found or b"").decode().partition("|")
        return int(offset) if found and written == epoch else -1

    def set_forgets_applied(self, reader: str, offset: int, epoch: str) -> None:
        """Note that `reader` applied `forgets` up to this offset. Raises: DependencyUnavailable."""
        with _redis_errors():
            self._redis.hset(layout.FORGETS_KEY, reader, f"{epoch}|{offset}")

    def advance(self, steps: Sequence[AdvanceStep], epoch: str) -> None:
        """Move watermarks and add counts, once: a step whose from_watermark no longer holds is not taken.

        Raises: Conflict when some step was not taken; DependencyUnavailable.
        """

        def queue(pipeline: Any, sha: str) -> None:
            for step in steps:
                counts = [word for name, count in step.counts.items() if count for word in (name, count)]
                key = layout.progress_key(step.partition)
                pipeline.evalsha(sha, 1, key, epoch, step.from_watermark, step.to_watermark, step.anchors, *counts)

        replies = self._run_script(layout.ADVANCE, queue) if steps else []
        lost = [step.partition for step, reply in zip(steps, replies, strict=True) if reply != 1]
        if lost:
            raise Conflict(f"the watermark of partitions {lost} was moved by another writer or lost")

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _apply_arguments(self, update: UserUpdate, epoch: str) -> list[Any]:
        state = update.state
        arguments: list[Any] = [
            layout.history_key(update.user_id),
            layout.seen_key(update.user_id),
            layout.state_key(update.user_id, update.model_version),
            update.expected,
            layout.pack_positions(epoch, update.positions, update.forgotten),
            self._ttl_seconds,
            layout.pack_events(update.events),
            layout.pack_recent(update.recent),
            layout.pack_recent_items(update.recent),
            self._max_seen,
            update.state_change,
            len(update.unseen),
            *update.unseen,
            len(update.seen_times),
        ]
        for item_id, event_time_ms in update.seen_times.items():
            arguments += (event_time_ms, item_id)
        if state is not None and update.state_change == "set":
            packed = state.query_state
            values: tuple[Any, ...] = (packed.components, packed.gate, packed.num_components, packed.component_width)
            values += (state.partition, state.offset, state.event_time_ms, state.applied_ms)
            for name, value in zip(layout.STATE_FIELDS, values, strict=True):
                arguments += (name, value)
        return arguments

    def _run_script(self, script: str, queue: Callable[[Any, str], None]) -> list[Any]:
        """Run a pipeline of one script's calls; a Redis that restarted has forgotten the script and gets it again."""
        with _redis_errors():
            for attempt in (1, 2):
                sha = self._scripts.get(script)
                if sha is None:
                    sha = self._scripts[script] = self._redis.script_load(script)
                pipeline = self._redis.pipeline(transaction=False)
                queue(pipeline, sha)
                try:
                    return pipeline.execute()
                except NoScriptError:
                    del self._scripts[script]
                    if attempt == 2:
                        raise
        raise AssertionError("unreachable")


def _history(
    epoch: str, position: bytes | None, events: bytes | None, recent: bytes | None, recent_items: bytes | None
) -> UserHistory:
    found = layout.unpack_positions(epoch, position)
    if found is None:
        return UserHistory(expected=position or b"")
    positions, forgotten = found
    return UserHistory(
        events=layout.unpack_events(events),
        recent=layout.unpack_recent(recent, recent_items),
        positions=positions,
        forgotten=forgotten,
        expected=position or b"",
    )


def now_ms() -> int:
    """This machine's clock, Unix milliseconds."""
    return time.time_ns() // 1_000_000

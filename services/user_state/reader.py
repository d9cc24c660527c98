"""Read user states in an event loop, one round trip per user."""

import time
from collections.abc import Awaitable, Callable
from typing import cast

from redis.exceptions import NoScriptError

from services.contracts import stored_history
from services.contracts.stored_history import StoredEvent
from services.platform.redis_clients import open_async_client
from services.platform.stream.kafka import partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state import layout, scripts
from services.user_state.layout import Home
from services.user_state.values import (
    PROGRESS_FIELDS,
    Popularity,
    Progress,
    UserKeys,
    UserView,
    is_lost_user,
    progress_of,
    redis_errors,
    state_of,
)


class StateReader:
    """Reads users for an asyncio process; connects on first use.

    Every method raises DependencyUnavailable, and PreconditionFailed for another version's store.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.25,
        max_connections: int = 64,
        with_traces: bool = False,
        on_read: Callable[[float, bool], None] = lambda seconds, failed: None,
    ) -> None:
        """with_traces: states include the span that made them. on_read: called after each `read_user`."""
        self._redis = open_async_client(url, timeout_s=timeout_s, max_connections=max_connections)
        self._on_read = on_read
        # The last answer's epoch, which determines homes and rarely changes.
        self._epoch = ""
        # Home partitions that had progress. If the progress is missing later, the store lost it.
        self._applied = set[int]()
        self._script = ""
        self._read_popular = self._redis.register_script(scripts.READ_POPULAR)
        self._state_fields: tuple[str, ...] = (
            *layout.STATE_FIELDS,
            *(layout.STATE_TRACE,) * with_traces,
            layout.STATE_POSITION,
        )

    async def read_user(
        self, user_id: str, model_version: str, *, with_seen: bool = True, partition: int | None = None
    ) -> UserView:
        """Read state, seen items, epoch and a watermark in one round trip.

        partition: the partition of the watermark. None means the user's home; another one needs a second round trip.
        """
        began, failed = time.perf_counter(), True
        try:
            # A local copy: a concurrent call may set a new epoch meanwhile.
            epoch = self._epoch or await self._current_epoch()
            while epoch:
                view, found = await self._read_user(user_id, model_version, with_seen, partition, epoch)
                self._epoch = found if found == epoch else _checked(found)
                if found == epoch:
                    failed = False
                    return view
                epoch = found
            failed = False
        finally:
            self._on_read(time.perf_counter() - began, failed)
        home = partition_for(user_id.encode(), NUM_PARTITIONS)
        asked = home if partition is None else partition
        is_lost = home in self._applied
        return UserView(state=None, seen=[], epoch=None, watermark=None, partition=asked, is_lost=is_lost)

    async def _read_user(
        self, user_id: str, model_version: str, with_seen: bool, partition: int | None, read_in: str
    ) -> tuple[UserView, str]:
        """The view in the epoch `read_in`, and the current epoch. If they differ, the view is invalid."""
        home = layout.home_of(user_id, read_in)
        asked = home.partition if partition is None else partition
        keys = (
            layout.history_key(home),
            layout.seen_key(home),
            layout.state_key(home, model_version),
            layout.users_key(home.partition),
            layout.progress_key(home.partition),
        )
        wanted: tuple[str | int, ...] = (user_id, read_in, int(with_seen), *self._state_fields)
        elsewhere: list[bytes | None] | None = None
        with redis_errors():
            if asked != home.partition:
                # The watermark is read before the state; otherwise it could cover an event that the state lacks. The
                # script cannot read the watermark, because its key has another hash slot.
                progress = self._redis.hmget(layout.progress_key(asked), ["epoch", "watermark"])
                elsewhere = await cast(Awaitable[list[bytes | None]], progress)
            for attempt in (1, 2):
                if not self._script:
                    self._script = await self._redis.script_load(scripts.READ_USER)
                pipeline = self._redis.pipeline(transaction=False)
                pipeline.get(layout.EPOCH_KEY)
                pipeline.evalsha(self._script, len(keys), *keys, *wanted)
                try:
                    replies = await pipeline.execute()
                    break
                except NoScriptError:
                    self._script = ""
                    if attempt == 2:
                        raise
        found_epoch: bytes | None = replies[0]
        entry, position, event_bytes, num_seen, seen, (*found, state_position), at_home, turned_down = replies[1]
        of_epoch, applied = elsewhere or at_home
        was_applied = home.partition in self._applied
        is_applied = at_home[0] == found_epoch and int(at_home[1] or -1) >= 0
        if is_applied:
            self._applied.add(home.partition)
        num_fields = len(layout.STATE_FIELDS)
        state = state_of(found[:num_fields], model_version, *found[num_fields:])
        epoch = (found_epoch or b"").decode()
        view = UserView(
            state=state,
            seen=seen.decode().split("\0") if seen else [],
            epoch=epoch,
            watermark=int(applied) if of_epoch == found_epoch and applied is not None else -1,
            partition=asked,
            has_history=bool(position),
            reaches_history=state is not None and layout.reaches(state_position, position),
            is_lost=(was_applied and not is_applied)
            or is_lost_user(epoch, home, entry, position, events=event_bytes > 0, seen=num_seen > 0),
            turned_down=turned_down.decode().split("\0") if turned_down else (),
        )
        return view, epoch

    async def _current_epoch(self) -> str:
        with redis_errors():
            found = cast(bytes | None, await self._redis.get(layout.EPOCH_KEY))
        return _checked((found or b"").decode())

    async def last_epoch(self) -> str:
        """Return the last answer's epoch, or else the epoch in Redis; "" if there is none."""
        if not self._epoch:
            self._epoch = await self._current_epoch()
        return self._epoch

    async def _home(self, user_id: str) -> Home | None:
        epoch = await self._current_epoch()
        return layout.home_of(user_id, epoch) if epoch else None

    async def epoch(self) -> str | None:
        return await self._current_epoch() or None

    async def read_progress(self) -> tuple[str | None, dict[int, Progress]]:
        epoch = await self._current_epoch()
        pipeline = self._redis.pipeline(transaction=False)
        for partition in range(layout.num_partitions_of(epoch) if epoch else 0):
            pipeline.hmget(layout.progress_key(partition), PROGRESS_FIELDS)
        with redis_errors():
            rows = await pipeline.execute()
        return epoch or None, {partition: progress_of(row, epoch.encode()) for partition, row in enumerate(rows)}

    async def read_events(self, user_id: str) -> list[StoredEvent]:
        """The user's history, oldest event first."""
        home = await self._home(user_id)
        if home is None:
            return []
        with redis_errors():
            blob = await cast(Awaitable[bytes | None], self._redis.hget(layout.history_key(home), "events"))
        return stored_history.unpack_events(blob)

    async def read_keys(self, user_id: str) -> UserKeys:
        home = await self._home(user_id)
        if home is None:
            return UserKeys(history_events=0, seen_items=0, state_model_versions=())
        with redis_errors():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hget(layout.history_key(home), "events")
            pipeline.zcard(layout.seen_key(home))
            pipeline.smembers(layout.MODELS_KEY)
            events, seen_items, models = await pipeline.execute()
            versions = sorted(model.decode() for model in models)
            pipeline = self._redis.pipeline(transaction=False)
            for version in versions:
                pipeline.exists(layout.state_key(home, version))
            stored = await pipeline.execute() if versions else []
        return UserKeys(
            history_events=len(stored_history.unpack_events(events)),
            seen_items=seen_items,
            state_model_versions=tuple(v for v, found in zip(versions, stored, strict=True) if found),
        )

    async def read_popular(self) -> list[Popularity]:
        epoch = await self._current_epoch()
        found = []
        for partition in range(layout.num_partitions_of(epoch) if epoch else 0):
            keys = (layout.progress_key(partition), layout.popular_key(partition))
            # One partition at a time: other tasks run in between.
            with redis_errors():
                half_life, text = await cast(
                    Awaitable[list[bytes]], self._read_popular(keys=keys, args=[epoch], client=self._redis)
                )
            if text:
                words = text.decode().split("\0")
                levels = dict(zip(words[::2], map(float, words[1::2]), strict=True))
                found.append(Popularity(half_life_s=float(half_life), levels=levels))
        return found

    async def ping(self) -> None:
        with redis_errors():
            await self._redis.ping()

    async def close(self) -> None:
        await self._redis.aclose()


def _checked(epoch: str) -> str:
    """The epoch, "" for none. Raises: PreconditionFailed if another version wrote it."""
    if epoch:
        layout.num_partitions_of(epoch)
    return epoch

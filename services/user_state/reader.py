"""User states for an event loop: the gateway reads them in one round trip; Redis errors are DependencyUnavailable."""

from collections.abc import Awaitable
from typing import cast

from redis.exceptions import NoScriptError

from services.contracts import stored_history
from services.contracts.stored_history import StoredEvent
from services.platform.redis_clients import open_async_client
from services.platform.stream.kafka import partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state import layout, scripts
from services.user_state.layout import Home
from services.user_state.stored_values import PROGRESS_FIELDS, is_lost_user, progress_of, state_of
from services.user_state.values import Popularity, Progress, UserKeys, UserView, redis_errors


class StateReader:
    """Reads users for an asyncio process. Connects when first used."""

    def __init__(
        self, url: str, *, timeout_s: float = 0.25, max_connections: int = 64, with_traces: bool = False
    ) -> None:
        """with_traces: states say which span made them."""
        self._redis = open_async_client(url, timeout_s=timeout_s, max_connections=max_connections)
        # As of the last answer. It says where users are at home, and changes hardly ever.
        self._epoch = ""
        # Home partitions of which something was applied when they were read: where nothing is now, the store lost it.
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
        """State, seen items, epoch and a partition's watermark (None: of the user's home), in one round trip; another
        partition's takes one more.

        Raises: DependencyUnavailable; PreconditionFailed for another version's store.
        """
        # This call's own: another one may learn of a new epoch while this one waits for an answer of the former.
        epoch = self._epoch or await self._current_epoch()
        while epoch:
            view, found = await self._read_user(user_id, model_version, with_seen, partition, epoch)
            self._epoch = found if found == epoch else _checked(found)
            if found == epoch:
                return view
            epoch = found
        home = partition_for(user_id.encode(), NUM_PARTITIONS)
        asked = home if partition is None else partition
        is_lost = home in self._applied
        return UserView(state=None, seen=[], epoch=None, watermark=None, partition=asked, is_lost=is_lost)

    async def _read_user(
        self, user_id: str, model_version: str, with_seen: bool, partition: int | None, read_in: str
    ) -> tuple[UserView, str]:
        """The view as of the epoch `read_in`, and the current epoch; if it is another one, the view says nothing."""
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
                # Before the state: a watermark read later than the state could promise an event that the state does not
                # hold. It lies in another slot, perhaps on another node.
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
        """Empty when there is none. Raises: DependencyUnavailable; PreconditionFailed for another version's epoch."""
        with redis_errors():
            found = cast(bytes | None, await self._redis.get(layout.EPOCH_KEY))
        return _checked((found or b"").decode())

    async def last_epoch(self) -> str:
        """The epoch as of the last answer; "" before there is one. Raises: DependencyUnavailable."""
        if not self._epoch:
            self._epoch = await self._current_epoch()
        return self._epoch

    async def _home(self, user_id: str) -> Home | None:
        epoch = await self._current_epoch()
        return layout.home_of(user_id, epoch) if epoch else None

    async def epoch(self) -> str | None:
        """The current epoch; None before anything was applied. Raises: DependencyUnavailable, PreconditionFailed."""
        return await self._current_epoch() or None

    async def read_progress(self) -> tuple[str | None, dict[int, Progress]]:
        """The epoch and every partition's progress; none where nothing was applied. Raises: DependencyUnavailable."""
        epoch = await self._current_epoch()
        pipeline = self._redis.pipeline(transaction=False)
        for partition in range(layout.num_partitions_of(epoch) if epoch else 0):
            pipeline.hmget(layout.progress_key(partition), PROGRESS_FIELDS)
        with redis_errors():
            rows = await pipeline.execute()
        return epoch or None, {partition: progress_of(row, epoch.encode()) for partition, row in enumerate(rows)}

    async def read_events(self, user_id: str) -> list[StoredEvent]:
        """The user's history, oldest first; empty when none is stored. Raises: DependencyUnavailable."""
        home = await self._home(user_id)
        if home is None:
            return []
        with redis_errors():
            blob = await cast(Awaitable[bytes | None], self._redis.hget(layout.history_key(home), "events"))
        return stored_history.unpack_events(blob)

    async def read_keys(self, user_id: str) -> UserKeys:
        """What is stored of the user, in three round trips. Raises: DependencyUnavailable."""
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
        """What is popular in each partition that something was applied of. Raises: DependencyUnavailable."""
        epoch = await self._current_epoch()
        found = []
        for partition in range(layout.num_partitions_of(epoch) if epoch else 0):
            keys = (layout.progress_key(partition), layout.popular_key(partition))
            # One at a time: others' work goes on between two of them.
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
        """Raises: DependencyUnavailable when Redis does not answer."""
        with redis_errors():
            await self._redis.ping()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def _checked(epoch: str) -> str:
    """The epoch; "" is none. Raises: PreconditionFailed for another version's."""
    if epoch:
        layout.num_partitions_of(epoch)
    return epoch

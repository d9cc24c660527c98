"""The port `Store` over Redis, for the encoder's thread."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from redis.exceptions import NoScriptError

from services.contracts.stored_history import PackedHistory
from services.platform.errors import Conflict
from services.platform.redis_clients import open_client
from services.user_state import layout, scripts
from services.user_state.layout import Home, check_epoch
from services.user_state.values import (
    DEFAULT_MAX_SEEN,
    DEFAULT_TTL_SECONDS,
    HISTORY_FIELDS,
    PROGRESS_FIELDS,
    AdvanceStep,
    Dump,
    ForgetsApplied,
    ModelState,
    Progress,
    StoreUsage,
    UserHistory,
    UserUpdate,
    apply_words,
    dumped_history,
    forget_moves,
    history_of,
    is_lost_user,
    popularity_words,
    progress_of,
    redis_errors,
    state_words,
)

# A script, its keys and its arguments.
Call = tuple[str, Sequence[str], Sequence[Any]]


class _Scripts:
    """Runs scripts in pipelines of one client."""

    def __init__(self) -> None:
        self._hashes: dict[str, str] = {}

    def run(self, redis: Any, calls: Sequence[Call], then: Callable[[Any], None] | None = None) -> list[Any]:
        """Run these calls in one pipeline and return the replies. Load the scripts again into a restarted Redis.

        then: adds commands to the pipeline. Raises: DependencyUnavailable.
        """
        if not calls and then is None:
            return []
        with redis_errors():
            for attempt in (1, 2):
                pipeline = redis.pipeline(transaction=False)
                for script, keys, arguments in calls:
                    if script not in self._hashes:
                        self._hashes[script] = redis.script_load(script)
                    pipeline.evalsha(self._hashes[script], len(keys), *keys, *arguments)
                if then is not None:
                    then(pipeline)
                try:
                    return list(pipeline.execute())
                except NoScriptError:
                    self._hashes.clear()
                    if attempt == 2:
                        raise
        raise AssertionError("unreachable")


class StateWriter:
    """Implements `Store` and connects on first use. Every method raises DependencyUnavailable if Redis fails."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        ttl_seconds: int = DEFAULT_TTL_SECONDS,
        max_seen: int = DEFAULT_MAX_SEEN,
    ) -> None:
        self._redis = open_client(url, timeout_s=timeout_s)
        self._ttl_seconds = ttl_seconds
        self._max_seen = max_seen
        self._scripts = _Scripts()

    def epoch(self) -> str | None:
        with redis_errors():
            found = cast(bytes | None, self._redis.get(layout.EPOCH_KEY))
        return found.decode() if found is not None else None

    def ensure_epoch(self, num_partitions: int) -> tuple[str, bool]:
        """Also raises Conflict if the epoch is deleted meanwhile."""
        with redis_errors():
            made = bool(self._redis.set(layout.EPOCH_KEY, layout.new_epoch(num_partitions), nx=True))
            found = cast(bytes | None, self._redis.get(layout.EPOCH_KEY))
        if found is None:
            raise Conflict("the epoch was deleted while it was created")
        epoch = found.decode()
        check_epoch(epoch, num_partitions)
        return epoch, made

    def pause_consumer(self, seconds: int) -> None:
        with redis_errors():
            self._redis.set(layout.PAUSE_KEY, "1", ex=seconds)

    def release(self) -> None:
        with redis_errors():
            self._redis.delete(layout.PAUSE_KEY)

    def is_paused(self) -> bool:
        with redis_errors():
            return bool(self._redis.exists(layout.PAUSE_KEY))

    def progress(self, partitions: Collection[int], epoch: str) -> dict[int, Progress]:
        return _progress_of(partitions, self._progress_rows(partitions), epoch)

    def begin(self, partitions: Sequence[int], epoch: str) -> dict[int, Progress]:
        rows = self._progress_rows(partitions)
        # The epoch is read after the progress, so BEGIN fails if another process began a newer one in between.
        if self.epoch() != epoch:
            raise Conflict(f"the state store's epoch is not {epoch} any more")
        calls: list[Call] = [
            (scripts.BEGIN, (layout.progress_key(p), layout.popular_key(p)), (row[0] or b"", epoch))
            for p, row in zip(partitions, rows, strict=True)
            if row[0] != epoch.encode()
        ]
        if 0 in self._scripts.run(self._redis, calls):
            raise Conflict("another writer began an epoch")
        return _progress_of(partitions, rows, epoch)

    def start_new_epoch(self, epoch: str) -> None:
        """The epoch is replaced last, so a failed call can be repeated."""
        with redis_errors():
            if self._redis.get(layout.EPOCH_KEY) != epoch.encode():
                return
            pipeline = self._redis.pipeline(transaction=False)
            for key in self._redis.scan_iter(match=layout.USER_KEYS, count=1000):
                pipeline.unlink(key)
                if len(pipeline) >= 1000:
                    pipeline.execute()
            pipeline.execute()
            after = layout.new_epoch(layout.num_partitions_of(epoch))
            self._redis.eval(scripts.REPLACE_EPOCH, 1, layout.EPOCH_KEY, epoch, after)

    def load_users(self, user_ids: Collection[str], epoch: str) -> dict[str, UserHistory]:
        if not user_ids:
            return {}
        homes = [layout.home_of(user_id, epoch) for user_id in user_ids]
        of_partition: dict[int, list[str]] = {}
        for partition, user_id in homes:
            of_partition.setdefault(partition, []).append(user_id)
        pipeline = self._redis.pipeline(transaction=False)
        for partition, users in of_partition.items():
            pipeline.hmget(layout.users_key(partition), [layout.TABLE_EPOCH, *users])
        for home in homes:
            pipeline.hmget(layout.history_key(home), HISTORY_FIELDS)
            pipeline.exists(layout.seen_key(home))
        with redis_errors():
            replies = pipeline.execute()
        entries: dict[str, bytes | None] = {}
        for users, (of_epoch, *found) in zip(of_partition.values(), replies, strict=False):
            if of_epoch == epoch.encode():
                entries.update(zip(users, found, strict=True))
        rest = replies[len(of_partition) :]
        return {
            home.user_id: history_of(epoch, home, entries.get(home.user_id), row, has_seen=bool(has_seen))
            for home, row, has_seen in zip(homes, rest[::2], rest[1::2], strict=True)
        }

    def are_whole(self, user_ids: Sequence[str], model_version: str, epoch: str) -> dict[str, bool]:
        """Return for each user with events whether the state of this model is complete or known not to exist."""
        pipeline = self._redis.pipeline(transaction=False)
        for user_id in user_ids:
            home = layout.home_of(user_id, epoch)
            pipeline.hget(layout.history_key(home), "position")
            pipeline.hstrlen(layout.history_key(home), "events")
            pipeline.hget(layout.state_key(home, model_version), layout.STATE_POSITION)
        with redis_errors():
            replies = pipeline.execute()
        found = {}
        for user_id, position, size, reached in zip(user_ids, replies[::3], replies[1::3], replies[2::3], strict=True):
            if size and layout.unpack_positions(epoch, position):
                found[user_id] = layout.reaches(reached, position)
        return found

    def find_lost(self, partitions: Collection[int], epoch: str) -> Iterator[Collection[str]]:
        """Cost: Redis takes 7 microseconds per user, at 100,000 users."""
        now_s = time.time()
        for partition in partitions:
            cursor = b""
            while cursor != b"0":
                with redis_errors():
                    cursor, *found = cast(
                        list[bytes],
                        self._redis.eval(
                            scripts.FIND_LOST,
                            1,
                            layout.users_key(partition),
                            cursor or b"0",
                            "1000",
                            epoch,
                            layout.history_key(Home(partition, "")),
                            layout.seen_key(Home(partition, "")),
                        ),
                    )
                    users = dict(zip(found[::2], found[1::2], strict=True))
                    gone = [user for user, entry in users.items() if layout.unpack_entry(entry, now_s) is None]
                    if gone:  # expired as intended
                        self._redis.hdel(layout.users_key(partition), *gone)
                yield [user.decode() for user in users.keys() - gone]

    def usage(self) -> StoreUsage:
        with redis_errors():
            found = cast(Mapping[str, int], self._redis.info())
        share = found["used_memory"] / found["maxmemory"] if found["maxmemory"] else 0.0
        return StoreUsage(found["evicted_keys"] + found["expired_keys"], share)

    def apply(
        self,
        updates: Sequence[UserUpdate],
        epoch: str,
        watermarks: Mapping[int, int],
        beside: Sequence[ModelState] = (),
    ) -> None:
        """Each update is atomic; all take one round trip.

        After a Conflict the other users are written; merging the same records again does not change them.
        """
        calls: list[Call] = [(scripts.APPLY, *self._apply_words(update, epoch, watermarks)) for update in updates]
        replies = self._scripts.run(self._redis, calls + [self._write_state(one, epoch) for one in beside])
        _check_written(replies[: len(updates)])

    def store_states(self, states: Sequence[ModelState], epoch: str) -> int:
        return sum(self._scripts.run(self._redis, [self._write_state(one, epoch) for one in states]))

    def _write_state(self, one: ModelState, epoch: str) -> Call:
        home = layout.home_of(one.user_id, epoch)
        keys = (layout.history_key(home), layout.state_key(home, one.model_version))
        words = state_words(one.state) if one.state is not None and one.change == "set" else []
        position = layout.pack_positions(epoch, one.positions, one.forgotten)
        return scripts.WRITE_STATE, keys, (position, one.before, self._ttl_seconds, one.change, *words)

    def rewrite(self, updates: Sequence[UserUpdate], epoch: str, forgets: ForgetsApplied | None = None) -> None:
        homes = [layout.home_of(update.user_id, epoch) for update in updates]
        moves, texts = forget_moves(forgets, homes, epoch)
        with redis_errors():
            models = {model.decode() for model in cast(set[bytes], self._redis.smembers(layout.MODELS_KEY))}
        calls: list[Call] = []
        for update, home, move in zip(updates, homes, moves, strict=True):
            keys, arguments = self._apply_words(update, epoch, {})
            if not update.expected and not update.positions:
                arguments[1] = ""
            keys.append(layout.forgets_key(home.partition))
            keys += [layout.session_key(home, kind) for kind in layout.SESSION_KINDS]
            keys += [layout.state_key(home, version) for version in sorted(models - {update.model_version})]
            calls.append((scripts.REWRITE, keys, (*arguments, *move)))
        _check_written(self._scripts.run(self._redis, calls))
        if forgets is not None:
            forgets.texts = texts

    def dump(self, user_ids: Collection[str], partitions: Collection[int], epoch: str) -> Dump:
        homes = [layout.home_of(user_id, epoch) for user_id in user_ids]
        calls: list[Call] = [
            (
                scripts.DUMP,
                (layout.history_key(home), layout.seen_key(home), layout.users_key(home.partition)),
                (home.user_id, epoch),
            )
            for home in homes
        ]
        replies = self._scripts.run(self._redis, calls, partial(_queue_progress, partitions))
        histories: dict[str, PackedHistory] = {}
        lost = []
        for home, (entry, position, events, ids, seen) in zip(homes, replies, strict=False):
            if is_lost_user(epoch, home, entry, position, events=bool(events), seen=bool(seen)):
                lost.append(home.user_id)
            elif (history := dumped_history(epoch, position, events, ids, seen)) is not None:
                histories[home.user_id] = history
        return Dump(histories=histories, lost=lost, progress=_progress_of(partitions, replies[len(homes) :], epoch))

    def user_ids(self, partition: int, epoch: str) -> list[str]:
        with redis_errors():
            if self._redis.hget(layout.users_key(partition), layout.TABLE_EPOCH) != epoch.encode():
                return []
            pages = self._redis.hscan_iter(layout.users_key(partition), count=1_000)
            return sorted({user.decode() for user, _ in pages if user})

    def seed(self, partition: int, user_ids: Collection[str], epoch: str) -> None:
        entry = layout.pack_entry(-1, int(time.time()) + self._ttl_seconds)
        keys = (layout.users_key(partition), layout.progress_key(partition))
        if 0 in self._scripts.run(self._redis, [(scripts.SEED, keys, (epoch, entry, *user_ids))]):
            raise Conflict(f"the progress of partition {partition} has another epoch")

    def add_model(self, model_version: str) -> None:
        with redis_errors():
            self._redis.sadd(layout.MODELS_KEY, model_version)

    def forgets_applied(self, reader: str, epoch: str) -> ForgetsApplied:
        pipeline = self._redis.pipeline(transaction=False)
        for partition in range(layout.num_partitions_of(epoch)):
            pipeline.hget(layout.forgets_key(partition), reader)
        with redis_errors():
            texts = {partition: (text or b"").decode() for partition, text in enumerate(pipeline.execute())}
        return ForgetsApplied(reader, {p: layout.unpack_forgets(epoch, text)[0] for p, text in texts.items()}, texts)

    def note_forgets(self, forgets: ForgetsApplied, offset: int, epoch: str) -> None:
        after = layout.forgets_text(epoch, offset)
        calls: list[Call] = [
            (scripts.NOTE_FORGETS, (layout.forgets_key(partition),), (forgets.reader, before, after))
            for partition, before in forgets.texts.items()
        ]
        if 0 in self._scripts.run(self._redis, calls):
            raise Conflict("forgets were applied by another writer, or the store lost progress")
        forgets.offsets, forgets.texts = dict.fromkeys(forgets.texts, offset), dict.fromkeys(forgets.texts, after)

    def advance(self, steps: Sequence[AdvanceStep], epoch: str) -> None:
        calls: list[Call] = []
        for step in steps:
            counts = [word for name, count in step.counts.items() if count for word in (name, count)]
            keys = (layout.progress_key(step.partition), layout.popular_key(step.partition))
            unfinished = "" if step.unfinished is None else step.unfinished
            moved = (step.from_watermark, step.to_watermark, unfinished, step.anchors)
            popular = popularity_words(step.popular, self._ttl_seconds)
            calls.append((scripts.ADVANCE, keys, (epoch, *moved, len(counts), *counts, *popular)))
        replies = self._scripts.run(self._redis, calls)
        lost = [step.partition for step, reply in zip(steps, replies, strict=True) if reply != 1]
        if lost:
            raise Conflict(f"the watermark of partitions {lost} was moved by another writer or lost")

    def close(self) -> None:
        self._redis.close()

    def _apply_words(
        self, update: UserUpdate, epoch: str, watermarks: Mapping[int, int]
    ) -> tuple[list[str], list[Any]]:
        return apply_words(update, epoch, watermarks, ttl_seconds=self._ttl_seconds, max_seen=self._max_seen)

    def _progress_rows(self, partitions: Collection[int]) -> list[list[bytes | None]]:
        return self._scripts.run(self._redis, [], partial(_queue_progress, partitions)) if partitions else []


def _queue_progress(partitions: Collection[int], pipeline: Any) -> None:
    for partition in partitions:
        pipeline.hmget(layout.progress_key(partition), PROGRESS_FIELDS)


def _progress_of(
    partitions: Collection[int], rows: Sequence[Sequence[bytes | None]], epoch: str
) -> dict[int, Progress]:
    return {p: progress_of(row, epoch.encode()) for p, row in zip(partitions, rows, strict=True)}


def _check_written(replies: Sequence[int]) -> None:
    lost = sum(1 for reply in replies if reply != 1)
    if lost:
        raise Conflict(f"{lost} of {len(replies)} users were changed by another writer, or the store lost progress")

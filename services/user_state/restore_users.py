"""Find users whose keys the state store lost; restore them from `histories` or from their records (decision 032).

The result is the history at the watermark. Attributions and clicks are not published again.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import structlog

from services.algorithms.bundles.event_schema import EventSchema
from services.contracts.stored_history import PackedHistory
from services.contracts.topics.dead_letters import stored_letters
from services.contracts.topics.histories import HistoryRecord
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.reading import read_between
from services.platform.stream.records import SourceRecord, covers, furthest
from services.user_state.forgetting import Forgotten, erase, packed, seen_in, whole_update
from services.user_state.layout import home_of
from services.user_state.merging import MAX_RECORDS_PER_USER, Arrival, merge, read_arrival
from services.user_state.ports import Store
from services.user_state.values import StoredState, UserHistory, UserUpdate, now_ms
from services.user_state.write_histories import WriteHistories

log = structlog.get_logger()

# Maximum number of users restored by one scan of the log; their histories are in memory meanwhile.
MAX_TOGETHER = 10_000
# How many users are looked up, or get their states computed, together; seconds of work between two polls.
SLICE_USERS = 32
SLICE_S = 0.1
# Seconds of a turn for finding lost users.
_LOOK_S = 0.05
# Looking up one record costs as much as reading this many (2.3 ms against 50 us each).
_LOOKUP_RECORDS = 50
_WRITE_USERS = 1_000


@dataclass(slots=True)
class ReplayedUser:
    """A user's data from the part of the log read so far. arrivals: records not merged yet."""

    history: UserHistory = field(default_factory=UserHistory)
    seen: dict[str, int] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class LogReplay:
    """Merges a user's records of `interactions` again, with the same result as the first time.

    log: a separate reader of `interactions`. letters: a reader of the dead letters of `interactions`; their records are
    left out even if they are readable now.
    """

    log: Reader
    forgotten: Forgotten
    max_history: int
    schema: EventSchema
    letters: Reader | None = None

    def __call__(self, users: Mapping[str, ReplayedUser], ranges: Mapping[int, tuple[int, int]]) -> None:
        """Merge the records in these ranges (first and last offset per partition) into these users."""
        if not users:
            return
        wanted = {user_id.encode() for user_id in users}
        aside = self._set_aside(wanted)
        for record in read_between(self.log, ranges):
            if record.key in wanted and aside.get((record.partition, record.offset)) != record.value:
                arrival = read_arrival(record)
                if isinstance(arrival, Arrival):
                    user_id = arrival.interaction.user_id
                    users[user_id].arrivals.append(arrival)
                    if len(users[user_id].arrivals) == MAX_RECORDS_PER_USER:
                        self._merge(users[user_id], user_id)
        for user_id, user in users.items():
            self._merge(user, user_id)

    def close(self) -> None:
        self.log.close()
        if self.letters is not None:
            self.letters.close()

    def _set_aside(self, keys: Collection[bytes]) -> Mapping[tuple[int, int], bytes]:
        """Return the dead letters by position. Another log may have a good record there, so the caller compares the
        value.
        """
        if self.letters is None:
            return {}
        first, end = self.letters.bounds([0])[0]
        letters = stored_letters(r for r in read_between(self.letters, {0: (first, end - 1)}) if r.key in keys)
        return {(letter.position.partition, letter.position.offset): letter.value for letter in letters}

    def _merge(self, user: ReplayedUser, user_id: str) -> None:
        if not user.arrivals:
            return
        void = self.forgotten.up_to(user_id)
        merged = merge(user.history, user.arrivals, self.max_history, self.schema, void)
        user.history = UserHistory(
            events=merged.events,
            recent=merged.recent,
            positions=merged.positions,
            forgotten=furthest(user.history.forgotten, void),
        )
        for item_id in merged.unseen:
            user.seen.pop(item_id, None)
        for item_id, time_ms in merged.seen_times.items():
            user.seen[item_id] = max(time_ms, user.seen.get(item_id, 0))
        user.arrivals.clear()


@dataclass(kw_only=True, eq=False)
class RestoreUsers:
    """Finds lost users and restores them: `find` begins a scan of the store, `turn` continues it and restores.

    make_states: computes the states of model `model_version` from histories in an epoch; users without a state are
    absent. restored: called with the number of restored users.
    """

    store: Store
    replay: LogReplay
    keep: WriteHistories
    model_version: str
    make_states: Callable[[Mapping[str, UserHistory], str], Mapping[str, StoredState]]
    restored: Callable[[int], None] = lambda users: None
    clock_ms: Callable[[], int] = now_ms
    # This process's partitions at the last `resynced`.
    _partitions: Collection[int] = field(default=(), init=False)
    # The present scan of the store, its begin, the earliest begin of the next one, and the count of removed keys then.
    _looking: Iterator[Collection[str]] | None = field(default=None, init=False)
    _began_ms: int = field(default=0, init=False)
    _next_ms: int = field(default=0, init=False)
    _removed: int = field(default=-1, init=False)
    # Lost users in order; lost users without a record; restored users without a state.
    _waiting: dict[str, None] = field(default_factory=dict, init=False)
    _without_record: list[str] = field(default_factory=list, init=False)
    _stateless: deque[str] = field(default_factory=deque, init=False)
    # Users restored since the last `lost_users_restored` event, and how many of them from the log.
    _num_restored: int = field(default=0, init=False)
    _from_log: int = field(default=0, init=False)
    _scan: Iterator[Sequence[SourceRecord]] | None = field(default=None, init=False)

    def __call__(self, user_ids: Collection[str], watermarks: Offsets, epoch: str) -> None:
        """Restore these users' histories; later turns compute their states.

        Raises: Conflict if another writer changed one; DependencyUnavailable.
        """
        users = sorted(user_ids)
        for start in range(0, len(users), MAX_TOGETHER):
            part = users[start : start + MAX_TOGETHER]
            self._restore(part, self.keep.topic.find(part), watermarks, epoch)
        self._log_restored()

    def resynced(self, partitions: Collection[int], *, is_new_epoch: bool) -> None:
        """Call it after reading the store's progress. partitions: this process's present partitions.

        If these or the epoch changed, or a scan was running, the next `find` begins a new scan, which finds the waiting
        users again.
        """
        has_others, self._partitions = self._partitions != set(partitions), set(partitions)
        if has_others or is_new_epoch:
            self._waiting.clear()
            self._without_record.clear()
            self._scan = None
        if is_new_epoch:
            self._stateless.clear()
        if has_others or is_new_epoch or self._looking is not None:
            self._looking, self._removed = None, -1

    def find(self, removed: int, epoch: str, *, look: bool) -> None:
        """Begin a scan if the store removed keys since the last scan began. removed: the store's count of removed keys.

        look: begin a scan anyway, because the store does not count keys that a client deleted. No scan begins during
        another scan or in the pause after it.
        """
        if self._looking is None and self.clock_ms() >= self._next_ms and (removed != self._removed or look):
            self._looking = self.store.find_lost(self._partitions, epoch)
            self._removed, self._began_ms = removed, self.clock_ms()

    @property
    def is_busy(self) -> bool:
        """Whether a scan runs, or a user waits for history or state."""
        return self._looking is not None or self._has_users

    @property
    def _has_users(self) -> bool:
        return bool(self._waiting or self._without_record or self._stateless)

    def turn(self, watermarks: Offsets, epoch: str) -> int:
        """Scan a slice, then restore for `SLICE_S`: users with a record, then the others, then states.

        Return the work done. Raises: as `__call__` and `make_states`.
        """
        done = self._look()
        until, restored = time.monotonic() + SLICE_S, 0
        while self._has_users and (not restored or time.monotonic() < until):
            restored += self._slice(watermarks, epoch)
        return done + restored

    def _look(self) -> int:
        if self._looking is None:
            return 0
        until, num_lost = time.monotonic() + _LOOK_S, 0
        for found in self._looking:
            self._waiting.update(dict.fromkeys(found))
            num_lost += len(found)
            if time.monotonic() > until:
                return max(1, num_lost)
        self._looking = None
        # A full store removes keys all the time, so the pause is as long as the scan.
        self._next_ms = 2 * self.clock_ms() - self._began_ms
        return num_lost

    def _slice(self, watermarks: Offsets, epoch: str) -> int:
        if self._waiting:
            return self._find_some(watermarks, epoch)
        if self._without_record:
            users, self._without_record = self._without_record, []
            self(users, watermarks, epoch)
            return len(users)
        return self._make_states(epoch)

    def close(self) -> None:
        self.replay.close()

    def _find_some(self, watermarks: Offsets, epoch: str) -> int:
        topic = self.keep.topic
        if topic.index():
            return 1
        if self._scan is None and len(self._waiting) * _LOOKUP_RECORDS > max(topic.num_records, 10_000):
            self._scan = topic.scan()
        records = None if self._scan is None else next(self._scan, None)
        histories: Mapping[str, HistoryRecord | None]
        if records is not None:
            named = [(record, (record.key or b"").decode(errors="replace")) for record in records]
            histories = {
                user_id: topic.read(record)
                for record, user_id in named
                if user_id in self._waiting and topic.is_newest(record)
            }
        else:
            # No scan is needed or left: look up users whose record the scan did not find, and users added later.
            self._scan, some = None, list(islice(self._waiting, SLICE_USERS))
            histories = dict.fromkeys(some) | topic.find(some)
        found = {user_id: history for user_id, history in histories.items() if history is not None}
        self._restore(list(found), found, watermarks, epoch)
        self._without_record += histories.keys() - found.keys()
        for user_id in histories:
            del self._waiting[user_id]
        self._log_restored()
        return max(1, len(histories))

    def _log_restored(self) -> None:
        if self._num_restored and not self._waiting:
            log.warning("lost_users_restored", users=self._num_restored, from_log=self._from_log)
            self._num_restored = self._from_log = 0

    def _restore(
        self, user_ids: Sequence[str], histories: Mapping[str, HistoryRecord], watermarks: Offsets, epoch: str
    ) -> None:
        # Loaded before the log is read, so that the write below fails if a user changes meanwhile.
        stored = self.store.load_users(user_ids, epoch)
        user_ids = [user_id for user_id in user_ids if stored[user_id].is_lost]
        users: dict[str, ReplayedUser] = {}
        behind, unkept, erased = dict[str, ReplayedUser](), dict[str, ReplayedUser](), dict[str, PackedHistory]()
        for user_id in user_ids:
            home, one = home_of(user_id, epoch).partition, histories.get(user_id)
            whole = self.keep.is_whole(user_id)
            if one is not None and whole and one.positions.get(home, -1) < stored[user_id].known:
                log.error("history_record_behind", partition=home, applied=stored[user_id].known)
                one = None
            if one is not None:
                user = users[user_id] = self._replayed_user(one)
                if not covers(one.forgotten, self.replay.forgotten.up_to(user_id)):
                    user.history = erase(user.history, self.replay.forgotten.up_to(user_id))
                    user.seen = seen_in(user.history.events)
                    erased[user_id] = packed(user.history, user.seen)
                if not whole:
                    behind[user_id] = user
                continue
            user = users[user_id] = ReplayedUser()
            is_new = not whole and not self.keep.topic.has_record(user_id)
            (behind if is_new else unkept)[user_id] = user
        covered = {partition: self.keep.topic.marks[partition].covered for partition in watermarks}
        self.replay(behind, {p: (covered[p] + 1, last) for p, last in watermarks.items()})
        self.keep.write(erased)
        self.replay(unkept, {partition: (0, last) for partition, last in watermarks.items()})
        for user_id in unkept:
            self.keep.changing(user_id, home_of(user_id, epoch).partition, ())
        updates = [
            self._update(user_id, user.history, user.seen, stored[user_id].expected) for user_id, user in users.items()
        ]
        for start in range(0, len(updates), _WRITE_USERS):
            self.store.rewrite(updates[start : start + _WRITE_USERS], epoch)
        self._stateless += [user_id for user_id, user in users.items() if user.history.events]
        self._from_log += len(unkept)
        self._num_restored += len(users)
        self.restored(len(users))

    @staticmethod
    def _replayed_user(stored: HistoryRecord) -> ReplayedUser:
        history = UserHistory(
            events=stored.events, recent=stored.recent, positions=stored.positions, forgotten=stored.forgotten
        )
        return ReplayedUser(history, stored.seen)

    def _make_states(self, epoch: str) -> int:
        users = list(islice(self._stateless, SLICE_USERS))
        histories = self.store.load_users(users, epoch)
        updates = [
            replace(
                self._update(user_id, histories[user_id], {}, histories[user_id].expected),
                state=state,
                state_change="set",
            )
            for user_id, state in self.make_states(histories, epoch).items()
        ]
        self.store.apply(updates, epoch, {})
        for _ in users:
            self._stateless.popleft()
        return len(users)

    def _update(self, user_id: str, history: UserHistory, seen: Mapping[str, int], expected: bytes) -> UserUpdate:
        return whole_update(user_id, self.model_version, history, seen, self.replay.schema, expected=expected)

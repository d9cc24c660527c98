"""Bring back users of whom the state store lost something: from `histories`, or from their part of the log.

The store keeps a table of who was applied up to where, so a user whose keys were evicted, deleted or went back is told
from a new one. Whose record in `histories` is whole needs it alone; whose history changed since the last round needs
the log behind the marks, too; whoever has no record that can be used is read from the beginning of the log. What is
written is what the log says up to the watermark; attributions and clicks went out when the records were applied, and do
not again. Users whose records come are brought back first; the others, and everybody's states, in slices between polls.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import structlog

from services.contracts.retraction import covers, furthest
from services.contracts.stored_history import PackedHistory
from services.contracts.topics.dead_letters import stored_letters
from services.contracts.topics.histories import KeptHistory
from services.encoder.domain import EncodeJob
from services.encoder.encoding import Vocabulary, encode_job, turned_down, user_state
from services.encoder.ports import SequenceEncoder
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.record import SourceRecord
from services.user_state.forgetting import Forgotten, erase, packed, seen_in
from services.user_state.keep_histories import KeepHistories, read_between
from services.user_state.layout import home_of
from services.user_state.merging import MAX_RECORDS_PER_USER, Arrival, merge, read_arrival
from services.user_state.ports import Store
from services.user_state.values import StoredState, UserHistory, UserUpdate, now_ms

log = structlog.get_logger()

# Users that are read from the log together: one reading serves them all, and their histories are held in memory.
MAX_TOGETHER = 10_000
# Users that are looked for together (a tenth of a second), and states that are made together; and how long
# this goes on between two polls of the stream.
SLICE_USERS = 32
SLICE_S = 0.1
# What looking one record up costs, in records that are read one after the other (2.3 ms, 50 us).
_LOOKUP_RECORDS = 50
_WRITE_USERS = 1_000


@dataclass(slots=True)
class _User:
    """A user as far as the log was read: the history, every seen item, and records that are still to be merged."""

    history: UserHistory = field(default_factory=UserHistory)
    seen: dict[str, int] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class RestoreUsers:
    """log: a reader of `interactions` of its own. letters: one of its dead letters, of which those that could be read
    were set aside and count no more; None: nothing is. keep: the durable histories; None: there is only the log.
    restored: told how many users came back."""

    log: Reader
    store: Store
    encoder: SequenceEncoder
    vocabulary: Vocabulary
    forgotten: Forgotten
    letters: Reader | None = None
    keep: KeepHistories | None = None
    restored: Callable[[int], None] = lambda users: None
    clock_ms: Callable[[], int] = now_ms
    # Lost users who wait, in order; those of whom no record was found; and restored ones without a state.
    _waiting: dict[str, None] = field(default_factory=dict, init=False)
    _unkept: list[str] = field(default_factory=list, init=False)
    _stateless: deque[str] = field(default_factory=deque, init=False)
    # Of whom nothing was said yet.
    _back: int = field(default=0, init=False)
    _from_log: int = field(default=0, init=False)
    _scan: Iterator[Sequence[SourceRecord]] | None = field(default=None, init=False)

    def __call__(self, user_ids: Collection[str], watermarks: Offsets, epoch: str) -> None:
        """Write these users' histories as the log has them up to the watermarks; their states come in later turns.

        Raises: Conflict when somebody else wrote one of them; DependencyUnavailable.
        """
        users = sorted(user_ids)
        for start in range(0, len(users), MAX_TOGETHER):
            part = users[start : start + MAX_TOGETHER]
            self._restore(part, self.keep.find(part) if self.keep else {}, watermarks, epoch)
        self._say()

    def add(self, user_ids: Collection[str]) -> None:
        """These users are lost, too: they are brought back in the turns that follow."""
        self._waiting.update(dict.fromkeys(user_ids))

    def clear(self) -> None:
        """The store is another one: nobody waits any more."""
        self.look_again()
        self._stateless.clear()

    def look_again(self) -> None:
        """Other partitions are this process's now: who waits for a history is looked for again."""
        self._waiting.clear()
        self._unkept.clear()
        self._scan = None

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits for a history or a state."""
        return bool(self._waiting or self._unkept or self._stateless)

    def turn(self, watermarks: Offsets, epoch: str) -> int:
        """A tenth of a second of what waits; how much was done. Raises: as `__call__`; what the model raises."""
        until, done = time.monotonic() + SLICE_S, 0
        while self.is_busy and (not done or time.monotonic() < until):
            done += self._slice(watermarks, epoch)
        return done

    def _slice(self, watermarks: Offsets, epoch: str) -> int:
        if self._waiting:
            return self._find_some(watermarks, epoch)
        if self._unkept:
            users, self._unkept = self._unkept, []
            self(users, watermarks, epoch)
            return len(users)
        return self._make_states(epoch)

    def close(self) -> None:
        """Give the connections up."""
        self.log.close()
        if self.letters is not None:
            self.letters.close()

    def _find_some(self, watermarks: Offsets, epoch: str) -> int:
        kept: Mapping[str, KeptHistory | None]
        if self.keep is None:
            kept = dict.fromkeys(self._waiting)
        elif self.keep.index():
            return 1
        else:
            if self._scan is None and len(self._waiting) * _LOOKUP_RECORDS > max(self.keep.num_records, 10_000):
                self._scan = self.keep.scan()
            records = None if self._scan is None else next(self._scan, None)
            if records is not None:
                named = [(record, (record.key or b"").decode(errors="replace")) for record in records]
                kept = {
                    user_id: self.keep.read(record)
                    for record, user_id in named
                    if user_id in self._waiting and self.keep.is_newest(record)
                }
            else:
                # The scan is over; who still waits had no record, or became lost since.
                self._scan, some = None, list(islice(self._waiting, SLICE_USERS))
                kept = dict.fromkeys(some) | self.keep.find(some)
        found = {user_id: history for user_id, history in kept.items() if history is not None}
        self._restore(list(found), found, watermarks, epoch)
        self._unkept += kept.keys() - found.keys()
        for user_id in kept:
            del self._waiting[user_id]
        self._say()
        return max(1, len(kept))

    def _say(self) -> None:
        if self._back and not self._waiting:
            log.warning("lost_users_restored", users=self._back, from_log=self._from_log)
            self._back = self._from_log = 0

    def _restore(
        self, user_ids: Sequence[str], kept: Mapping[str, KeptHistory], watermarks: Offsets, epoch: str
    ) -> None:
        # Before the log is read: whoever writes a user meanwhile makes the writing below fail.
        stored = self.store.load_users(user_ids, epoch)
        user_ids = [user_id for user_id in user_ids if stored[user_id].is_lost]
        users: dict[str, _User] = {}
        behind, unkept, erased = dict[str, _User](), dict[str, _User](), dict[str, PackedHistory]()
        for user_id in user_ids:
            home, one = home_of(user_id, epoch).partition, kept.get(user_id)
            whole = self.keep is not None and self.keep.is_whole(user_id)
            if one is not None and whole and one.positions.get(home, -1) < stored[user_id].known:
                log.error("history_record_behind", partition=home, applied=stored[user_id].known)
                one = None
            if one is not None:
                user = users[user_id] = self._kept_user(one)
                if not covers(one.forgotten, self.forgotten.up_to(user_id)):
                    user.history = erase(user.history, self.forgotten.up_to(user_id))
                    user.seen = seen_in(user.history.events)
                    erased[user_id] = packed(user.history, user.seen)
                if not whole:
                    behind[user_id] = user
                continue
            user = users[user_id] = _User()
            is_new = self.keep is not None and not whole and not self.keep.has_record(user_id)
            (behind if is_new else unkept)[user_id] = user
        if self.keep is not None:
            covered = {partition: self.keep.marks[partition].covered for partition in watermarks}
            self._replay(behind, {p: (covered[p] + 1, last) for p, last in watermarks.items()})
            self.keep.write(erased)
        self._replay(unkept, {partition: (0, last) for partition, last in watermarks.items()})
        if self.keep is not None:
            for user_id in unkept:
                self.keep.changing(user_id, home_of(user_id, epoch).partition, ())
        updates = [self._update(user_id, user, stored[user_id].expected) for user_id, user in users.items()]
        for start in range(0, len(updates), _WRITE_USERS):
            self.store.rewrite(updates[start : start + _WRITE_USERS], epoch)
        self._stateless += [user_id for user_id, user in users.items() if user.history.events]
        self._from_log += len(unkept)
        self._back += len(users)
        self.restored(len(users))

    @staticmethod
    def _kept_user(kept: KeptHistory) -> _User:
        history = UserHistory(
            events=kept.events, recent=kept.recent, positions=kept.positions, forgotten=kept.forgotten
        )
        return _User(history, kept.seen)

    def _replay(self, users: Mapping[str, _User], ranges: Mapping[int, tuple[int, int]]) -> None:
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

    def _set_aside(self, keys: Collection[bytes]) -> Mapping[tuple[int, int], bytes]:
        """The values of these keys' dead letters by their places: another log may have a good record in one of them."""
        if self.letters is None:
            return {}
        first, end = self.letters.bounds([0])[0]
        letters = stored_letters(r for r in read_between(self.letters, {0: (first, end - 1)}) if r.key in keys)
        return {(letter.position.partition, letter.position.offset): letter.value for letter in letters}

    def _merge(self, user: _User, user_id: str) -> None:
        if not user.arrivals:
            return
        void = self.forgotten.up_to(user_id)
        merged = merge(user.history, user.arrivals, self.vocabulary.max_history, self.vocabulary.schema, void)
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

    def _make_states(self, epoch: str) -> int:
        users = list(islice(self._stateless, SLICE_USERS))
        jobs: list[EncodeJob] = []
        job_of: dict[str, tuple[int, int]] = {}
        histories = self.store.load_users(users, epoch)
        for user_id, history in histories.items():
            length = len(history.events)
            job, rows = encode_job(self.vocabulary, user_id, history.events, [length], cached=True)
            if job is not None and length in rows:
                job_of[user_id] = (len(jobs), rows[length])
                jobs.append(job)
        states = self.encoder.encode(jobs) if jobs else ()
        updates = []
        for user_id, (job_number, row) in job_of.items():
            history = histories[user_id]
            home = home_of(user_id, epoch).partition
            at = max(history.positions.items(), key=lambda position: (position[0] == home, position[1]))
            state = StoredState(
                query_state=user_state(self.vocabulary, states[job_number], row, history.events),
                partition=at[0],
                offset=at[1],
                event_time_ms=history.events[-1].event_time_ms,
                applied_ms=self.clock_ms(),
            )
            user = _User(history)
            updates.append(replace(self._update(user_id, user, history.expected), state=state, state_change="set"))
        self.store.apply(updates, epoch, {})
        for _ in users:
            self._stateless.popleft()
        return len(users)

    def _update(self, user_id: str, user: _User, expected: bytes) -> UserUpdate:
        return UserUpdate(
            user_id=user_id,
            model_version=self.vocabulary.model_version,
            expected=expected,
            positions=user.history.positions,
            events=user.history.events,
            recent=user.history.recent,
            seen_times=user.seen,
            turned_down=turned_down(self.vocabulary.schema, user.history.events),
            forgotten=user.history.forgotten,
        )

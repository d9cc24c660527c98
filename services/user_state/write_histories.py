"""Write every user's history to the compacted topic `histories`, in rounds (decision 032).

A round writes the users whose history changed since the last round, then a mark to each partition: the offset up to
which the topic reflects `interactions`. After a crash, the records after the marks show the changed users. The marks
are in the topic, so they are lost only together with it.
"""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import structlog

from services.contracts.stored_history import PackedHistory
from services.contracts.topics.histories import Mark
from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.reading import read_between
from services.user_state.history_topic import HistoryTopic
from services.user_state.layout import home_of, num_partitions_of
from services.user_state.log_identity import same_logs
from services.user_state.ports import Store
from services.user_state.values import DEFAULT_TTL_SECONDS, AdvanceStep, Progress, now_ms

log = structlog.get_logger()

# Users written between two polls: about 50 ms.
SLICE_USERS = 500
# With more records after the marks, every user is written again.
_MANY_RECORDS = 200_000
_RETRY_S = 30.0


@dataclass(slots=True)
class ChangedUsers:
    """Users whose history changed after the marks.

    known_to: per partition, the offset up to which every changed user is in `users` or in the topic. foreign:
    partitions with records of users of other processes; their marks do not advance. elsewhere: per home partition, the
    other partitions with records of its changed users.
    """

    users: set[str] = field(default_factory=set)
    known_to: dict[int, int] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)
    elsewhere: dict[int, set[int]] = field(default_factory=dict)

    def note(self, user_id: str, home: int, partitions: Collection[int], mine: Collection[int]) -> None:
        """Note that a user has new records in these partitions. home: the user's. mine: this process's partitions."""
        if home in mine:
            self.users.add(user_id)
            if others := set(partitions) - {home}:
                self.elsewhere.setdefault(home, set()).update(others)
        elif found := set(mine) & set(partitions) - self.foreign:
            self.foreign |= found
            log.warning("users_of_other_partitions", partitions=sorted(found))

    def leave(self, partitions: Collection[int], left: Collection[int], epoch: str) -> None:
        """Remove partitions; their next owner finds the changed users in the log. left: the remaining ones."""
        for partition in partitions:
            self.known_to.pop(partition, None)
            # Its users are no longer tracked, so the marks of other partitions with their records do not advance.
            self.foreign |= self.elsewhere.pop(partition, set())
        self.foreign &= set(left)
        self.users = {user_id for user_id in self.users if home_of(user_id, epoch).partition in left}


@dataclass(slots=True)
class _Round:
    """The state of one round. pending: users to write. targets: the progress when the round began. is_whole: whether
    every user was written so far; only then are the marks written.
    """

    began_at: float
    targets: Mapping[int, Progress]
    pending: set[str]
    is_whole: bool = True


@dataclass(kw_only=True, eq=False)
class WriteHistories:
    """Writes the histories of this process's partitions, which `take_over` sets.

    log: a separate reader of `interactions`. every_s: the minimum pause between rounds; the pause is also at least ten
    times the last round's duration. anchors: returns the text that identifies a partition's log, if its stored progress
    has none.
    """

    topic: HistoryTopic
    log: Reader
    store: Store
    every_s: float = 120.0
    ttl_seconds: int = DEFAULT_TTL_SECONDS
    clock_ms: Callable[[], int] = now_ms
    anchors: Callable[[int], str] = field(default=lambda partition: "", init=False)
    changed: ChangedUsers = field(default_factory=ChangedUsers, init=False)
    _round: _Round | None = field(default=None, init=False)
    _next_round: float = field(default=0.0, init=False)
    _epoch: str = field(default="", init=False)

    def take_over(self, stream: Reader, epoch: str, progress: Mapping[int, Progress]) -> bool:
        """Synchronise with the state store.

        Return True if the store was empty; it then has the marks' watermarks, and its users count as lost. progress:
        of all partitions that this process owns. Raises: Conflict; DependencyUnavailable; PreconditionFailed if topic
        and log have different numbers of partitions.
        """
        self._give_up_round()
        seeded, marks = False, self.topic.marks
        watermarks = {partition: found.watermark for partition, found in progress.items()}
        news: dict[int, Mark] = {}
        if epoch != self._epoch or self.topic.is_another or marks.keys() != watermarks.keys():
            stays = epoch == self._epoch and not self.topic.is_another
            gone = marks.keys() - watermarks.keys() if stays else list(marks)
            self.topic.leave(gone)
            self.changed.leave(gone, marks.keys(), epoch)
            # After a failure below, the next call reads everything.
            self._epoch, self.topic.is_another = "", False
            new = sorted(watermarks.keys() - marks.keys())
            news = self._find_marks(stream, new, epoch) if new else {}
            self.changed.known_to |= {partition: marks[partition].covered for partition in new}
        empty = {p for p, mark in marks.items() if watermarks[p] < 0 <= mark.covered and self._is_empty(p, epoch)}
        for partition, mark in marks.items():
            if mark.covered > watermarks[partition] and partition not in empty:
                # The store lost progress. Records beyond its watermark stay correct, because each position counts once.
                found = progress[partition]
                news[partition] = replace(mark, covered=found.watermark, anchors=found.anchors, counts=found.counts)
                self.changed.known_to[partition] = found.watermark
        self.topic.write_marks(news)
        if empty:
            of_empty = {partition: marks[partition] for partition in empty}
            self._seed(of_empty, [partition for partition, last in watermarks.items() if last < 0], epoch)
            watermarks |= {partition: mark.covered for partition, mark in of_empty.items()}
            seeded = True
        self._find_changed(watermarks, epoch)
        self._epoch = epoch
        return seeded

    def void(self, partitions: Collection[int], num_partitions: int) -> None:
        """Empty the marks, so that the next `take_over` reads everything. Raises: DependencyUnavailable."""
        self._epoch = ""
        self.topic.void()
        mark = Mark(reading=0, covered=-1, num_partitions=num_partitions)
        self.topic.write_marks({partition: replace(mark, reading=_new_reading_id()) for partition in partitions})

    def changing(self, user_id: str, home: int, partitions: Collection[int]) -> None:
        """Record that a user with records in these partitions is about to be written. home: its home partition."""
        self.changed.note(user_id, home, partitions, self.topic.marks.keys())

    def applied(self, watermarks: Offsets) -> None:
        """Note that `changing` was called for all users changed up to these offsets."""
        self.changed.known_to.update(watermarks)

    def is_whole(self, user_id: str) -> bool:
        """Whether the user's newest record reflects everything applied."""
        return user_id not in self.changed.users and (self._round is None or user_id not in self._round.pending)

    def turn(self, watermarks: Offsets) -> bool:
        """Continue the round, or begin one if it is due. Return whether the round is unfinished.

        Raises: Conflict if the store's watermarks differ from these.
        """
        if self._round is None and time.monotonic() < self._next_round:
            return False
        try:
            return self._turn(watermarks)
        except DependencyUnavailable as exc:
            self._give_up_round()
            log.warning("histories_not_written", users=len(self.changed.users), reason=exc.message)
            self._next_round = time.monotonic() + _RETRY_S
            return False

    def finish(self, watermarks: Offsets) -> None:
        """Write everything now, at shutdown."""
        for _ in range(2):  # the present round, and one for later changes
            self._next_round = 0.0
            while self.turn(watermarks):
                pass

    def write(self, histories: Mapping[str, PackedHistory | None]) -> None:
        """Write these users at once; None writes a tombstone. Raises: DependencyUnavailable, Conflict."""
        homes = {user_id: home_of(user_id, self._epoch).partition for user_id in histories}
        if unknown := self.topic.write(histories, homes):
            self.changed.users.update(unknown)
            if self._round is not None:
                self._round.is_whole = False

    def close(self) -> None:
        self.topic.close()
        self.log.close()

    def _give_up_round(self) -> None:
        if self._round is not None:
            self.changed.users |= self._round.pending
            self._round = None

    def _turn(self, watermarks: Offsets) -> bool:
        marks = self.topic.marks
        if self._round is None:
            targets = self._progress(self.store.dump((), marks, self._epoch).progress, watermarks)
            self._round = _Round(time.monotonic(), targets, self.changed.users)
            self.changed.users = set()
        at_hand = self._round
        if users := list(islice(at_hand.pending, SLICE_USERS)):
            found = self.store.dump(users, marks, self._epoch)
            # `dump` reads users before the progress, so an unchanged watermark proves that the users are current.
            self._progress(found.progress, watermarks)
            self.changed.users.update(found.lost)
            at_hand.is_whole &= not found.lost
            self.write(found.histories)
            at_hand.pending.difference_update(users)
        if at_hand.pending:
            return True
        if at_hand.is_whole:
            self.topic.write_marks(
                {
                    partition: replace(
                        marks[partition],
                        covered=to.watermark,
                        anchors=to.anchors or self.anchors(partition),
                        counts=to.counts,
                    )
                    for partition, to in at_hand.targets.items()
                    if to.watermark > marks[partition].covered and partition not in self.changed.foreign
                }
            )
        self._round = None
        now = time.monotonic()
        self._next_round = now + max(self.every_s, 10 * (now - at_hand.began_at))
        return False

    def _progress(self, found: Mapping[int, Progress], watermarks: Offsets) -> Mapping[int, Progress]:
        if behind := [partition for partition, one in found.items() if one.watermark != watermarks[partition]]:
            raise Conflict(f"the watermark of partitions {behind} was moved by another writer or lost")
        return found

    def _find_marks(self, stream: Reader, partitions: Sequence[int], epoch: str) -> dict[int, Mark]:
        """Read the newest marks. Return replacements of unusable ones."""
        num_partitions = num_partitions_of(epoch)
        found = self.topic.take(partitions, num_partitions)
        same = same_logs(stream, {p: (mark.covered, mark.anchors) for p, mark in found.items()})
        news = {}
        for partition in partitions:
            mark = found.get(partition)
            if mark is not None and mark.num_partitions == num_partitions and partition in same:
                self.topic.marks[partition] = mark
                continue
            if mark is not None and mark.covered >= 0:
                log.warning("histories_of_another_log", partition=partition, covered=mark.covered)
            news[partition] = replace(self.topic.marks[partition], reading=_new_reading_id())
        return news

    def _is_empty(self, partition: int, epoch: str) -> bool:
        """Whether the store has no user of this home partition, except users that `_seed` added and that are lost."""
        lost = {user_id for found in self.store.find_lost([partition], epoch) for user_id in found}
        return len(lost) == len(self.store.user_ids(partition, epoch))

    def _seed(self, marks: Mapping[int, Mark], partitions: Sequence[int], epoch: str) -> None:
        """Fill the tables and watermarks of a store that lost everything. partitions: all without progress, also those
        without a mark: they can be the home of users with records in others.
        """
        live: dict[int, dict[bytes, bool]] = {partition: {} for partition in partitions}
        oldest_ms = self.clock_ms() - 1000 * self.ttl_seconds
        for records in self.topic.index_again(partitions):
            for record in records:
                if record.key and record.partition in live:
                    live[record.partition][record.key] = record.value is not None and record.written_ms >= oldest_ms
        for partition, keys in live.items():
            users = [key.decode() for key, is_live in keys.items() if is_live]
            for start in range(0, len(users), 1_000):
                self.store.seed(partition, users[start : start + 1_000], epoch)
            log.warning("store_filled_from_histories", partition=partition, users=len(users))
        steps = [
            AdvanceStep(
                partition=p, from_watermark=-1, to_watermark=mark.covered, counts=mark.counts, anchors=mark.anchors
            )
            for p, mark in marks.items()
        ]
        self.store.advance(steps, epoch)

    def _find_changed(self, watermarks: Offsets, epoch: str) -> None:
        """Note users with records after the known offsets, or all users if these records are too many or deleted."""
        known_to, mine = self.changed.known_to, self.topic.marks.keys()
        missing = {p: (known_to[p] + 1, last) for p, last in watermarks.items() if known_to[p] < last}
        if not missing:
            return
        bounds = self.log.bounds(missing.keys())
        is_long = sum(last + 1 - first for first, last in missing.values()) > _MANY_RECORDS
        if is_long or any(first < bounds[partition][0] for partition, (first, _) in missing.items()):
            for partition in mine:
                self.changed.users.update(self.store.user_ids(partition, epoch))
        # The tables do not list users whose home belongs to another process.
        if not is_long or len(mine) < num_partitions_of(epoch):
            keys: dict[int, set[bytes]] = {partition: set() for partition in missing}
            for record in read_between(self.log, missing):
                keys[record.partition].add(record.key or b"")
            for partition, found in keys.items():
                for user_id in (key.decode(errors="replace") for key in found if key):
                    self.changing(user_id, home_of(user_id, epoch).partition, (partition,))
        self.changed.known_to = dict(watermarks)


def _new_reading_id() -> int:
    return secrets.randbits(64) | 1

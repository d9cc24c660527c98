"""Keep every user's history in the compacted topic `histories`: written in rounds, found again by user.

A round takes everybody whose history changed since the last one, reads them from the state store, writes them, and,
when all are acknowledged, writes a mark into each partition: everything of `interactions` up to there is in the topic.
So at any moment a user's newest record, with the records of `interactions` behind the mark, makes the whole history,
and users who are in no round need the record alone. A crash loses only the memory of who changed behind the marks; the
keys of those records say it again. The marks lie in the topic itself, so they are lost with it and outlive the store.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import structlog

from services.contracts.stored_history import PackedHistory
from services.contracts.topics.histories import (
    HISTORIES,
    MARK_KEY,
    KeptHistory,
    KeptRecord,
    Mark,
    decode_history,
    decode_mark,
    encode_history,
    encode_mark,
)
from services.platform.errors import Conflict, DependencyUnavailable, InvalidRequest, PreconditionFailed
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.record import SourceRecord
from services.user_state.history_index import HistoryIndex
from services.user_state.layout import home_of, num_partitions_of
from services.user_state.log_identity import same_logs
from services.user_state.ports import HistoryOutbox, Store
from services.user_state.values import DEFAULT_TTL_SECONDS, AdvanceStep, Progress, now_ms

log = structlog.get_logger()

# Users that are written between two polls of the stream: about 50 ms.
SLICE_USERS = 500
# A mark is written behind each round; where none is among so many last records, the whole partition is read.
_TAIL_RECORDS = 500
# From so many records on, everybody is written again in place of those whom the records name.
_MANY_RECORDS = 200_000
_POLL_RECORDS = 2_000
_POLL_MS = 50
_SILENCE_S = 10.0
_RETRY_S = 30.0


@dataclass(kw_only=True, eq=False)
class KeepHistories:
    """topic: a reader of `histories`; log: one of `interactions` of its own. Which partitions are this process's,
    `take_over` says.

    every_s: how long a round waits at least; after a long one ten times as long as it took, so that writing takes a
    tenth of the time at most. kept: told how many users were written.
    """

    topic: Reader
    log: Reader
    store: Store
    outbox: HistoryOutbox
    every_s: float = 120.0
    ttl_seconds: int = DEFAULT_TTL_SECONDS
    kept: Callable[[int], None] = lambda users: None
    clock_ms: Callable[[], int] = now_ms
    clock: Callable[[], float] = time.monotonic
    # What tells a partition's log from another one, where its progress in the store does not say it yet.
    anchors: Callable[[int], str] = field(default=lambda partition: "", init=False)
    marks: dict[int, Mark] = field(default_factory=dict, init=False)
    # Of users, that were read or written since each partition was taken over.
    _records: Counter[int] = field(default_factory=Counter, init=False)
    # Changed since the round began; still to be written in this round.
    _changed: set[str] = field(default_factory=set, init=False)
    _pending: set[str] = field(default_factory=set, init=False)
    # Progress as the round began: what its marks will say. Empty: no round. None of it is said when someone is missing.
    _targets: Mapping[int, Progress] = field(default_factory=dict, init=False)
    _is_whole: bool = field(default=True, init=False)
    _began_at: float = field(default=0.0, init=False)
    _next_round: float = field(default=0.0, init=False)
    # Up to where whoever changed is known here or is kept.
    _known_to: dict[int, int] = field(default_factory=dict, init=False)
    # Partitions with records of users who are at home in another process's: their marks stand still.
    _foreign: set[int] = field(default_factory=set, init=False)
    # By home partition: where else its users that changed have records.
    _elsewhere: dict[int, set[int]] = field(default_factory=dict, init=False)
    _last_offsets: dict[int, int] = field(default_factory=dict, init=False)
    _index: HistoryIndex = field(default_factory=HistoryIndex, init=False)
    # Partitions of which the index lacks something, and the reading of them.
    _unindexed: set[int] = field(default_factory=set, init=False)
    _indexing: Iterator[object] | None = field(default=None, init=False)
    _epoch: str = field(default="", init=False)

    def take_over(self, stream: Reader, epoch: str, progress: Mapping[int, Progress]) -> bool:
        """Get in step with the state store; True when it was empty and has watermarks and users (all lost) now.

        progress: of the partitions that are this process's from now on; what is known of those that stay is kept.
        Raises: Conflict, DependencyUnavailable; PreconditionFailed when the topic has other partitions than the log.
        """
        self._changed |= self._pending
        self._pending, self._targets = set(), {}
        seeded = False
        watermarks = {partition: found.watermark for partition, found in progress.items()}
        news: dict[int, Mark] = {}
        if epoch != self._epoch or self.marks.keys() != watermarks.keys():
            self._leave(self.marks.keys() - watermarks.keys() if epoch == self._epoch else list(self.marks), epoch)
            # After an error everything is read again.
            self._epoch = ""
            new = sorted(watermarks.keys() - self.marks.keys())
            news = self._find_marks(stream, new, epoch) if new else {}
            self._known_to |= {partition: self.marks[partition].covered for partition in new}
        empty = {p for p, mark in self.marks.items() if watermarks[p] < 0 <= mark.covered and self._is_empty(p, epoch)}
        for partition, mark in self.marks.items():
            if mark.covered > watermarks[partition] and partition not in empty:
                # The store went back. Records that are further than it is stay right: a position counts once.
                found = progress[partition]
                news[partition] = replace(mark, covered=found.watermark, anchors=found.anchors, counts=found.counts)
                self._known_to[partition] = found.watermark
        self._write_marks(news)
        if empty:
            marks = {partition: self.marks[partition] for partition in empty}
            self._seed(marks, [partition for partition, last in watermarks.items() if last < 0], epoch)
            watermarks |= {partition: mark.covered for partition, mark in marks.items()}
            seeded = True
        self._find_changed(watermarks, epoch)
        self._epoch = epoch
        return seeded

    def void(self, partitions: Collection[int], num_partitions: int) -> None:
        """A log lost records: what was read of it before counts for nothing. Raises: DependencyUnavailable."""
        self._epoch, self._last_offsets = "", {}
        mark = Mark(reading=0, covered=-1, num_partitions=num_partitions)
        self._write_marks({partition: replace(mark, reading=_new_reading()) for partition in partitions})

    def changing(self, user_id: str, home: int, partitions: Collection[int]) -> None:
        """A user at home there, with records in these partitions, is about to be written to the store."""
        if home in self.marks:
            self._changed.add(user_id)
            if others := set(partitions) - {home}:
                self._elsewhere.setdefault(home, set()).update(others)
        elif found := self.marks.keys() & set(partitions) - self._foreign:
            self._foreign |= found
            log.warning("users_of_other_partitions", partitions=sorted(found))

    def applied(self, watermarks: Offsets) -> None:
        """Everybody who changed up to here was named."""
        self._known_to.update(watermarks)

    def is_whole(self, user_id: str) -> bool:
        """Whether the user's newest record reflects all that was applied."""
        return user_id not in self._changed and user_id not in self._pending

    def turn(self, watermarks: Offsets) -> bool:
        """Go on with the round, or begin one when it is time; whether the round goes on.

        Raises: Conflict when the store is behind the watermarks that this process knows.
        """
        if not self._targets and self.clock() < self._next_round:
            return False
        try:
            return self._turn(watermarks)
        except DependencyUnavailable as exc:
            log.warning("histories_not_kept", users=len(self._pending) + len(self._changed), reason=exc.message)
            self._changed |= self._pending
            self._pending, self._targets, self._next_round = set(), {}, self.clock() + _RETRY_S
            return False

    def finish(self, watermarks: Offsets) -> None:
        """Write everything now: the process ends."""
        for _ in range(2):  # the round at hand, and one for who changed since it began
            self._next_round = 0.0
            while self.turn(watermarks):
                pass

    def write(self, histories: Mapping[str, PackedHistory | None]) -> None:
        """Write these users at once; None: nothing is to be kept. Raises: DependencyUnavailable, Conflict."""
        records = []
        for user_id, history in histories.items():
            home = home_of(user_id, self._epoch).partition
            if home in self.marks:
                value = None if history is None else encode_history(user_id, history, self.marks[home].reading)
                records.append(KeptRecord(home, user_id.encode(), value))
        offsets = self.outbox.keep(records)
        for record, offset in zip(records, offsets, strict=True):
            if offset < 0:  # acknowledged, but nobody said where it lies
                self._changed.add(record.key.decode())
                self._is_whole = False
                continue
            self._check_offset(record.partition, offset)
            self._index.put(record.key, record.partition, offset)
            self._records[record.partition] += 1
        self.kept(len(records))

    def find(self, user_ids: Collection[str]) -> dict[str, KeptHistory]:
        """The newest records of these users, without those who have none that can be used.

        Raises: DependencyUnavailable.
        """
        while self.index():
            pass
        wanted: dict[int, list[tuple[int, str]]] = {}
        for user_id in user_ids:
            place = self._index.get(user_id.encode())
            if place is not None and place.partition in self.marks:
                wanted.setdefault(place.partition, []).append((place.offset, user_id))
        found: dict[str, KeptHistory] = {}
        for places in wanted.values():
            places.sort(reverse=True)
        while wanted:
            now = {partition: places.pop() for partition, places in wanted.items()}
            records = self.topic.records_at({partition: offset for partition, (offset, _) in now.items()})
            for partition, (_, user_id) in now.items():
                record = records.get(partition)
                if record is not None and record.key == user_id.encode() and (kept := self.read(record)):
                    found[user_id] = kept
            wanted = {partition: places for partition, places in wanted.items() if places}
        return found

    @property
    def num_records(self) -> int:
        """Of users, in these partitions, as far as the topic was read."""
        return self._records.total()

    def has_record(self, user_id: str) -> bool:
        """Whether there is any, as far as the topic was read."""
        return self._index.get(user_id.encode()) is not None

    def read(self, record: SourceRecord) -> KeptHistory | None:
        """The history of a record; None, and it is said why, where it cannot be used."""
        if record.value is None or record.key is None:
            return None
        try:
            kept = decode_history(record.key, record.value)
        except InvalidRequest as exc:
            log.error(
                "history_record_refused",
                topic=HISTORIES,
                partition=record.partition,
                offset=record.offset,
                reason=exc.message,
            )
            return None
        return kept if kept.reading == self.marks[record.partition].reading else None

    def is_newest(self, record: SourceRecord) -> bool:
        """Whether no later record of the same user is known."""
        return self._index.get(record.key or b"") == (record.partition, record.offset)

    def index(self) -> bool:
        """Read on in the topic, some records; False once it was read to its end. Raises: DependencyUnavailable."""
        if self._indexing is not None and next(self._indexing, None) is None:
            self._indexing = None
            self._unindexed.clear()
        return self._indexing is not None

    def scan(self, partitions: Collection[int] | None = None) -> Iterator[Sequence[SourceRecord]]:
        """The topic from its beginning to its present end, some records at a time. partitions: None: all of this
        process's. Raises: DependencyUnavailable."""
        bounds = self.topic.bounds(list(self.marks if partitions is None else partitions))
        self.topic.assign({partition: first for partition, (first, _) in bounds.items()})
        deadline = time.monotonic() + _SILENCE_S
        while any(at < bounds[partition][1] for partition, at in self.topic.positions().items()):
            if records := self.topic.poll(_POLL_MS, _POLL_RECORDS):
                deadline = time.monotonic() + _SILENCE_S
            elif time.monotonic() > deadline:
                raise DependencyUnavailable(f"Kafka does not give {HISTORIES!r}")
            yield records

    def close(self) -> None:
        """Give the connections up."""
        self.topic.close()
        self.log.close()

    def _turn(self, watermarks: Offsets) -> bool:
        if not self._targets:
            self._began_at, self._is_whole = self.clock(), True
            self._targets = self._progress(self.store.dump((), self.marks, self._epoch).progress, watermarks)
            self._pending, self._changed = self._changed, set()
        if users := list(islice(self._pending, SLICE_USERS)):
            found = self.store.dump(users, self.marks, self._epoch)
            # The users were read before the progress: if that is what we know, they are no older.
            self._progress(found.progress, watermarks)
            self._changed.update(found.lost)
            self._is_whole &= not found.lost
            self.write(found.histories)
            self._pending.difference_update(users)
        if self._pending:
            return True
        if self._is_whole:
            self._write_marks(
                {
                    partition: replace(
                        self.marks[partition],
                        covered=to.watermark,
                        anchors=to.anchors or self.anchors(partition),
                        counts=to.counts,
                    )
                    for partition, to in self._targets.items()
                    if to.watermark > self.marks[partition].covered and partition not in self._foreign
                }
            )
        self._targets = {}
        now = self.clock()
        self._next_round = now + max(self.every_s, 10 * (now - self._began_at))
        return False

    def _progress(self, found: Mapping[int, Progress], watermarks: Offsets) -> Mapping[int, Progress]:
        if behind := [partition for partition, one in found.items() if one.watermark != watermarks[partition]]:
            raise Conflict(f"the watermark of partitions {behind} was moved by another writer or lost")
        return found

    def _write_marks(self, marks: Mapping[int, Mark]) -> None:
        if not marks:
            return
        offsets = self.outbox.keep([KeptRecord(p, MARK_KEY, encode_mark(mark)) for p, mark in marks.items()])
        for (partition, mark), offset in zip(marks.items(), offsets, strict=True):
            if offset >= 0:
                self._check_offset(partition, offset)
            self.marks[partition] = mark

    def _check_offset(self, partition: int, offset: int) -> None:
        if offset <= self._last_offsets.get(partition, -1):
            self._epoch = ""
            raise Conflict(f"the topic {HISTORIES!r} was made anew: everybody is written to it again")
        self._last_offsets[partition] = offset

    def _leave(self, partitions: Collection[int], epoch: str) -> None:
        """These are not this process's any more: whoever takes them over finds in the log who changed."""
        for partition in partitions:
            for table in (self.marks, self._known_to, self._last_offsets, self._records):
                table.pop(partition, None)
            # Its users are nobody's here, so the marks of where they have records stand still.
            self._foreign |= self._elsewhere.pop(partition, set())
        self._foreign &= self.marks.keys()
        self._unindexed &= self.marks.keys()
        self._changed = {user_id for user_id in self._changed if home_of(user_id, epoch).partition in self.marks}
        if not self.marks:
            self._index = HistoryIndex()

    def _find_marks(self, stream: Reader, partitions: Sequence[int], epoch: str) -> dict[int, Mark]:
        """Read the newest marks; the result: those that take the place of what cannot be believed."""
        num_partitions = num_partitions_of(epoch)
        if (found_partitions := self.topic.num_partitions()) != num_partitions:
            raise PreconditionFailed(
                f"topic {HISTORIES!r} has {found_partitions} partitions, `interactions` has {num_partitions}: delete "
                f"{HISTORIES!r}, and it is made and filled anew"
            )
        bounds = self.topic.bounds(partitions)
        self.marks |= {p: Mark(reading=0, covered=-1, num_partitions=num_partitions) for p in partitions}
        self._last_offsets |= {partition: end - 1 for partition, (_, end) in bounds.items()}
        tails = {partition: max(first, end - _TAIL_RECORDS) for partition, (first, end) in bounds.items()}
        self.topic.assign(tails)
        found = _newest_marks(self.topic.read_to_end())
        if any(partition not in found and bounds[partition][0] < tails[partition] for partition in partitions):
            found = _newest_marks(
                [record for records in self.scan(partitions) for record in records if record.key == MARK_KEY]
            )
        self._unindexed.update(partitions)
        self._indexing = self._read_index()
        same = same_logs(stream, {p: (mark.covered, mark.anchors) for p, mark in found.items()})
        news = {}
        for partition in partitions:
            mark = found.get(partition)
            if mark is not None and mark.num_partitions == num_partitions and partition in same:
                self.marks[partition] = mark
                continue
            if mark is not None and mark.covered >= 0:
                log.warning("histories_of_another_log", partition=partition, covered=mark.covered)
            news[partition] = replace(self.marks[partition], reading=_new_reading())
        return news

    def _read_index(self) -> Iterator[Sequence[SourceRecord]]:
        partitions = list(self._unindexed)
        self._records.update({partition: -self._records[partition] for partition in partitions})
        for records in self.scan(partitions):
            for record in records:
                if record.key:
                    self._records[record.partition] += 1
                    self._index.put(record.key, record.partition, record.offset)
            yield records

    def _is_empty(self, partition: int, epoch: str) -> bool:
        """Whether the store holds nobody at home there: at most names that an earlier seeding left."""
        lost = {user_id for found in self.store.find_lost([partition], epoch) for user_id in found}
        return len(lost) == len(self.store.user_ids(partition, epoch))

    def _seed(self, marks: Mapping[int, Mark], partitions: Sequence[int], epoch: str) -> None:
        """The state store lost everything: it learns who there is, and how far each partition was applied.

        partitions: of which it knows nothing; users of another partition's records may be at home there.
        """
        live: dict[int, dict[bytes, bool]] = {partition: {} for partition in partitions}
        oldest_ms = self.clock_ms() - 1000 * self.ttl_seconds
        self._unindexed.update(partitions)
        for records in self._read_index():
            for record in records:
                if record.key and record.partition in live:
                    live[record.partition][record.key] = record.value is not None and record.written_ms >= oldest_ms
        self._indexing = None
        self._unindexed.clear()
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
        """Whose records lie behind what is known: the log says it, or everybody may be one of them."""
        missing = {p: (self._known_to[p] + 1, last) for p, last in watermarks.items() if self._known_to[p] < last}
        if not missing:
            return
        bounds = self.log.bounds(missing.keys())
        is_long = sum(last + 1 - first for first, last in missing.values()) > _MANY_RECORDS
        if is_long or any(first < bounds[partition][0] for partition, (first, _) in missing.items()):
            for partition in self.marks:
                self._changed.update(self.store.user_ids(partition, epoch))
        # The tables do not name users of other processes' partitions.
        if not is_long or len(self.marks) < num_partitions_of(epoch):
            keys: dict[int, set[bytes]] = {partition: set() for partition in missing}
            for record in read_between(self.log, missing):
                keys[record.partition].add(record.key or b"")
            for partition, found in keys.items():
                for user_id in (key.decode(errors="replace") for key in found if key):
                    self.changing(user_id, home_of(user_id, epoch).partition, (partition,))
        self._known_to = dict(watermarks)


def read_between(log: Reader, ranges: Mapping[int, tuple[int, int]]) -> Iterator[SourceRecord]:
    """The records from the first to the last offset of each partition, as far as they are there.

    Raises: DependencyUnavailable.
    """
    begins = {partition: first for partition, (first, _) in log.bounds(ranges.keys()).items()}
    missing = {p: last for p, (first, last) in ranges.items() if max(first, begins[p]) <= last}
    if not missing:
        return
    log.assign({partition: max(ranges[partition][0], begins[partition]) for partition in missing})
    deadline = time.monotonic() + _SILENCE_S
    while missing:
        records = log.poll(200, 10_000)
        at: dict[int, int] = {}
        for record in records:
            if record.partition in missing:
                at[record.partition] = record.offset + 1
                if record.offset <= missing[record.partition]:
                    yield record
        if at:
            deadline = time.monotonic() + _SILENCE_S
        elif time.monotonic() > deadline:
            raise DependencyUnavailable(f"Kafka gave {log.positions()} of {missing} only")
        else:
            # Transaction markers have offsets, but are no records.
            at = dict(log.positions())
        missing = {partition: last for partition, last in missing.items() if at.get(partition, 0) <= last}


def _newest_marks(records: Sequence[SourceRecord]) -> dict[int, Mark]:
    marks: dict[int, Mark] = {}
    for record in records:
        if record.key == MARK_KEY:
            try:
                marks[record.partition] = decode_mark(record.value)
            except InvalidRequest as exc:
                marks.pop(record.partition, None)
                log.error("history_mark_refused", partition=record.partition, offset=record.offset, reason=exc.message)
    return marks


def _new_reading() -> int:
    return secrets.randbits(64) | 1

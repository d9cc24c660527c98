"""Read and write the compacted topic `histories`, and find each user's newest record and each partition's mark."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import structlog

from services.contracts.stored_history import PackedHistory
from services.contracts.topics.histories import (
    HISTORIES,
    MARK_KEY,
    EncodedHistory,
    HistoryRecord,
    Mark,
    decode_history,
    decode_mark,
    encode_history,
    encode_mark,
)
from services.platform.errors import Conflict, InvalidRequest, PreconditionFailed
from services.platform.stream.ports import Reader
from services.platform.stream.reading import read_ranges
from services.platform.stream.records import Position, SourceRecord, pack_position, unpack_position
from services.user_state.ports import HistoryOutbox

log = structlog.get_logger()

# A round ends with a mark. Without a mark in these last records, the whole partition is read.
_TAIL_RECORDS = 500
_POLL_RECORDS = 2_000
# Above this number of new entries, plus a quarter of the number in the arrays, the new ones are merged into the arrays.
# A dictionary entry takes some hundred bytes.
_FEW = 65_536


class HistoryTopic:
    """Reads and writes the assigned partitions.

    kept: called with the number of users written. marks: each assigned partition's newest mark. is_another: the topic
    was recreated.
    """

    def __init__(self, topic: Reader, outbox: HistoryOutbox, kept: Callable[[int], None] = lambda users: None) -> None:
        self._topic, self._outbox, self._kept = topic, outbox, kept
        self.marks: dict[int, Mark] = {}
        self.is_another = False
        # User records read and written per partition since its assignment.
        self._records: Counter[int] = Counter()
        self._last_offsets: dict[int, int] = {}
        self._index = HistoryIndex()
        # Partitions not fully indexed, and the iterator that indexes them.
        self._unindexed: set[int] = set()
        self._indexing: Iterator[object] | None = None

    def take(self, partitions: Sequence[int], num_partitions: int) -> dict[int, Mark]:
        """Assign more partitions. Return the newest marks found; partitions without one get an empty mark in `marks`.

        num_partitions: of `interactions`. Raises: PreconditionFailed if the topic has another number;
        DependencyUnavailable.
        """
        if (found_partitions := self._topic.num_partitions()) != num_partitions:
            raise PreconditionFailed(
                f"topic {HISTORIES!r} has {found_partitions} partitions, `interactions` has {num_partitions}: delete "
                f"{HISTORIES!r}; it is then created and filled again"
            )
        bounds = self._topic.bounds(partitions)
        self.marks |= {p: Mark(reading=0, covered=-1, num_partitions=num_partitions) for p in partitions}
        self._last_offsets |= {partition: end - 1 for partition, (_, end) in bounds.items()}
        tails = {partition: max(first, end - _TAIL_RECORDS) for partition, (first, end) in bounds.items()}
        self._topic.assign(tails)
        found = _newest_marks(self._topic.read_to_end())
        if any(partition not in found and bounds[partition][0] < tails[partition] for partition in partitions):
            found = _newest_marks(
                [record for records in self.scan(partitions) for record in records if record.key == MARK_KEY]
            )
        self._unindexed.update(partitions)
        self._indexing = self._read_index()
        return found

    def leave(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            for table in (self.marks, self._last_offsets, self._records):
                table.pop(partition, None)
        self._unindexed &= self.marks.keys()
        if not self.marks:
            self._index = HistoryIndex()

    def void(self) -> None:
        """Forget the last offsets, so that any next offset is accepted."""
        self._last_offsets = {}

    def write_marks(self, marks: Mapping[int, Mark]) -> None:
        """Write the newest marks. Raises: DependencyUnavailable, Conflict."""
        if not marks:
            return
        offsets = self._outbox.keep([EncodedHistory(p, MARK_KEY, encode_mark(mark)) for p, mark in marks.items()])
        for (partition, mark), offset in zip(marks.items(), offsets, strict=True):
            if offset >= 0:
                self._check_offset(partition, offset)
            self.marks[partition] = mark

    def write(self, histories: Mapping[str, PackedHistory | None], homes: Mapping[str, int]) -> list[str]:
        """Write users whose home partition is assigned; None writes a tombstone. Return the users whose record's offset
        is unknown. Raises: DependencyUnavailable, Conflict.
        """
        records = []
        for user_id, history in histories.items():
            home = homes[user_id]
            if home in self.marks:
                value = None if history is None else encode_history(user_id, history, self.marks[home].reading)
                records.append(EncodedHistory(home, user_id.encode(), value))
        offsets = self._outbox.keep(records)
        unknown = []
        for record, offset in zip(records, offsets, strict=True):
            if offset < 0:
                unknown.append(record.key.decode())
                continue
            self._check_offset(record.partition, offset)
            self._index.put(record.key, record.partition, offset)
            self._records[record.partition] += 1
        self._kept(len(records))
        return unknown

    def find(self, user_ids: Collection[str]) -> dict[str, HistoryRecord]:
        while self.index():
            pass
        wanted: dict[int, list[tuple[int, str]]] = {}
        for user_id in user_ids:
            place = self._index.get(user_id.encode())
            if place is not None and place.partition in self.marks:
                wanted.setdefault(place.partition, []).append((place.offset, user_id))
        found: dict[str, HistoryRecord] = {}
        for places in wanted.values():
            places.sort(reverse=True)
        while wanted:
            now = {partition: places.pop() for partition, places in wanted.items()}
            records = self._topic.records_at({partition: offset for partition, (offset, _) in now.items()})
            for partition, (_, user_id) in now.items():
                record = records.get(partition)
                if record is not None and record.key == user_id.encode() and (history := self.read(record)):
                    found[user_id] = history
            wanted = {partition: places for partition, places in wanted.items() if places}
        return found

    @property
    def num_records(self) -> int:
        """The number of users' records read from and written to the assigned partitions."""
        return self._records.total()

    def has_record(self, user_id: str) -> bool:
        """Whether a record of the user was read or written."""
        return self._index.get(user_id.encode()) is not None

    def read(self, record: SourceRecord) -> HistoryRecord | None:
        """Return a record's history; None if it cannot be used."""
        if record.value is None or record.key is None:
            return None
        try:
            history = decode_history(record.key, record.value)
        except InvalidRequest as exc:
            log.error(
                "history_record_refused",
                topic=HISTORIES,
                partition=record.partition,
                offset=record.offset,
                reason=exc.message,
            )
            return None
        return history if history.reading == self.marks[record.partition].reading else None

    def is_newest(self, record: SourceRecord) -> bool:
        """Whether no later record of the user is known."""
        return self._index.get(record.key or b"") == (record.partition, record.offset)

    def index(self) -> bool:
        """Index the next records; False at the topic's end. Raises: DependencyUnavailable."""
        if self._indexing is not None and next(self._indexing, None) is None:
            self._indexing = None
            self._unindexed.clear()
        return self._indexing is not None

    def index_again(self, partitions: Sequence[int]) -> Iterator[Sequence[SourceRecord]]:
        """Index these and all partly indexed partitions. Yield their records. Raises: DependencyUnavailable."""
        self._unindexed.update(partitions)
        yield from self._read_index()
        self._indexing = None
        self._unindexed.clear()

    def scan(self, partitions: Collection[int] | None = None) -> Iterator[Sequence[SourceRecord]]:
        """Yield the records of partitions (None: all assigned) up to their present end. Raises:
        DependencyUnavailable.
        """
        bounds = self._topic.bounds(list(self.marks if partitions is None else partitions))
        ranges = {partition: (first, end - 1) for partition, (first, end) in bounds.items()}
        yield from read_ranges(self._topic, ranges, max_records=_POLL_RECORDS)

    def close(self) -> None:
        self._topic.close()

    def _check_offset(self, partition: int, offset: int) -> None:
        if offset <= self._last_offsets.get(partition, -1):
            self.is_another = True
            raise Conflict(f"the topic {HISTORIES!r} was recreated: all users are written to it again")
        self._last_offsets[partition] = offset

    def _read_index(self) -> Iterator[Sequence[SourceRecord]]:
        partitions = list(self._unindexed)
        self._records.update({partition: -self._records[partition] for partition in partitions})
        for records in self.scan(partitions):
            for record in records:
                if record.key:
                    self._records[record.partition] += 1
                    self._index.put(record.key, record.partition, record.offset)
            yield records


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


class HistoryIndex:
    """The position of each user's newest record, in 16 bytes per user. For two users with one hash, it has only one
    position, so the reader compares the record's key.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(0, dtype=np.int64)
        self._places = np.zeros(0, dtype=np.int64)
        self._new: dict[int, int] = {}

    def put(self, key: bytes, partition: int, offset: int) -> None:
        """Add a record of this key. Records may come in any order."""
        name, place = hash(key), pack_position(partition, offset)
        self._new[name] = max(place, self._new.get(name, -1))
        if len(self._new) > _FEW + len(self._hashes) // 4:
            self._merge()

    def get(self, key: bytes) -> Position | None:
        """Return the position of the newest record with this key, or with another key of the same hash."""
        name = hash(key)
        place = self._new.get(name, -1)
        at = int(np.searchsorted(self._hashes, name))
        if at < len(self._hashes) and self._hashes[at] == name:
            place = max(place, int(self._places[at]))
        return None if place < 0 else unpack_position(place)

    def _merge(self) -> None:
        hashes = np.concatenate((self._hashes, np.fromiter(self._new, dtype=np.int64, count=len(self._new))))
        places = np.concatenate((self._places, np.fromiter(self._new.values(), dtype=np.int64, count=len(self._new))))
        order = np.lexsort((places, hashes))
        hashes, places = hashes[order], places[order]
        last = np.append(hashes[1:] != hashes[:-1], True)
        self._hashes, self._places, self._new = hashes[last], places[last], {}

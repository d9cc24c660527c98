"""Read ranges of records, single records, and a partition backwards.

Callers ask for records that exist, so reading fails if the broker returns none for `SILENCE_S`. Gaps from compaction
and transactions are skipped.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

from services.platform.errors import DependencyUnavailable
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord

SILENCE_S = 10.0
# Records per poll in `read_offsets`, and per block in `Backwards`.
_TOGETHER, _BLOCK = 64, 500
_POLL_MS = 200
# It is short, because a poll that finds only transaction markers takes the whole time.
_RANGE_POLL_MS = 50


def read_ranges(
    reader: Reader, ranges: Mapping[int, tuple[int, int]], *, max_records: int
) -> Iterator[Sequence[SourceRecord]]:
    """Yield the first topic's records, poll by poll; a poll without records yields an empty list.

    ranges: first and last offset per partition; the first one exists. Raises: DependencyUnavailable.
    """
    missing = {partition: last for partition, (first, last) in ranges.items() if first <= last}
    if not missing:
        return
    reader.assign({partition: ranges[partition][0] for partition in missing})
    at: dict[int, int] = {}
    deadline = time.monotonic() + SILENCE_S
    while missing:
        records = [one for one in reader.poll(_RANGE_POLL_MS, max_records) if one.partition in missing]
        # Transaction markers have offsets, but are not records.
        before, at = at, {record.partition: record.offset + 1 for record in records} or dict(reader.positions())
        if at == before and time.monotonic() > deadline:
            raise DependencyUnavailable(f"Kafka gave {at} of {missing} only")
        yield [one for one in records if one.offset <= missing[one.partition]]
        if at != before:
            deadline = time.monotonic() + SILENCE_S  # the caller's processing time does not count
        missing = {partition: last for partition, last in missing.items() if at.get(partition, 0) <= last}


def read_between(reader: Reader, ranges: Mapping[int, tuple[int, int]]) -> Iterator[SourceRecord]:
    """Yield the existing records. ranges: first and last offset per partition. Raises: DependencyUnavailable."""
    begins = {partition: first for partition, (first, _) in reader.bounds(ranges.keys()).items()}
    there = {p: (max(first, begins[p]), last) for p, (first, last) in ranges.items()}
    for records in read_ranges(reader, there, max_records=10_000):
        yield from records


def read_offsets(
    reader: Reader, topic: str, partition: int, offsets: Sequence[int], *, max_gap: int
) -> Iterator[tuple[int, SourceRecord | None]]:
    """Yield these ascending offsets, each with its record, or None if the record was deleted.

    max_gap: reading a gap of up to this many records is cheaper than another fetch.
    Raises: DependencyUnavailable.
    """
    at, next_offset = 0, -1
    deadline = time.monotonic() + SILENCE_S
    while at < len(offsets):
        # For an offset outside these bounds, the broker would begin at another one.
        if next_offset < 0:
            first, end = reader.bounds([partition], topic)[partition]
        if not first <= offsets[at] < end:
            yield offsets[at], None
            at += 1
            continue
        if next_offset < 0 or offsets[at] - next_offset > max_gap:
            reader.assign({partition: offsets[at]}, topic)
        records = reader.poll(_POLL_MS, _TOGETHER)
        if records:
            deadline = time.monotonic() + SILENCE_S
        elif time.monotonic() > deadline:
            raise DependencyUnavailable(f"Kafka does not give offset {offsets[at]} of {topic} {partition}")
        else:
            next_offset = -1
        for record in records:
            while at < len(offsets) and offsets[at] < record.offset:
                yield offsets[at], None
                at += 1
            if at < len(offsets) and offsets[at] == record.offset:
                yield record.offset, record
                at += 1
            next_offset = record.offset + 1


class Backwards:
    """Iterates once over a partition's newest records in blocks.

    max_bytes: total size of keys and values; the block that exceeds it is the last one. max_s: total time.
    is_complete: whether all records were read.
    """

    def __init__(self, reader: Reader, partition: int, *, max_bytes: int, max_s: float) -> None:
        self._reader, self._partition = reader, partition
        self._max_bytes, self._max_s = max_bytes, max_s
        self.is_complete = False

    def __iter__(self) -> Iterator[list[SourceRecord]]:
        """Yield blocks, the newest first, each in the partition's order. Raises: DependencyUnavailable."""
        deadline, size, partition = time.monotonic() + self._max_s, 0, self._partition
        first, end = self._reader.bounds([partition])[partition]
        while first < end:
            if size > self._max_bytes:
                return
            start = max(first, end - _BLOCK)
            self._reader.assign({partition: start})
            block: list[SourceRecord] = []
            # Compaction and transactions leave gaps: the position, not a count, shows the block's end.
            while self._reader.positions()[partition] < end:
                if time.monotonic() > deadline:
                    return
                block += [one for one in self._reader.poll(_POLL_MS) if one.offset < end]
            size += sum(len(one.key or b"") + len(one.value or b"") for one in block)
            end = start
            yield block
        self.is_complete = True

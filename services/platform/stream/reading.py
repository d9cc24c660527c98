"""Read records known to exist.

Silence is therefore the broker's fault: reading fails after `SILENCE_S`. Gaps from compaction and transactions are
skipped.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

from services.platform.errors import DependencyUnavailable
from services.platform.stream.ports import Reader
from services.platform.stream.record import SourceRecord

SILENCE_S = 10.0
# Records per poll in `read_offsets`.
_TOGETHER = 64


def read_ranges(
    reader: Reader, ranges: Mapping[int, tuple[int, int]], *, poll_ms: int, max_records: int
) -> Iterator[Sequence[SourceRecord]]:
    """Yield the first topic's records between two offsets per partition (both included, the first existing), poll by
    poll; a poll without records yields an empty list.

    Raises: DependencyUnavailable.
    """
    missing = {partition: last for partition, (first, last) in ranges.items() if first <= last}
    if not missing:
        return
    reader.assign({partition: ranges[partition][0] for partition in missing})
    deadline = time.monotonic() + SILENCE_S
    while missing:
        records = [one for one in reader.poll(poll_ms, max_records) if one.partition in missing]
        at = {record.partition: record.offset + 1 for record in records}
        if at:
            deadline = time.monotonic() + SILENCE_S
        elif time.monotonic() > deadline:
            raise DependencyUnavailable(f"Kafka gave {reader.positions()} of {missing} only")
        else:
            # Transaction markers have offsets, but are not records.
            at = dict(reader.positions())
        yield [one for one in records if one.offset <= missing[one.partition]]
        missing = {partition: last for partition, last in missing.items() if at.get(partition, 0) <= last}


def read_between(reader: Reader, ranges: Mapping[int, tuple[int, int]]) -> Iterator[SourceRecord]:
    """Yield the existing records between two offsets per partition.

    Raises: DependencyUnavailable.
    """
    begins = {partition: first for partition, (first, _) in reader.bounds(ranges.keys()).items()}
    there = {p: (max(first, begins[p]), last) for p, (first, last) in ranges.items()}
    for records in read_ranges(reader, there, poll_ms=200, max_records=10_000):
        yield from records


def read_offsets(
    reader: Reader, topic: str, partition: int, offsets: Sequence[int], *, max_gap: int
) -> Iterator[tuple[int, SourceRecord | None]]:
    """Yield these ascending offsets with their records; None if gone.

    max_gap: skipping this many records is cheaper than another fetch.
    Raises: DependencyUnavailable.
    """
    at, next_offset = 0, -1
    deadline = time.monotonic() + SILENCE_S
    while at < len(offsets):
        # Outside these bounds the broker would begin elsewhere.
        if next_offset < 0:
            first, end = reader.bounds([partition], topic)[partition]
        if not first <= offsets[at] < end:
            yield offsets[at], None
            at += 1
            continue
        if next_offset < 0 or offsets[at] - next_offset > max_gap:
            reader.assign({partition: offsets[at]}, topic)
        records = reader.poll(200, _TOGETHER)
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

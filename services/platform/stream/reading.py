"""Reading what is known to be there: stretches of a topic's partitions, or single records of one.

Whoever asks knows from elsewhere that the records were there, so silence is the broker's: reading gives up after
`SILENCE_S`. Compaction and transactions leave gaps, which are passed over.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

from services.platform.errors import DependencyUnavailable
from services.platform.stream.ports import Reader
from services.platform.stream.record import SourceRecord

# Reading gives up when nothing came for so long.
SILENCE_S = 10.0
# Single records that a poll may bring; those behind a wanted one are read in vain.
_TOGETHER = 64


def read_ranges(
    reader: Reader, ranges: Mapping[int, tuple[int, int]], *, poll_ms: int, max_records: int
) -> Iterator[Sequence[SourceRecord]]:
    """By partition from the first to the last of two offsets (both included, the first one still there), as polls bring
    the records of the reader's first topic; a poll that brought none is an empty list.

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
            # Transaction markers have offsets, but are no records.
            at = dict(reader.positions())
        yield [one for one in records if one.offset <= missing[one.partition]]
        missing = {partition: last for partition, last in missing.items() if at.get(partition, 0) <= last}


def read_between(reader: Reader, ranges: Mapping[int, tuple[int, int]]) -> Iterator[SourceRecord]:
    """The records from the first to the last offset of each partition, as far as they are there.

    Raises: DependencyUnavailable.
    """
    begins = {partition: first for partition, (first, _) in reader.bounds(ranges.keys()).items()}
    there = {p: (max(first, begins[p]), last) for p, (first, last) in ranges.items()}
    for records in read_ranges(reader, there, poll_ms=200, max_records=10_000):
        yield from records


def read_offsets(
    reader: Reader, topic: str, partition: int, offsets: Sequence[int], *, max_gap: int
) -> Iterator[tuple[int, SourceRecord | None]]:
    """The record at each of these ascending offsets; None where it is gone.

    max_gap: so many records between two wanted ones are read and thrown away, which is cheaper than another fetch.
    Raises: DependencyUnavailable.
    """
    at, next_offset = 0, -1
    deadline = time.monotonic() + SILENCE_S
    while at < len(offsets):
        # Outside of these the broker would begin somewhere else: where retention took all, or where another topic of
        # the same name is shorter.
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

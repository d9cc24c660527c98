"""Write those past interactions that `interactions` lacks, at their planned positions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.contracts.topics.interactions import INTERACTIONS, decode_interaction, encode_interaction
from services.offline.backfill.past_interactions import Layout, event_id, interaction
from services.offline.datasets import Interactions
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.stream.kafka import Record
from services.platform.stream.ports import Reader
from services.platform.stream.records import Position, SourceRecord

WRITE_CHUNK = 20_000

# Called with (phase, done, total). Phase "write" counts interactions, "states" counts users.
Progressed = Callable[[str, int, int], None]


class Writer(Protocol):
    """Writes records in order per partition and waits until all are acknowledged (BulkProducer)."""

    def send_many(self, records: Sequence[Record], timeout_s: float = ...) -> list[Position]:
        """Return the records' positions, in order."""


def write_past(
    past: Interactions,
    layout: Layout,
    *,
    stream: Reader,
    writer: Writer,
    pause: Callable[[], None],
    progress: Progressed = lambda *_: None,
) -> int:
    """Write the rows that the topic lacks, in order, and return their number.

    An interrupted run leaves the first of its records in each partition. pause: called after each chunk to extend the
    consumer's pause. Raises: PreconditionFailed if the topic begins with other records, or something else writes to it
    meanwhile; DependencyUnavailable.
    """
    present = _check_topic(past, layout, stream)
    done = np.array([present.get(partition, 0) for partition in range(len(layout.rows))], dtype=np.int64)
    missing = np.flatnonzero(layout.offset >= done[layout.partition])
    for start in range(0, len(missing), WRITE_CHUNK):
        rows = missing[start : start + WRITE_CHUNK]
        positions = writer.send_many(list(_records(past, rows)), timeout_s=120.0)
        for row, (partition, offset) in zip(rows.tolist(), positions, strict=True):
            if partition != layout.partition[row] or offset not in (layout.offset[row], -1):
                raise PreconditionFailed(
                    f"something else writes to {INTERACTIONS!r} during the import (offset {offset} of partition "
                    f"{partition} was not expected): stop it, and import into an empty topic"
                )
        pause()
        progress("write", len(past) - len(missing) + start + len(rows), len(past))
    return len(missing)


def _check_topic(past: Interactions, layout: Layout, stream: Reader) -> dict[int, int]:
    """Return how many records of this import each partition has; only the first and the last one are compared."""
    ends = stream.end_offsets()
    present = {partition: min(end, len(layout.rows[partition])) for partition, end in ends.items()}
    firsts = {partition: 0 for partition, end in ends.items() if end}
    lasts = {partition: count - 1 for partition, count in present.items() if count}
    for offsets in (firsts, lasts):
        found = stream.records_at(offsets)
        for partition, offset in offsets.items():
            rows = layout.rows[partition]
            wanted = event_id(past, int(rows[offset])) if offset < len(rows) else None
            if wanted is None or _event_id(found.get(partition)) != wanted:
                raise PreconditionFailed(
                    f"partition {partition} of {INTERACTIONS!r} holds another event than this import's at offset "
                    f"{offset}: past interactions are imported before anything else is written (start with an empty "
                    "topic and an empty state store)"
                )
    return present


def _event_id(record: SourceRecord | None) -> str | None:
    if record is None:
        return None
    try:
        return decode_interaction(record.value, record.headers, record.key).event_id
    except InvalidRequest:
        return None


def _records(past: Interactions, rows: npt.NDArray[np.int64]) -> Iterator[Record]:
    for row in rows.tolist():
        one = interaction(past, row)
        yield Record(INTERACTIONS, one.user_id.encode(), encode_interaction(one))

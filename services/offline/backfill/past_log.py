"""Write past interactions to `interactions`: the rows that the topic lacks, at their planned positions."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.contracts.topics.interactions import INTERACTIONS, decode_interaction, encode_interaction
from services.offline.backfill.past_interactions import Layout, event_id, interaction
from services.offline.datasets import Interactions
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.stream.kafka import Record
from services.platform.stream.ports import Reader
from services.platform.stream.records import Position

WRITE_CHUNK = 20_000

# (phase, done, total): "write" counts interactions, "states" counts users.
Progressed = Callable[[str, int, int], None]


class Writer(Protocol):
    """Writes records in order per partition and waits until all are acknowledged (BulkProducer)."""

    def send_many(self, records: Sequence[Record], timeout_s: float = ...) -> list[Position]:
        """Return the records' positions, in order."""


class PastLog:
    """Writes past interactions. pause: called after each chunk, to extend the pause of the stream's consumer."""

    def __init__(
        self, *, stream: Reader, writer: Writer, pause: Callable[[], None], progress: Progressed = lambda *_: None
    ) -> None:
        self._stream, self._writer, self._pause, self._progress = stream, writer, pause, progress

    def write(self, past: Interactions, layout: Layout) -> int:
        """Write the rows that the topic lacks, in order, and return their number.

        An interrupted run leaves a prefix in each partition. Raises: PreconditionFailed if the topic begins with other
        records, or something else writes to it meanwhile; DependencyUnavailable.
        """
        return self._write(past, layout, self._check_topic(past, layout))

    def _check_topic(self, past: Interactions, layout: Layout) -> dict[int, int]:
        present = {}
        for partition, end in self._stream.end_offsets().items():
            mine = len(layout.rows[partition])
            present[partition] = min(end, mine)
            if end:
                self._expect(past, layout, partition, 0)
            if present[partition]:
                self._expect(past, layout, partition, present[partition] - 1)
        return present

    def _expect(self, past: Interactions, layout: Layout, partition: int, offset: int) -> None:
        rows = layout.rows[partition]
        wanted = event_id(past, int(rows[offset])) if offset < len(rows) else None
        found = self._event_id_at(partition, offset)
        if wanted is None or found != wanted:
            raise PreconditionFailed(
                f"partition {partition} of {INTERACTIONS!r} holds another event than this import's at offset {offset}: "
                "past interactions are imported before anything else is written (start with an empty topic and an "
                "empty state store)"
            )

    def _event_id_at(self, partition: int, offset: int) -> str | None:
        ends = self._stream.end_offsets()
        self._stream.seek({p: offset if p == partition else end for p, end in ends.items()})
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for record in self._stream.poll(500, 1_000):
                if record.partition == partition:
                    if record.offset != offset:
                        return None
                    try:
                        return decode_interaction(record.value, record.headers, record.key).event_id
                    except InvalidRequest:
                        return None
        raise PreconditionFailed(f"partition {partition} of {INTERACTIONS!r} cannot be read at offset {offset}")

    def _write(self, past: Interactions, layout: Layout, present: Mapping[int, int]) -> int:
        done = np.array([present.get(partition, 0) for partition in range(len(layout.rows))], dtype=np.int64)
        missing = np.flatnonzero(layout.offset >= done[layout.partition])
        for start in range(0, len(missing), WRITE_CHUNK):
            rows = missing[start : start + WRITE_CHUNK]
            positions = self._writer.send_many(list(self._records(past, rows)), timeout_s=120.0)
            for row, (partition, offset) in zip(rows.tolist(), positions, strict=True):
                if partition != layout.partition[row] or offset not in (layout.offset[row], -1):
                    raise PreconditionFailed(
                        f"something else writes to {INTERACTIONS!r} during the import (offset {offset} of partition "
                        f"{partition} was not expected): stop it, and import into an empty topic"
                    )
            self._pause()
            self._progress("write", len(past) - len(missing) + start + len(rows), len(past))
        return len(missing)

    def _records(self, past: Interactions, rows: npt.NDArray[np.int64]) -> Iterator[Record]:
        for row in rows.tolist():
            one = interaction(past, row)
            yield Record(INTERACTIONS, one.user_id.encode(), encode_interaction(one))

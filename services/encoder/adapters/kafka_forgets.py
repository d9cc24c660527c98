"""The forget log over Apache Kafka: read from the beginning, then followed; progress is kept by whoever applies it."""

import time

from services.common.errors import DependencyUnavailable, InvalidRequest, PreconditionFailed
from services.common.forgets import decode_forget
from services.common.stream.record import SourceRecord
from services.common.topics import FORGETS
from services.encoder.adapters.kafka_stream import KafkaStream
from services.encoder.forgetting import ForgetRecord

_PARTITION = 0
_MAX_RECORDS = 10_000


class KafkaForgetLog:
    """Reads the one partition of `forgets`; for one thread."""

    def __init__(self, stream: KafkaStream, *, read_timeout_s: float = 60.0) -> None:
        """stream: of `forgets`. read_timeout_s: how long reading all that it holds may take."""
        self._stream = stream
        self._read_timeout_s = read_timeout_s
        self._next = 0
        self._placed = False
        self._is_whole = False

    def read(self) -> list[ForgetRecord]:
        """Raises: DependencyUnavailable; what was read before it is read again."""
        start = self._next
        try:
            found = self._poll(0) if self._is_whole else self._read_whole()
        except DependencyUnavailable:
            self._next, self._placed = start, False
            raise
        return [_decoded(record) for record in found]

    def close(self) -> None:
        """Give the connection up; the next read goes on where this one ended."""
        self._placed = False
        self._stream.close()

    def _read_whole(self) -> list[SourceRecord]:
        partitions = list(self._stream.partitions())
        if partitions != [_PARTITION]:
            raise PreconditionFailed(
                f"topic {FORGETS!r} has partitions {partitions}; allowed: one, so that it has an order"
            )
        self._place()
        end = self._stream.end_offsets()[_PARTITION]
        deadline = time.monotonic() + self._read_timeout_s
        found: list[SourceRecord] = []
        # Compaction takes records away, so that the reader's place says when the end is reached, not their number.
        while self._stream.positions()[_PARTITION] < end:
            found += self._poll(200)
            if time.monotonic() > deadline:
                raise DependencyUnavailable(f"{FORGETS!r} could not be read within {self._read_timeout_s:.0f} s")
        self._is_whole = True
        return found

    def _poll(self, timeout_ms: int) -> list[SourceRecord]:
        self._place()
        found = list(self._stream.poll(timeout_ms, _MAX_RECORDS))
        if found:
            self._next = found[-1].offset + 1
        return found

    def _place(self) -> None:
        if not self._placed:
            self._stream.seek({_PARTITION: self._next})
            self._placed = True


def _decoded(record: SourceRecord) -> ForgetRecord:
    try:
        return ForgetRecord(record, decode_forget(record.key, record.value))
    except InvalidRequest as exc:
        return ForgetRecord(record, None, exc.message)

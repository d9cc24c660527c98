"""Header names in any encoding: kafka-python fails forever at one that is not UTF-8.

Kafka does not check names, so a producer could stop a stream. Invalid bytes become U+FFFD.
"""

from typing import Any

from kafka.record.default_records import DefaultRecordBatch


class _Name(bytes):
    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, errors)


class _Buffer(bytearray):
    """A buffer whose slices decode without failing."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _Name(found) if isinstance(key, slice) else found


def _tolerant(read: Any) -> Any:
    def read_any(batch: Any) -> Any:
        try:
            return read(batch)
        except UnicodeDecodeError:
            plain, batch._buffer = batch._buffer, _Buffer(batch._buffer)
            try:
                return read(batch)
            finally:
                batch._buffer = plain

    read_any.tolerant = True  # type: ignore[attr-defined]
    return read_any


def accept_any_header_name() -> None:
    """Make kafka-python's consumers in this process read such records. Idempotent."""
    read = DefaultRecordBatch._read_msg
    if not hasattr(read, "tolerant"):
        DefaultRecordBatch._read_msg = _tolerant(read)

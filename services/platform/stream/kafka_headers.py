"""Header names in any encoding: kafka-python stops at a record whose header name is not UTF-8, and never gets past it.

Kafka itself does not look at names, so one careless producer could stop a stream for ever. Bytes that are no text
become U+FFFD; keys, values and header values are left alone. Costs nothing for records with proper names.
"""

from typing import Any

from kafka.record.default_records import DefaultRecordBatch


class _Name(bytes):
    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, errors)


class _Buffer(bytearray):
    """Slices decode without failing."""

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
    """Make kafka-python's consumers of this process read such records. Idempotent."""
    read = DefaultRecordBatch._read_msg
    if not hasattr(read, "tolerant"):
        DefaultRecordBatch._read_msg = _tolerant(read)

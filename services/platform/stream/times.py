"""Protobuf timestamps as Unix milliseconds."""

from typing import Any

from services.platform.errors import InvalidRequest

# Protobuf's limits, years 1 to 9999: other values break later writers.
_LEAST_S, _MOST_S = -62_135_596_800, 253_402_300_799
MOST_MS = 1000 * _MOST_S + 999


def set_ms(stamp: Any, unix_ms: int) -> None:
    """Write a time into a Timestamp."""
    stamp.seconds, ms = divmod(unix_ms, 1000)
    stamp.nanos = ms * 1_000_000


def read_ms(stamp: Any, name: str) -> int:
    """Return the Timestamp, rounded down to milliseconds.

    Raises: InvalidRequest outside Protobuf's limits.
    """
    if not 0 <= stamp.nanos < 1_000_000_000:
        raise InvalidRequest.of(f"{name}.nanos", stamp.nanos, "0-999999999")
    if not _LEAST_S <= stamp.seconds <= _MOST_S:
        raise InvalidRequest.of(f"{name}.seconds", stamp.seconds, f"{_LEAST_S} to {_MOST_S}: years 1 to 9999")
    return int(stamp.seconds * 1000 + stamp.nanos // 1_000_000)

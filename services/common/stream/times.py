"""Protobuf's timestamps as Unix milliseconds, as everything here counts time."""

from typing import Any


def set_ms(stamp: Any, unix_ms: int) -> None:
    """Write a moment into a Timestamp."""
    stamp.seconds, ms = divmod(unix_ms, 1000)
    stamp.nanos = ms * 1_000_000


def read_ms(stamp: Any) -> int:
    """The moment of a Timestamp; finer parts are cut off."""
    return int(stamp.seconds * 1000 + stamp.nanos // 1_000_000)

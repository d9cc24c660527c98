"""Read the topic `forgets` in an encoder process: first all of it, then new records.

A forget's positions are compared with the end of `interactions`. The caller tracks progress.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from services.contracts.topics.forgets import FORGETS, Forget, decode_forget
from services.platform.errors import DependencyUnavailable, InvalidRequest, PreconditionFailed
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.records import SourceRecord, furthest
from services.user_state.forgetting import Forgotten

log = structlog.get_logger()

_PARTITION = 0


@dataclass(frozen=True, slots=True)
class ForgetRecord:
    """A record's content, or why it cannot be read."""

    record: SourceRecord
    forget: Forget | None
    reason: str = ""


class ForgetTopic:
    """Reads the topic in order. Not thread-safe."""

    def __init__(self, reader: Reader) -> None:
        """reader: reads `forgets` only."""
        self._reader = reader
        self._is_whole = False

    def read(self) -> list[ForgetRecord]:
        """The records since the last call; first the whole topic. Does not wait.

        Raises: DependencyUnavailable; the next call then reads the same records.
        """
        found = self._reader.poll(0) if self._is_whole else self._read_whole()
        return [_decoded(record) for record in found]

    def close(self) -> None:
        """Close the connection. The next read continues."""
        self._reader.close()

    def _read_whole(self) -> list[SourceRecord]:
        partitions = list(self._reader.partitions())
        if partitions != [_PARTITION]:
            raise PreconditionFailed(
                f"topic {FORGETS!r} has partitions {partitions}; allowed: one, so that it has an order"
            )
        self._reader.seek({_PARTITION: 0})
        found = self._reader.read_to_end()
        self._is_whole = True
        return found


@dataclass(kw_only=True, eq=False)
class KnownForgets:
    """All forgets so far.

    forgotten: per user, the last forgotten positions. ends: one past the last record of each partition of
    `interactions`. unreadable: not dead letters yet. named: per partition the highest offset in any forget.
    """

    topic: ForgetTopic
    forgotten: Forgotten
    ends: Callable[[], Offsets] = dict
    unreadable: list[ForgetRecord] = field(default_factory=list, init=False)
    named: Mapping[int, int] = field(default_factory=dict, init=False)
    # Each user's latest forget, the one that compaction retains.
    _latest: dict[str, ForgetRecord] = field(default_factory=dict, init=False)
    # Not yet compared with the log's ends.
    _compared_next: list[ForgetRecord] = field(default_factory=list, init=False)
    # The last comparison found positions beyond the log's ends.
    _was_ahead: bool = field(default=False, init=False)
    # Guards what `of` reads.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def read(self) -> list[ForgetRecord]:
        """The readable records since the last call.

        Raises: DependencyUnavailable, also the first time that a forget names a position beyond the log's end: a newly
        elected leader may not know its end yet.
        """
        self._compared_next += self.topic.read()
        ends = self.ends() if self._compared_next else {}
        found = [_within(ends, record) for record in self._compared_next]
        ahead = [one.record.offset for one, within in zip(self._compared_next, found, strict=True) if within is not one]
        was_ahead, self._was_ahead = self._was_ahead, bool(ahead)
        if ahead and not was_ahead:
            raise DependencyUnavailable(
                f"forgets {ahead[:10]} name positions beyond the log's end; they are read again"
            )
        if ahead:
            log.error("forgets_ahead_of_log", offsets=ahead, ends=dict(ends))
        readable = []
        for record, within in zip(self._compared_next, found, strict=True):
            if record.forget is None or within.forget is None:
                self.unreadable.append(record)
                continue
            self.named = furthest(self.named, record.forget.up_to)
            with self._lock:
                self.forgotten.add(within.forget)
                self._latest[within.forget.user_id] = within
            readable.append(within)
        self._compared_next = []
        return readable

    def behind(self, offset: int) -> list[ForgetRecord]:
        """Each user's latest forget after this offset; drop unreadable records up to it."""
        self.unreadable = [one for one in self.unreadable if one.record.offset > offset]
        return [one for one in self._latest.values() if one.record.offset > offset]

    def of(self, user_id: str) -> tuple[int, Mapping[int, int]] | None:
        """The offset of the user's latest forget and the forgotten positions. Thread-safe."""
        with self._lock:
            latest = self._latest.get(user_id)
            return None if latest is None else (latest.record.offset, self.forgotten.up_to(user_id))


def _decoded(record: SourceRecord) -> ForgetRecord:
    try:
        return ForgetRecord(record, decode_forget(record.key, record.value))
    except InvalidRequest as exc:
        return ForgetRecord(record, None, exc.message)


def _within(ends: Offsets, record: ForgetRecord) -> ForgetRecord:
    """The record with positions limited to the log's present end, so that later events count."""
    if record.forget is None:
        return record
    named = record.forget.up_to
    up_to = {partition: min(offset, ends.get(partition, offset + 1) - 1) for partition, offset in named.items()}
    return record if up_to == named else replace(record, forget=replace(record.forget, up_to=up_to))

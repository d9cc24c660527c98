"""The topic `forgets` as each encoder process reads it: whole, before anything is applied, then followed.

What it names is compared with the end of `interactions`. Progress is kept by whoever applies what is read.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from services.contracts.retraction import furthest
from services.contracts.topics.forgets import FORGETS, Forget, decode_forget
from services.platform.errors import DependencyUnavailable, InvalidRequest, PreconditionFailed
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.record import SourceRecord
from services.user_state.forgetting import Forgotten

log = structlog.get_logger()

_PARTITION = 0


@dataclass(frozen=True, slots=True)
class ForgetRecord:
    """One record of `forgets`: what it says, or why it cannot be read."""

    record: SourceRecord
    forget: Forget | None
    reason: str = ""


class ForgetTopic:
    """The records in order; for one thread."""

    def __init__(self, reader: Reader) -> None:
        """reader: of `forgets` alone."""
        self._reader = reader
        self._is_whole = False

    def read(self) -> list[ForgetRecord]:
        """What came since the last call; the first call gives all that the topic held when it was made. Never waits for
        what is not there yet. Raises: DependencyUnavailable; what was read before it is read again."""
        found = self._reader.poll(0) if self._is_whole else self._read_whole()
        return [_decoded(record) for record in found]

    def close(self) -> None:
        """Give the connection up; the next read goes on where this one ended."""
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
    """All that the topic said so far. forgotten: by user, up to where; whoever makes something of `interactions` asks
    it. ends: one past the last record of each partition of `interactions`. unreadable: what could not be read and is no
    dead letter yet. named: per partition the furthest that any forget names."""

    topic: ForgetTopic
    forgotten: Forgotten
    ends: Callable[[], Offsets] = dict
    unreadable: list[ForgetRecord] = field(default_factory=list, init=False)
    named: Mapping[int, int] = field(default_factory=dict, init=False)
    # The latest of each user, as compaction keeps them.
    _latest: dict[str, ForgetRecord] = field(default_factory=dict, init=False)
    # Read and not compared with the log's ends yet; whether some were ahead of them when it was tried last.
    _compared_next: list[ForgetRecord] = field(default_factory=list, init=False)
    _was_ahead: bool = field(default=False, init=False)
    # Of what `of` asks for.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def read(self) -> list[ForgetRecord]:
        """What came since the last call and can be read.

        Raises: DependencyUnavailable, also once where a forget names what the log does not have: a leader that was just
        elected may not know its end yet."""
        self._compared_next += self.topic.read()
        ends = self.ends() if self._compared_next else {}
        found = [_within(ends, record) for record in self._compared_next]
        ahead = [one.record.offset for one, within in zip(self._compared_next, found, strict=True) if within is not one]
        was_ahead, self._was_ahead = self._was_ahead, bool(ahead)
        if ahead and not was_ahead:
            raise DependencyUnavailable(
                f"forgets {ahead[:10]} name positions behind the log's end; they are read again"
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
        """The latest of each user, where it lies behind this offset; what cannot be read and does not is done with."""
        self.unreadable = [one for one in self.unreadable if one.record.offset > offset]
        return [one for one in self._latest.values() if one.record.offset > offset]

    def of(self, user_id: str) -> tuple[int, Mapping[int, int]] | None:
        """Where the user's latest forget lies, and up to where the user is forgotten by then; None: never. From any
        thread."""
        with self._lock:
            latest = self._latest.get(user_id)
            return None if latest is None else (latest.record.offset, self.forgotten.up_to(user_id))


def _decoded(record: SourceRecord) -> ForgetRecord:
    try:
        return ForgetRecord(record, decode_forget(record.key, record.value))
    except InvalidRequest as exc:
        return ForgetRecord(record, None, exc.message)


def _within(ends: Offsets, record: ForgetRecord) -> ForgetRecord:
    """The record itself; one that names positions which the log does not have yet with the log's end in their place:
    what the user does later counts, whoever wrote the record."""
    if record.forget is None:
        return record
    named = record.forget.up_to
    up_to = {partition: min(offset, ends.get(partition, offset + 1) - 1) for partition, offset in named.items()}
    return record if up_to == named else replace(record, forget=replace(record.forget, up_to=up_to))

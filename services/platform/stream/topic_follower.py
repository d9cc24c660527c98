"""Follow topics of one partition from their start. A recreated topic is read from its start again."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from services.platform.stream.follower import Follower, TurnClock
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord

log = structlog.get_logger()

# A check for a recreated topic reads one record (3 ms).
_LOOK_EVERY_S = 5.0


class TopicFollower(Follower):
    """Ready once all ends are reached. After that, the process serves the topics' content even if a turn of the loop
    fails.

    is_behind: True until the follower reaches the ends that the topics had when it last connected.
    """

    def __init__(
        self,
        name: str,
        topics: Reader,
        followed: Sequence[str],
        *,
        poll_s: float,
        on_ready: Callable[[], None] = lambda: None,
        backoff_s: float = 0.5,
        turns: TurnClock | None = None,
    ) -> None:
        super().__init__(name, on_ready=on_ready, backoff_s=backoff_s, max_backoff_s=backoff_s, turns=turns)
        self._topics, self._poll_s = topics, poll_s
        # By topic, the next offset to take; the subclass advances it.
        self._next = dict.fromkeys(followed, 0)
        # The topics' ends at the time of connection.
        self._ends: dict[str, int] | None = None
        # By topic: the record by which `_look` recognises the topic, and the newest record, which replaces it after the
        # next check.
        self._known_by, self._newest = dict[str, SourceRecord](), dict[str, SourceRecord]()
        self._next_look = 0.0
        self.is_behind = True

    def take(self, records: Sequence[SourceRecord], ends: Mapping[str, int]) -> None:
        """Apply a poll's records and advance `_next`. Raises: anything; the records are read again."""
        raise NotImplementedError

    def drop(self, topic: str) -> None:
        """Discard a recreated topic's content."""
        raise NotImplementedError

    def caught_up(self) -> None:
        """Called when the ends are reached, also after a new connection."""

    def poll(self) -> Sequence[SourceRecord]:
        return self._topics.poll(round(1000 * self._poll_s))

    def turn(self) -> int:
        """Connect if needed, poll, and take the records. Raises: errors of the topics and the subclass."""
        if self._ends is None:
            self._ends = self._connected()
        records = () if self.is_behind and self.is_at(self._ends) else self.poll()
        if new := {one.topic for one in records if one.offset < self._next[one.topic]} or self._look(records):
            self._begin_again(new)
            self._ends = None
            return 0
        self.take(records, self._ends)
        if self.is_behind and self.is_at(self._ends):
            self.caught_up()
            self.is_behind = False
            self.ready()
        return len(records)

    def lost(self, exc: Exception) -> None:
        """Reconnect, and continue after the last record taken."""
        self._topics.close()
        self._ends = None

    def finish(self) -> None:
        """Close; the next start reads everything again."""
        self._topics.close()

    def is_at(self, ends: Mapping[str, int]) -> bool:
        """Whether everything before these ends was read."""
        return all(self._topics.positions(topic)[0] >= end for topic, end in ends.items())

    def _connected(self) -> dict[str, int]:
        ends = {topic: self._topics.end_offsets(topic)[0] for topic in self._next}
        self._begin_again({topic for topic, end in ends.items() if self._is_another(topic, end)})
        for topic, offset in self._next.items():
            self._topics.seek({0: offset}, topic)
        self.is_behind = True
        return ends

    def _look(self, records: Sequence[SourceRecord]) -> set[str]:
        """Return the recreated topics. Idle topics are not checked."""
        self._newest.update({record.topic: record for record in records})
        if not self._newest or time.monotonic() < self._next_look:
            return set()
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        others = {topic for topic in self._newest if self._is_another(topic, self._next[topic])}
        self._known_by |= self._newest
        self._newest = {}
        return others

    def _is_another(self, topic: str, end: int) -> bool:
        """Whether the topic was recreated: it is shorter, or has another record at the known record's offset. If
        compaction deleted the known record, the topic counts as the same.
        """
        known_by = self._known_by.get(topic)
        if known_by is None or end <= known_by.offset:
            return end < self._next[topic]
        found = self._topics.records_at({0: known_by.offset}, topic).get(0)
        return found is not None and found != known_by

    def _begin_again(self, topics: Collection[str]) -> None:
        if topics:
            log.warning("topics_recreated", follower=self.name, topics=sorted(topics), read=dict(self._next))
        for topic in topics:
            self._next[topic] = 0
            self._known_by.pop(topic, None)
            self._newest.pop(topic, None)
            self.drop(topic)

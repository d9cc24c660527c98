"""Whole topics of one partition: read from their start, followed, and read again where one was recreated.

A subclass applies records (`take`) and forgets what a topic said (`drop`). This class connects, seeks, notices the end
of the topics, and notices a topic that is no longer the one that was read.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from services.platform.stream.follower import Follower
from services.platform.stream.ports import Reader
from services.platform.stream.record import SourceRecord
from services.platform.turn_clock import TurnClock

log = structlog.get_logger()

# Whether a topic is another one costs reading one record (3 ms).
_LOOK_EVERY_S = 5.0


class TopicFollower(Follower):
    """Follows topics of one partition each; ready when the ends of all were reached once. While later turns fail, what
    was taken is served.

    `is_behind` is True until the ends are reached, and after each new connection until they are reached again.
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
        # By topic, the next record to be taken. The subclass moves it on.
        self._next = dict.fromkeys(followed, 0)
        # Where the topics ended when they were connected; None: they are not.
        self._ends: dict[str, int] | None = None
        # By topic: a record that was read, by which it is known; the newest one, known from the next look on; and when
        # that is.
        self._known_by, self._newest = dict[str, SourceRecord](), dict[str, SourceRecord]()
        self._next_look = 0.0
        self.is_behind = True

    def take(self, records: Sequence[SourceRecord], ends: Mapping[str, int]) -> None:
        """Apply what a poll brought, in order, and move `_next` on. Raises: anything; it is read again then."""
        raise NotImplementedError

    def drop(self, topic: str) -> None:
        """Forget what this topic said: it is another one, which is read from its start."""
        raise NotImplementedError

    def caught_up(self) -> None:
        """The ends were reached, after a new connection, too."""

    def poll(self) -> Sequence[SourceRecord]:
        """The next records of the topics."""
        return self._topics.poll(round(1000 * self._poll_s))

    def turn(self) -> int:
        """Connect if need be, poll, take. Raises: what the topics and the subclass raise."""
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
        """Connect again, and go on from what was taken."""
        self._topics.close()
        self._ends = None

    def finish(self) -> None:
        """The next start reads everything again."""
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
        """Those topics that are other ones. It is looked at once in a while, before records are taken and after the
        last ones; a topic at rest asks nothing."""
        self._newest.update({record.topic: record for record in records})
        if not self._newest or time.monotonic() < self._next_look:
            return set()
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        others = {topic for topic in self._newest if self._is_another(topic, self._next[topic])}
        self._known_by |= self._newest
        self._newest = {}
        return others

    def _is_another(self, topic: str, end: int) -> bool:
        """Whether the topic, now of this end, is not the one that was read: it is shorter, or another record lies where
        one lay. Where compaction took that one, nobody can tell."""
        known_by = self._known_by.get(topic)
        if known_by is None or end <= known_by.offset:
            return end < self._next[topic]
        found = self._topics.records_at({0: known_by.offset}, topic).get(0)
        return found is not None and found != known_by

    def _begin_again(self, topics: Collection[str]) -> None:
        """These are not the topics that were read: their positions mean other things. What another topic says stays,
        since it is not read again."""
        if topics:
            log.warning("topics_recreated", follower=self.name, topics=sorted(topics), read=dict(self._next))
        for topic in topics:
            self._next[topic] = 0
            self._known_by.pop(topic, None)
            self._newest.pop(topic, None)
            self.drop(topic)

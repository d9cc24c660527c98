"""Reads `search-clicks` from its beginning and goes on: what the text source learnt is nowhere else.

A thread decodes what a poll brought and has it applied as one change. Unreadable records and poison are set aside and
counted.
Where Kafka is away it tries again and answers go on with what is known. It knows not what a click teaches.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from services.common.catalogue_follower import age_seconds
from services.common.errors import InvalidRequest
from services.common.kafka import Brokers, BulkProducer
from services.common.stream.follower import Follower
from services.common.stream.ports import Reader
from services.common.stream.reader import TopicReader
from services.common.stream.record import SourceRecord
from services.common.stream.retraction import Undo
from services.common.stream.topic import Replicas
from services.common.stream.topics.search_clicks import SEARCH_CLICKS, ClickRecord, SearchClick, decode_click
from services.common.turn_clock import TurnClock
from services.generator.metrics import GeneratorMetrics

log = structlog.get_logger()


_MAX_RECORDS = 4_096

_Click = tuple[SourceRecord, ClickRecord]


def clicks_reader(bootstrap: Brokers, replicas: Replicas) -> TopicReader:
    """Reads `search-clicks`; what is unreadable there goes to the dead letters, once for all generators."""
    return TopicReader(
        bootstrap,
        SEARCH_CLICKS,
        group_id="generator-clicks",
        client_id="generator-clicks",
        partitions=[0],
        makes_topics=replicas,
        max_poll_records=_MAX_RECORDS,
        dead_letters=BulkProducer(bootstrap, client_id="generator-clicks"),
    )


class Taught(Protocol):
    """What clicks teach."""

    def apply(self, records: Sequence[ClickRecord], *, next_offset: int) -> None:
        """Serve what these records say; the last of them lies before `next_offset`."""

    def reset(self) -> None:
        """Forget everything: the topic was made anew."""

    def digest(self) -> str:
        """Equal where equal clicks count."""


class ClicksFollower(Follower):
    """Follows the topic; ready when its end was reached. While turns fail, what is known is served."""

    def __init__(
        self,
        topic: Reader,
        taught: Taught,
        metrics: GeneratorMetrics,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        poll_s: float = 1.0,
        backoff_s: float = 0.5,
        turns: TurnClock | None = None,
    ) -> None:
        super().__init__(
            "clicks-follower", on_ready=on_ready, backoff_s=backoff_s, max_backoff_s=backoff_s, turns=turns
        )
        self._topic, self._taught, self._metrics = topic, taught, metrics
        self._on_change, self._poll_s = on_change, poll_s
        self._end: int | None = None  # None: not connected
        self._next = 0
        self.is_behind = True

    def finish(self) -> None:
        """The next start reads everything again."""
        self._topic.close()

    def turn(self) -> int:
        """Connect if need be, poll, apply. Raises: what the topic and what is taught raise."""
        if self._end is None:
            self._end = self._topic.end_offsets()[0]
            if self._end < self._next:
                self._begin_again()
            self._topic.seek({0: self._next})
        records = self._topic.poll(round(1000 * self._poll_s))
        if records and records[0].offset < self._next:
            self._begin_again()
        readable: list[_Click] = []
        for record in records:
            try:
                readable.append((record, decode_click(record.value)))
            except InvalidRequest as exc:
                self._metrics.counted("unreadable_click")
                log.warning("click_unreadable", offset=record.offset, reason=str(exc))
                self._topic.dead_letter(record, str(exc))
        if records:
            if self.tries_alone:
                self.one_by_one(
                    readable,
                    key=lambda one: one[0].offset,
                    apply=lambda one: self._apply([one], one[0].offset + 1),
                    set_aside=self._set_aside,
                    # In any order and more than once, as clicks may come: neighbours teach what they teach already.
                    rehearse=lambda one: self._taught.apply([one[1]], next_offset=self._next),
                )
                readable = []
            self._apply(readable, records[-1].offset + 1)
        if self.is_behind and self._topic.positions()[0] >= self._end:
            self.is_behind = False
            log.info("clicks_caught_up", next_offset=self._next, digest=self._taught.digest())
            self.ready()
        return len(records)

    def lost(self, exc: Exception) -> None:
        """Connect again, and go on from what was applied."""
        self._topic.close()
        self._end = None

    def _apply(self, clicks: Sequence[_Click], next_offset: int) -> None:
        self._taught.apply([click for _, click in clicks], next_offset=next_offset)
        self._next = next_offset
        self.poison.applied(clicks)
        self._count([click for _, click in clicks])
        self._on_change()

    def _set_aside(self, click: _Click, reason: str) -> None:
        self._metrics.counted("poison_click")
        self._topic.dead_letter(click[0], reason)
        self._next = click[0].offset + 1

    def _begin_again(self) -> None:
        """The topic is shorter than what was read of it: it is another one, and places mean other things."""
        log.warning("clicks_topic_new", read=self._next)
        self._next = 0
        self._taught.reset()

    def _count(self, records: Sequence[ClickRecord]) -> None:
        for record in records:
            if isinstance(record, SearchClick):
                self._metrics.counted("click")
                age = age_seconds(record.recorded_ms)
                if age is not None and not self.is_behind:
                    self._metrics.click_lag.observe(age)
            else:
                self._metrics.counted("undone" if isinstance(record, Undo) else "forgotten")

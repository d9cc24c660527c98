"""Reads `search-clicks` from its beginning and goes on: what the text source learnt is nowhere else.

A thread decodes what a poll brought and has it applied as one change. Unreadable records are set aside and counted.
Where Kafka is away it tries again and answers go on with what is known. It knows not what a click teaches.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from services.common.catalogue_follower import age_seconds
from services.common.errors import FreshetError, InvalidRequest
from services.common.kafka import BulkProducer
from services.common.search_clicks import ClickRecord, SearchClick, decode_click
from services.common.stream.ports import Reader
from services.common.stream.reader import TopicReader
from services.common.stream.retraction import Undo
from services.common.topics import SEARCH_CLICKS
from services.common.turn_clock import TurnClock
from services.generator.metrics import GeneratorMetrics

log = structlog.get_logger()


_MAX_RECORDS = 4_096


def clicks_reader(bootstrap: str) -> TopicReader:
    """Reads `search-clicks`; what is unreadable there goes to the dead letters, once for all generators."""
    return TopicReader(
        bootstrap,
        SEARCH_CLICKS,
        group_id="generator-clicks",
        client_id="generator-clicks",
        partitions=[0],
        makes_topics=True,
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


class ClicksFollower:
    """Follows the topic from `start` to `stop`; `on_ready` is called once, when its end was reached. `turns` says
    when turns ended."""

    def __init__(
        self,
        topic: Reader,
        taught: Taught,
        metrics: GeneratorMetrics,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        poll_s: float = 0.5,
        backoff_s: float = 0.5,
        turns: TurnClock | None = None,
    ) -> None:
        self._topic, self._taught, self._metrics = topic, taught, metrics
        self._on_ready, self._on_change = on_ready, on_change
        self._poll_s, self._backoff_s = poll_s, backoff_s
        self._end: int | None = None  # None: not connected
        self._next = 0
        self._complaint = ""
        self.is_behind = True
        self.turns = turns or TurnClock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clicks-follower", daemon=True)

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the turn at hand and end; the next start reads everything again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def step(self) -> None:
        """One turn: connect if need be, poll, apply. Raises: what the topic and what is taught raise."""
        if self._end is None:
            self._end = self._topic.end_offsets()[0]
            if self._end < self._next:
                self._begin_again()
            self._topic.seek({0: self._next})
        records = self._topic.poll(round(1000 * self._poll_s))
        if records and records[0].offset < self._next:
            self._begin_again()
        readable: list[ClickRecord] = []
        for record in records:
            try:
                readable.append(decode_click(record.value))
            except InvalidRequest as exc:
                self._metrics.counted("unreadable_click")
                log.warning("click_unreadable", offset=record.offset, reason=str(exc))
                self._topic.dead_letter(record, str(exc))
        if records:
            self._taught.apply(readable, next_offset=records[-1].offset + 1)
            self._next = records[-1].offset + 1
            self._count(readable)
            self._on_change()
        if self.is_behind and self._topic.positions()[0] >= self._end:
            self.is_behind = False
            log.info("clicks_caught_up", next_offset=self._next, digest=self._taught.digest())
            self._on_ready()
        if self._complaint:
            log.info("clicks_recovered", after=self._complaint)
            self._complaint = ""
        self.turns.ended(well=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception as exc:
                self._fail(exc)
        self._topic.close()

    def _fail(self, exc: Exception) -> None:
        self._topic.close()
        self._end = None
        complaint = type(exc).__name__
        if complaint != self._complaint:
            self._complaint = complaint
            is_ours = isinstance(exc, FreshetError)
            log.log(30 if is_ours else 40, "clicks_not_followed", reason=str(exc), exc_info=None if is_ours else exc)
        self.turns.ended(well=False)
        self._stop.wait(self._backoff_s)

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

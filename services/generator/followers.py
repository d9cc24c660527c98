"""Follow `items` and `search-clicks`, each in a thread.

`search-clicks` is read from its beginning, because the text source's learnt state is stored nowhere else. The records
of one poll are applied as one change. Unreadable and poison records are dead-lettered.
"""

from collections.abc import Callable, Mapping, Sequence

import structlog

from services.catalogue.follower import Listener, age_seconds
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import Undo
from services.contracts.topics.items import CatalogueItem
from services.contracts.topics.search_clicks import SEARCH_CLICKS, ClickRecord, SearchClick, decode_click
from services.generator.domain.sources import Sources
from services.generator.domain.text_mol import TextMol
from services.generator.metrics import GeneratorMetrics
from services.platform.errors import InvalidRequest
from services.platform.stream.follower import TurnClock
from services.platform.stream.kafka import Brokers, BulkProducer
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord
from services.platform.stream.topic import Replicas
from services.platform.stream.topic_follower import TopicFollower


class ItemChanges(Listener):
    """Passes the item descriptions that the catalogue's follower reads to the sources."""

    def __init__(
        self, sources: Sources, metrics: GeneratorMetrics, *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._sources, self._metrics, self._on_change = sources, metrics, on_change

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        self._sources.describe(items)
        self._metrics.counted("described", len(items))
        self._on_change()

    def counted(self, kind: str, records: int) -> None:
        self._metrics.counted(kind, records)


log = structlog.get_logger()


_MAX_RECORDS = 4_096

_Click = tuple[SourceRecord, ClickRecord]


def clicks_reader(bootstrap: Brokers, replicas: Replicas) -> TopicReader:
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


class ClicksFollower(TopicFollower):
    """Follows `search-clicks`."""

    def __init__(
        self,
        topic: Reader,
        taught: TextMol,
        metrics: GeneratorMetrics,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        poll_s: float = 1.0,
        backoff_s: float = 0.5,
        turns: TurnClock | None = None,
    ) -> None:
        super().__init__(
            "clicks-follower",
            topic,
            (SEARCH_CLICKS,),
            poll_s=poll_s,
            on_ready=on_ready,
            backoff_s=backoff_s,
            turns=turns,
        )
        self._taught, self._metrics, self._on_change = taught, metrics, on_change

    def take(self, records: Sequence[SourceRecord], ends: Mapping[str, int]) -> None:
        readable: list[_Click] = []
        for record in records:
            try:
                readable.append((record, decode_click(record.value)))
            except InvalidRequest as exc:
                self._metrics.counted("unreadable_click")
                log.warning("click_unreadable", offset=record.offset, reason=str(exc))
                self._topics.dead_letter(record, str(exc))
        if not records:
            return
        if self.tries_alone:
            self.one_by_one(
                readable,
                key=lambda one: one[0].offset,
                apply=lambda one: self._apply([one], one[0].offset + 1),
                set_aside=self._set_aside,
                # Clicks may be applied twice and in any order, so a rehearsal does no harm.
                rehearse=lambda one: self._taught.apply([one[1]], next_offset=self._next[SEARCH_CLICKS]),
            )
            readable = []
        self._apply(readable, records[-1].offset + 1)

    def drop(self, topic: str) -> None:
        self._taught.reset()

    def caught_up(self) -> None:
        log.info("clicks_caught_up", next_offset=self._next[SEARCH_CLICKS], digest=self._taught.digest())

    def _apply(self, clicks: Sequence[_Click], next_offset: int) -> None:
        self._taught.apply([click for _, click in clicks], next_offset=next_offset)
        self._next[SEARCH_CLICKS] = next_offset
        self.poison.applied(clicks)
        self._count([click for _, click in clicks])
        self._on_change()

    def _set_aside(self, click: _Click, reason: str) -> None:
        self._metrics.counted("poison_click")
        self._topics.dead_letter(click[0], reason)
        self._next[SEARCH_CLICKS] = click[0].offset + 1

    def _count(self, records: Sequence[ClickRecord]) -> None:
        for record in records:
            if isinstance(record, SearchClick):
                self._metrics.counted("click")
                age = age_seconds(record.recorded_ms)
                if age is not None and not self.is_behind:
                    self._metrics.click_lag.observe(age)
            else:
                self._metrics.counted("undone" if isinstance(record, Undo) else "forgotten")

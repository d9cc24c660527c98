"""The generator's metrics."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from freshet.v1 import generator_pb2
from prometheus_client import REGISTRY, CollectorRegistry

from services.catalogue.changes import MergeReports
from services.platform.metrics import BATCH_BUCKETS, Figures
from services.platform.stream.follower import TurnClock

ANSWER_BUCKETS = (0.0, 1.0, 10.0, 100.0, 1000.0)


class GeneratorMetrics:
    """Metrics with few labels."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        figures = Figures(registry)
        counter, gauge, histogram = figures.counter, figures.gauge, figures.histogram
        text = "Seconds per source and stage: waiting for a batch (queue), a whole batch (find), encoding its queries "
        self._stages = histogram("freshet_generator_stage_seconds", text + "(encode).", "source", "stage")
        text = "Queries per batch."
        self._batches = histogram("freshet_generator_batch_queries", text, "source", buckets=BATCH_BUCKETS)
        text = "Items per answer; 0: nothing was found."
        self._answers = histogram("freshet_generator_answer_items", text, "source", buckets=ANSWER_BUCKETS)
        self._loaded = gauge("freshet_generator_source_loaded", "1 for a source that is loaded.", "source")
        text = "Documents or identifiers of a source."
        self._documents = gauge("freshet_generator_source_documents", text, "source")
        self._bytes = gauge("freshet_generator_source_bytes", "Bytes of a source.", "source")
        self._clicks = gauge("freshet_generator_clicks", "Search clicks that count.")
        self._offsets = gauge("freshet_generator_next_offset", "The next record to be applied, by topic.", "topic")
        text = "Seconds since the last good turn of a topic's follower; grows while it stalls."
        self._turn_age = gauge("freshet_generator_turn_age_seconds", text, "topic")
        text = "Turns in a row of a topic's follower that failed; not 0 while it waits for a dependency."
        self._turn_failures = gauge("freshet_generator_turn_failures", text, "topic")
        self._merge_failed = gauge(
            "freshet_generator_merge_failed",
            "1 while the last background merge of the text source failed: its index serves, slower with each change, "
            "until one succeeds.",
        )
        self._records = counter(
            "freshet_generator_records",
            "Records by outcome: click, undone, forgotten, unreadable_click, poison_click, described, "
            "unreadable_item, poison_item, title_left_out.",
            "kind",
        )
        text = "Seconds from the broker's time of a search click to its effect on answers."
        self.click_lag = histogram("freshet_generator_click_lag_seconds", text)

    @contextmanager
    def batch(self, source: str, queries: int) -> Iterator[None]:
        self._batches.labels(source).observe(queries)
        with self.stage(source, "find"):
            yield

    @contextmanager
    def stage(self, source: str, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stages.labels(source, stage).observe(time.perf_counter() - started)

    def answered(self, source: str, *, queue_s: float, num_items: int) -> None:
        self._stages.labels(source, "queue").observe(queue_s)
        self._answers.labels(source).observe(num_items)

    def watch_turns(self, topic: str, turns: TurnClock) -> None:
        self._turn_age.labels(topic).set_function(lambda: turns.age_s)
        self._turn_failures.labels(topic).set_function(lambda: turns.failures)

    def watch_merges(self, merges: MergeReports) -> None:
        self._merge_failed.set_function(lambda: merges.is_failing)

    def counted(self, kind: str, records: int = 1) -> None:
        if records:
            self._records.labels(kind).inc(records)

    def described(self, info: generator_pb2.GetGeneratorInfoResponse) -> None:
        for one in info.sources:
            self._loaded.labels(one.source).set(one.is_loaded)
            self._documents.labels(one.source).set(one.num_documents)
            self._bytes.labels(one.source).set(one.num_bytes)
        self._clicks.set(info.num_remembered_clicks)
        self._offsets.labels("items").set(info.items_offset)
        for at in info.clicks:
            self._offsets.labels("search-clicks").set(at.offset)

"""The gateway's metrics for Prometheus, and each part's calls by the minute for GetHealth.

Minutes count from the start of the process. A ring has 24 hours, in 25 bytes per part and minute. Durations are counted
in eight buckets per octave (percentiles within 5%). Only one event loop may use them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import log2
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from prometheus_client import REGISTRY, CollectorRegistry

from services.gateway.domain import PERSONAL, SOURCES, Degradation, Recommendation, SearchAnswer
from services.gateway.stages import COMPONENTS
from services.platform.metrics import Figures
from services.platform.stream.follower import TurnClock

MINUTES = 24 * 60
MINUTE_S = 60.0
UNKNOWN_LAG = -1.0
PARTS = ("gateway", "kafka", "redis", "encoder", "refresher", "candidates", "reranker", "generator")
_ROW = np.dtype(
    [
        *((name, "u4") for name in ("calls", "failed", "degraded")),
        *((name, "f4") for name in ("p50_ms", "p99_ms", "lag")),
        ("was_ready", "?"),
    ]
)
_PER_OCTAVE = 8
# The last bucket: 123 s and more.
_BUCKETS = 27 * _PER_OCTAVE


class PartCalls:
    """A part's calls in the current minute."""

    __slots__ = ("_buckets", "calls", "degraded", "failed")

    def __init__(self) -> None:
        self.clear()

    def add(self, seconds: float, failed: bool = False) -> None:
        self.calls += 1
        self.failed += failed
        self._buckets[min(_BUCKETS - 1, int(log2(1.0 + 1e6 * max(0.0, seconds)) * _PER_OCTAVE))] += 1

    def quantile_ms(self, share: float) -> float:
        """Return the time within which this share of calls ended; 0 without calls."""
        if not self.calls:
            return 0.0
        cumulated = np.cumsum(self._buckets)
        bucket = int(np.searchsorted(cumulated, share * self.calls))
        return float((2 ** ((bucket + 0.5) / _PER_OCTAVE) - 1.0) / 1000.0)

    def clear(self) -> None:
        self.calls = self.failed = self.degraded = 0
        self._buckets = [0] * _BUCKETS


class Minutes:
    """The ring of past minutes, and the current minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self.since_ms = round(1000 * time.time())
        self._rows = np.zeros((MINUTES, len(PARTS)), _ROW)
        self._calls = {name: PartCalls() for name in PARTS}
        self._over = 0
        self._ready = np.ones(len(PARTS), bool)
        self._lag = np.full(len(PARTS), UNKNOWN_LAG)

    def of(self, part: str) -> PartCalls:
        return self._calls[part]

    @property
    def left_s(self) -> float:
        return max(0.0, MINUTE_S * (self._over + 1) - (self._clock() - self._began))

    def seen(self, problems: Mapping[str, str], lags: Mapping[str, float] = MappingProxyType({})) -> None:
        """Record a health check. problems: each part's problem, "" if it is ready. lags: each part's lag."""
        self.roll()
        for place, name in enumerate(PARTS):
            self._ready[place] &= not problems.get(name)
            self._lag[place] = max(self._lag[place], lags.get(name, UNKNOWN_LAG))

    def roll(self) -> None:
        """Store the minutes that are over."""
        over = int((self._clock() - self._began) // MINUTE_S)
        # After more than a day, only the last day's rows are written.
        self._over = max(self._over, over - MINUTES)
        while self._over < over:
            self._rows[self._over % MINUTES] = self._present()
            self._over += 1
            for calls in self._calls.values():
                calls.clear()
            self._ready[:], self._lag[:] = True, UNKNOWN_LAG

    def last(self, count: int) -> tuple[int, float, Sequence[NDArray[np.void]]]:
        """Return the newest `count` minutes, including the current one: when the first began (Unix milliseconds), the
        elapsed seconds of the current one, and for each of `PARTS` a row per minute.
        """
        self.roll()
        begin = max(0, self._over + 1 - min(count, MINUTES))
        rows = self._rows[np.arange(begin, self._over) % MINUTES]
        rows = np.concatenate((rows, self._present()[None]))[:count]
        return self.since_ms + round(60_000 * begin), MINUTE_S - self.left_s, list(rows.T)

    def _present(self) -> NDArray[np.void]:
        row = np.zeros(len(PARTS), _ROW)
        for place, (calls, lag, ready) in enumerate(zip(self._calls.values(), self._lag, self._ready, strict=True)):
            times = calls.quantile_ms(0.5), calls.quantile_ms(0.99)
            row[place] = (calls.calls, calls.failed, calls.degraded, *times, lag, ready)
        return row


GAP_BUCKETS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ITEM_BUCKETS = (1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
_FAILURES = frozenset({"DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN"})
_STAGES = ("queue", "encode", "first_stage", "rerank", "transport", "total")


class GatewayMetrics:
    """Counters and histograms; label values are few and known."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.minutes = Minutes()
        self._gateway, self._kafka = self.minutes.of("gateway"), self.minutes.of("kafka")
        self._figures = figures = Figures(registry)
        counter, histogram = figures.counter, figures.histogram
        stages = histogram("freshet_gateway_stage_seconds", "Seconds of a Recommend per stage.", "stage")
        self._stages = tuple((f"{stage}_ms", stages.labels(stage)) for stage in _STAGES)
        degradations = counter("freshet_gateway_degradations", "Answers marked as degraded, by mark.", "kind")
        self._degradations = {kind: degradations.labels(kind.name.lower()) for kind in Degradation}
        failures = counter(
            "freshet_gateway_component_failures",
            "Calls of a component that an answer had to do without: failed, late, or not made soon after a failure.",
            "component",
        )
        self._component_failures = {name: failures.labels(name) for name in COMPONENTS}
        self._shard_calls = counter(
            "freshet_gateway_shard_calls",
            "Calls of a shard of the catalogue: made once more because it was late, or missing from an answer.",
            "shard",
            "outcome",
        )
        sources = counter(
            "freshet_gateway_recommendations", "Answers by where the query state came from.", "state_source"
        )
        self._sources = {source: sources.labels(source) for source in ("stored", "stored_history", "request", "none")}
        self._tokens = counter("freshet_gateway_tokens", "Freshness tokens, honoured or not.", "honoured")
        interactions = counter("freshet_gateway_interactions", "Interactions by outcome.", "outcome")
        self._acknowledged, self._failed = interactions.labels("acknowledged"), interactions.labels("failed")
        text = "Gaps that requests asked for, and those that their answers proved, in similarity units."
        gaps = histogram("freshet_gateway_gap", text, "which", buckets=GAP_BUCKETS)
        self._asked_gap, self._proven_gap = gaps.labels("asked"), gaps.labels("proven")
        text = "Items that the passes of all searches looked at for an answer with a gap."
        self._gap_items = histogram("freshet_gateway_gap_items", text, buckets=ITEM_BUCKETS)
        self._append_seconds = histogram(
            "freshet_gateway_append_seconds",
            "Seconds from an interaction's arrival to its acknowledgement by the stream.",
        )
        exposures = counter("freshet_gateway_exposures", "Answers by whether `exposures` has them.", "outcome")
        self._exposures_written, self._exposures_lost = exposures.labels("written"), exposures.labels("lost")
        self._search_seconds = histogram("freshet_gateway_search_seconds", "Seconds of a Search.")
        asked = counter(
            "freshet_gateway_search_sources", "What was asked during searches, by outcome.", "source", "outcome"
        )
        self._search_sources = {
            (source, failed): asked.labels(source, "failed" if failed else "answered")
            for source in (*SOURCES, PERSONAL)
            for failed in (False, True)
        }

    def answered(self, answer: Recommendation, *, had_token: bool) -> None:
        times = answer.stage_times
        for name, child in self._stages:
            child.observe(getattr(times, name) / 1000.0)
        for kind in answer.degradations:
            self._degradations[kind].inc()
        self._gateway.degraded += bool(answer.degradations)
        self._sources[answer.state_source].inc()
        if had_token:
            self._tokens.labels("yes" if answer.token_honoured else "no").inc()
        if answer.max_gap is not None:
            self._asked_gap.observe(answer.max_gap)
            self._gap_items.observe(answer.items_touched)
            if answer.certificate.gap is not None:
                self._proven_gap.observe(answer.certificate.gap)

    def searched(self, answer: SearchAnswer) -> None:
        self._search_seconds.observe(answer.total_ms / 1000.0)
        for spent in answer.sources:
            self._search_sources[spent.source, bool(spent.failure)].inc()
        for kind in answer.degradations:
            self._degradations[kind].inc()
        self._gateway.degraded += bool(answer.degradations)

    def called(self, method: str, code: str, seconds: float) -> None:
        if method in ("Recommend", "Search", "Similar"):
            self._gateway.add(seconds, failed=code in _FAILURES)

    def count_shard(self, what: str, shard: int) -> None:
        """Record a "hedged" or "missing" call of a shard."""
        self._shard_calls.labels(str(shard), what).inc()

    def component_failed(self, component: str) -> None:
        """Record a failure of a component, one of `stages.COMPONENTS`."""
        self._component_failures[component].inc()

    def watch_turns(self, turns: TurnClock) -> None:
        self._figures.turn_age("freshet_gateway_turn_age_seconds", turns)

    def acknowledged(self, seconds: float) -> None:
        """Record a durable interaction."""
        self._acknowledged.inc()
        self._append_seconds.observe(seconds)
        self._kafka.add(seconds)

    def count_exposures(self, written: int, lost: int) -> None:
        self._exposures_written.inc(written)
        self._exposures_lost.inc(lost)

    def append_failed(self) -> None:
        """Record an interaction that was not acknowledged."""
        self._failed.inc()
        self._kafka.calls += 1
        self._kafka.failed += 1

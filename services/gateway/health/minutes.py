"""Each part's calls per minute, for the last 24 hours. A ring in memory has 25 bytes per part and minute; durations are
counted in eight buckets per octave (percentiles within 5%).

Minutes count from the start of the process. For one event loop.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import log2
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

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
        self.calls = self.failed = self.degraded = 0
        self._buckets = [0] * _BUCKETS

    def add(self, seconds: float, *, failed: bool = False) -> None:
        """Count a call."""
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
        """Begin the next minute."""
        self.calls = self.failed = self.degraded = 0
        self._buckets = [0] * _BUCKETS


class Minutes:
    """The ring, and the current minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self.since_ms = round(1000 * time.time())
        self._rows = np.zeros((MINUTES, len(PARTS)), _ROW)
        self._calls = {name: PartCalls() for name in PARTS}
        self._over = 0
        self._ready = np.ones(len(PARTS), bool)
        self._lag = np.full(len(PARTS), UNKNOWN_LAG)

    def of(self, part: str) -> PartCalls:
        """Return the counter of a part's calls."""
        return self._calls[part]

    @property
    def left_s(self) -> float:
        """Return the seconds left of the current minute."""
        return max(0.0, MINUTE_S * (self._over + 1) - (self._clock() - self._began))

    def seen(self, problems: Mapping[str, str], lags: Mapping[str, float] = MappingProxyType({})) -> None:
        """Record a check. problems: "" if ready. lags: by part."""
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
        """Return the newest minutes, the current one last.

        The result: the first one's begin (Unix milliseconds), the last one's seconds, and each of `PARTS`' rows,
        (count,) or fewer after a start.
        """
        self.roll()
        begin = max(0, self._over + 1 - min(count, MINUTES))
        rows = self._rows[np.arange(begin, self._over) % MINUTES]
        rows = np.concatenate((rows, self._present()[None]))[:count]
        return self.since_ms + round(60_000 * begin), MINUTE_S - self.left_s, list(rows.T)

    def _present(self) -> NDArray[np.void]:
        row = np.zeros(len(PARTS), _ROW)
        for place, calls in enumerate(self._calls.values()):
            row[place] = (
                calls.calls,
                calls.failed,
                calls.degraded,
                calls.quantile_ms(0.5),
                calls.quantile_ms(0.99),
                self._lag[place],
                self._ready[place],
            )
        return row

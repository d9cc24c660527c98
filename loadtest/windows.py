"""Two conditions in alternating windows of time, and the ratio of a percentile between them.

A shared machine drifts, but neighbouring windows have about the same other load. Each pair of windows gives a ratio;
the result is their median, with an interval. The order inside a pair is random.

Letters: N pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .results import OK, Call

_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Seconds [start, end) of a run under one condition; measuring begins at `settled`."""

    pair: int
    treated: bool
    start_s: float
    settled_s: float
    end_s: float


def interleaved(
    *, begin_s: float, num_windows: int, seconds: float, settle_s: float, rng: np.random.Generator
) -> list[Window]:
    """Return `num_windows` windows from `begin_s` on, in pairs of one treated and one not.

    Raises: ValueError for an odd number, or if nothing is left to measure.
    """
    if num_windows % 2:
        raise ValueError(f"num_windows={num_windows}; allowed: an even number, one with and one without each")
    if not 0 <= settle_s < seconds:
        raise ValueError(f"settle_s={settle_s:g}; allowed: 0 to less than a window's {seconds:g} s")
    first = [bool(rng.integers(2)) for _ in range(num_windows // 2)]
    starts = [begin_s + number * seconds for number in range(num_windows)]
    return [
        Window(
            pair=number // 2,
            treated=first[number // 2] ^ bool(number % 2),
            start_s=start_s,
            settled_s=start_s + settle_s,
            end_s=start_s + seconds,
        )
        for number, start_s in enumerate(starts)
    ]


def percentile_per_window(calls: Sequence[Call], windows: Sequence[Window], percent: float) -> list[float]:
    """Return the latency percentile, in milliseconds, of the successful calls due in each window; NaN without any."""
    due = np.array([call.due_s for call in calls if call.status == OK])
    latency = np.array([call.latency_ms for call in calls if call.status == OK])
    found = []
    for window in windows:
        inside = latency[(due >= window.settled_s) & (due < window.end_s)] if len(due) else latency
        found.append(float(np.percentile(inside, percent)) if len(inside) else float("nan"))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Treated over untreated per pair (N,), their median, and its 95 % interval (percentile bootstrap over pairs)."""

    per_pair: list[float]
    median: float
    low: float
    high: float


def ratio(values: Sequence[float], windows: Sequence[Window], *, seed: int = 0) -> Ratio | None:
    """Return the ratio of the windows' values; None if no pair is complete."""
    by_pair: dict[int, dict[bool, float]] = {}
    for value, window in zip(values, windows, strict=True):
        if np.isfinite(value) and value > 0:
            by_pair.setdefault(window.pair, {})[window.treated] = value
    ratios = np.array([both[True] / both[False] for both in by_pair.values() if len(both) == 2])
    if not len(ratios):
        return None
    drawn = np.random.default_rng(seed).choice(ratios, size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5]).tolist()
    return Ratio(per_pair=ratios.round(4).tolist(), median=float(np.median(ratios)), low=low, high=high)

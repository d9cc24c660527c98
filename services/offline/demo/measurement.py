"""Arithmetic of the demo's figures: hit rates, rolling hit rates, percentiles. Numbers in, numbers out.

A hit: the item of the event that then happened is among the ten answered. A percentile is the nearest-rank one (a
value that really occurred), and is None where nothing was measured.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HITS_AT = 10


def hits(answers: Sequence[Sequence[str]], items: Sequence[str], *, at: int = HITS_AT) -> npt.NDArray[np.bool_]:
    """Whether each event's item is in the first `at` of its answer. Raises ValueError when lengths differ."""
    if len(answers) != len(items):
        raise ValueError(f"{len(answers)} answers for {len(items)} events; expected one each")
    return np.array([item in answer[:at] for answer, item in zip(answers, items, strict=True)], dtype=np.bool_)


def hit_rate(hit: npt.NDArray[np.bool_]) -> float | None:
    """Share of hits; None without predictions."""
    return round(float(hit.mean()), 5) if len(hit) else None


def rolling_rate(hit: npt.NDArray[np.bool_], *, window: int) -> npt.NDArray[np.float64]:
    """Share of hits among the last `window` predictions (fewer at the start), for each prediction."""
    total = np.concatenate([[0], np.cumsum(hit)])
    end = np.arange(1, len(hit) + 1)
    start = np.maximum(0, end - window)
    return np.asarray((total[end] - total[start]) / (end - start), dtype=np.float64)


def percentile(values: npt.NDArray[np.floating], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; NaN (not measured) is left out."""
    known = values[~np.isnan(values)]
    return round(float(np.quantile(known, share, method="inverted_cdf")), 3) if len(known) else None


def percentiles(values: npt.NDArray[np.floating], shares: Sequence[int] = (50, 95, 99)) -> dict[str, float | None]:
    """`{"p50": ..., "p95": ..., "p99": ...}` of `values`, in their unit."""
    return {f"p{share}": percentile(values, share / 100) for share in shares}

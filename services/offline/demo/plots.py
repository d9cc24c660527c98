"""The demo's two plots: hit rate over the stream, and latency of Recommend."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from services.offline.demo.plan import percentile, rolling_rate
from services.offline.evaluation.common.plots import panels, titled

_COLOURS = {
    "model": "#0b6e4f",
    "model_with_token": "#7fb069",
    "frozen_state": "#d17a22",
    "item_knn": "#1f77b4",
    "recent_popularity": "#444444",
    "popularity": "#8a8a8a",
}
LABELS = {
    "model": "model, states updated by the stream",
    "frozen_state": "same model, states frozen at the split",
    "item_knn": "item-kNN, learning from every event",
    "recent_popularity": "recent popularity",
    "popularity": "popularity",
}


def plot_hit_rate(
    path: Path, hit: Mapping[str, npt.NDArray[np.bool_]], positions: npt.NDArray[np.int64], *, title: str
) -> None:
    """Plot the rolling hit rate at 10 of M predicted events: `hit[name]` (M,), `positions` in the stream (M,)."""
    window = max(1, min(500, len(positions) // 4))
    with panels(path, 1, 1, size=(9, 4.5)) as drawn:
        axes = titled(drawn[0][0], title, xlabel="events sent", ylabel=f"hit rate at 10, last {window} predictions")
        for name, label in LABELS.items():
            if name not in hit or not len(hit[name]):
                continue
            rate = rolling_rate(hit[name], window=window)
            shown = slice(min(window, len(rate)) - 1, None)
            overall = float(hit[name].mean())
            axes.plot(positions[shown], rate[shown], color=_COLOURS[name], label=f"{label} ({overall:.3f} overall)")
        axes.set_ylim(0, None)


def plot_latency(path: Path, latency_ms: npt.NDArray[np.float64], freshness_ms: npt.NDArray[np.float64]) -> None:
    """Plot histograms of Recommend's latency and of freshness, on logarithmic time axes."""
    with panels(path, 1, 2, size=(4.5, 4.5)) as drawn:
        for axes, values, title, what in (
            (drawn[0][0], latency_ms, "Recommend, from its scheduled moment", "calls"),
            (drawn[0][1], freshness_ms, "Freshness: acknowledged to reflected", "followed events"),
        ):
            titled(axes, title, xlabel="milliseconds", ylabel=what)
            if not len(values):
                continue
            low, high = max(0.1, float(values.min()) * 0.8), max(1.0, float(values.max()) * 1.2)
            bins = np.geomspace(low, high, int(np.clip(len(values) // 5, 12, 60)))
            axes.hist(values, bins=bins, color=_COLOURS["model"], alpha=0.75)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            for share, style in ((0.5, "-"), (0.95, "--"), (0.99, ":")):
                at = percentile(values, share)
                if at is not None:
                    label = f"p{share * 100:.0f} {at:.0f} ms"
                    axes.axvline(at, color="black", linestyle=style, linewidth=1, label=label)

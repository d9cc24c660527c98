"""The demo's two plots: hit rate over the stream, and latency of Recommend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.demo.plan import percentile, rolling_rate

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


def _figure() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    """Save the plot. The file's description repeats the legends, so that a reader can check their numbers."""
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
    labels = [text.get_text() for legend in legends for text in legend.get_texts()]
    figure.savefig(path, dpi=120, metadata={"Description": "; ".join(labels)})


def plot_hit_rate(
    path: Path, hit: Mapping[str, npt.NDArray[np.bool_]], positions: npt.NDArray[np.int64], *, title: str
) -> None:
    """Plot the rolling hit rate at 10 of M predicted events: `hit[name]` (M,), `positions` in the stream (M,)."""
    figure = _figure()
    axes = figure.subplots()
    window = max(1, min(500, len(positions) // 4))
    for name, label in LABELS.items():
        if name not in hit or not len(hit[name]):
            continue
        rate = rolling_rate(hit[name], window=window)
        shown = slice(min(window, len(rate)) - 1, None)
        overall = float(hit[name].mean())
        axes.plot(positions[shown], rate[shown], color=_COLOURS[name], label=f"{label} ({overall:.3f} overall)")
    axes.set(xlabel="events sent", ylabel=f"hit rate at 10, last {window} predictions", title=title, ylim=(0, None))
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False)
    _save(figure, path)


def plot_latency(path: Path, latency_ms: npt.NDArray[np.float64], freshness_ms: npt.NDArray[np.float64]) -> None:
    """Plot histograms of Recommend's latency and of freshness, on logarithmic time axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = _figure()
    for axes, values, title in zip(
        figure.subplots(1, 2),
        (latency_ms, freshness_ms),
        ("Recommend, from its scheduled moment", "Freshness: acknowledged to reflected"),
        strict=True,
    ):
        axes.set(title=title, xlabel="milliseconds", ylabel="calls" if values is latency_ms else "followed events")
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
                axes.axvline(at, color="black", linestyle=style, linewidth=1, label=f"p{share * 100:.0f} {at:.0f} ms")
        axes.legend(frameon=False)
    _save(figure, path)

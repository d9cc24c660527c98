"""A run as one self-contained HTML page (`report.html.jinja`) with embedded plots, and as summary.json for machines."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .results import OK, RunResults

_COLOURS = ("#1f6f8b", "#e07a3f", "#6a994e", "#9c6ade", "#c0392b", "#555555", "#b08900")


def write_report(folder: Path, results: RunResults, summary: dict[str, Any]) -> Path:
    """Write report.html and summary.json into `folder` (made if missing); returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    page = folder / "report.html"
    page.write_text(_page(results, summary), encoding="utf-8")
    return page


def _page(results: RunResults, summary: dict[str, Any]) -> str:
    plots = {
        "Latency distribution": _plot_distribution(results),
        "Latency over the run": _plot_over_time(results),
        "Rates over the run": _plot_rates(results),
    }
    if summary["stages_ms"]:
        plots["Where a recommendation spends its time"] = _plot_stages(summary)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.jinja").render(**summary, plots=plots)


def _plot_distribution(results: RunResults) -> str:
    figure, axes = _figure()
    for colour, name in zip(_COLOURS, results.calls, strict=False):
        latency = np.sort([call.latency_ms for call in results.measured(name) if call.status == OK])
        if len(latency):
            # Share of calls slower than x: it shows the tail, which a histogram hides.
            slower = 1.0 - np.arange(len(latency)) / len(latency)
            axes.step(np.maximum(latency, 0.01), slower, where="post", color=colour, label=name)
    for share, label in ((0.5, "p50"), (0.05, "p95"), (0.01, "p99")):
        axes.axhline(share, color="#bbbbbb", linewidth=0.8)
        axes.annotate(label, (1.0, share), xycoords=("axes fraction", "data"), fontsize=8, color="#777777")
    axes.set(xscale="log", yscale="log", xlabel="latency from scheduled arrival, ms", ylabel="share of calls slower")
    return _png(figure, axes)


def _plot_over_time(results: RunResults) -> str:
    figure, axes = _figure()
    for colour, name in zip(_COLOURS, results.calls, strict=False):
        succeeded = [call for call in results.calls[name] if call.status == OK]
        failed = [call.due_s for call in results.calls[name] if call.status != OK]
        due, latency = [call.due_s for call in succeeded], [max(call.latency_ms, 0.01) for call in succeeded]
        axes.scatter(due, latency, s=3, alpha=0.35, color=colour, label=name)
        if failed:
            axes.scatter(
                failed, [axes.get_ylim()[0]] * len(failed), marker="x", s=18, color="#b00020", label=f"{name} failed"
            )
    axes.axvspan(0, results.warmup_s, color="#eeeeee", zorder=0, label="warm-up, not measured")
    axes.set(yscale="log", xlabel="scheduled arrival, s", ylabel="latency, ms")
    return _png(figure, axes)


def _plot_rates(results: RunResults) -> str:
    figure, axes = _figure()
    edges = np.arange(0.0, np.ceil(results.seconds) + 1.0)
    for colour, name in zip(_COLOURS, results.calls, strict=False):
        calls = results.calls[name]
        offered, _ = np.histogram([call.due_s for call in calls], edges)
        answered, _ = np.histogram([call.due_s + call.latency_ms / 1e3 for call in calls if call.status == OK], edges)
        axes.stairs(offered, edges, color=colour, alpha=0.4, linewidth=3, label=f"{name} due")
        axes.stairs(answered, edges, color=colour, label=f"{name} answered")
    axes.set(xlabel="s", ylabel="calls per second", ylim=(0, None))
    return _png(figure, axes)


def _plot_stages(summary: dict[str, Any]) -> str:
    figure, axes = _figure(height=2.6)
    for row, quantile in enumerate(("p50", "p95", "p99")):
        left = 0.0
        for colour, (stage, times) in zip(_COLOURS, summary["stages_ms"].items(), strict=False):
            width = times[quantile] or 0.0
            axes.barh(row, width, left=left, color=colour, label=stage if row == 0 else None)
            left += width
    axes.set(yticks=range(3), yticklabels=["p50", "p95", "p99"], xlabel="ms, each stage's own quantile")
    axes.invert_yaxis()
    return _png(figure, axes)


def figure(height: float) -> Any:
    """Return an empty figure, nine inches wide, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def _figure(height: float = 3.6) -> tuple[Any, Any]:
    made = figure(height)
    return made, made.subplots()


def _png(figure: Any, axes: Any) -> str:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.spines[["top", "right"]].set_visible(False)
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.03, 1.0))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()

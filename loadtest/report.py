"""A run as one HTML page with plots inside, and as summary.json for machines.

The page is self-contained (images are embedded) and lists its sources: command, commit, hardware, caveats. It takes
results and a summary; it does not know how they were measured.
"""

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .results import OK, RunResults

_COLOURS = ("#1f6f8b", "#e07a3f", "#6a994e", "#9c6ade", "#c0392b", "#555555", "#b08900")
_TIMES = ("p50 ms", "p95 ms", "p99 ms")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem;color:#222}
h1{margin-bottom:0}h2{margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}
img{max-width:100%}code{background:#f4f4f4;padding:.1rem .3rem}.bad{color:#b00020;font-weight:600}
"""


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
    images = "".join(
        f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{image}">' for title, image in plots.items()
    )
    hardware = summary["hardware"]
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>Freshet load test: {_text(summary["scenario"])}</title><style>{_STYLE}</style></head><body>
<h1>Load test: {_text(summary["scenario"])}</h1>
<p>{_text(summary["target"])} · {_text(summary["started_at"])} · {summary["seconds"]:g} s, of which
{summary["warmup_seconds"]:g} s warm-up are left out</p>
{_claims_table(summary)}
{_calls_table(summary)}
{_stages_table(summary)}
{_counts_table("Degraded answers", summary["degradations"], "none")}
{_counts_table("Other counts", summary["counts"], "")}
{images}
<h2>Read this with care</h2><ul>{"".join(f"<li>{_text(line)}</li>" for line in summary["caveats"])}</ul>
<p>Command <code>{_text(summary["command"])}</code><br>commit {_text(summary["commit"])},
{_text(hardware["cpu"])}, {hardware["cores"]} cores, Python {_text(hardware["python"])}<br>
<a href="summary.json">summary.json</a> · <a href="locust.html">Locust's own page</a></p>
</body></html>
"""


def _calls_table(summary: dict[str, Any]) -> str:
    header = ("call", "offered /s", "achieved /s", "ok", "errors", *_TIMES, "max ms", "sent late, p99 ms")
    rows = []
    for name, call in summary["calls"].items():
        failed = call["errors"] | ({"not sent": call["not_sent"]} if call["not_sent"] else {})
        errors = _bad(", ".join(f"{code} {count}" for code, count in failed.items())) if failed else "0"
        rates = (f"{call['offered_per_s']:.1f}", f"{call['achieved_per_s']:.1f}")
        times = [_ms(call["latency_ms"][key]) for key in ("p50", "p95", "p99", "max")]
        rows.append((_text(name), *rates, f"{call['ok']:,}", errors, *times, _ms(call["send_delay_ms"]["p99"])))
    return _table("Calls", header, rows)


def _claims_table(summary: dict[str, Any]) -> str:
    shown = {True: "shown", False: _bad("not shown"), None: "not measured"}
    rows = []
    for claim in summary["claims"]:
        value = "–" if claim["value"] is None else f"{claim['value']:.4g}"
        rows.append((_text(claim["says"]), value, _text(claim["allowed"]), shown[claim["held"]]))
    return _table("Claims", ("claim", "value", "allowed", ""), rows) if rows else ""


def _stages_table(summary: dict[str, Any]) -> str:
    rows = [
        (_text(stage), *(_ms(times[key]) for key in ("p50", "p95", "p99")))
        for stage, times in summary["stages_ms"].items()
    ]
    return _table("Stages", ("stage", *_TIMES), rows) if rows else ""


def _counts_table(title: str, counts: dict[str, int], when_empty: str) -> str:
    if not counts:
        return f"<h2>{title}</h2><p>{when_empty}</p>" if when_empty else ""
    return _table(title, (), [(_text(name), f"{count:,}") for name, count in counts.items()])


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    lines = ["".join(f"<th>{name}</th>" for name in header)] if header else []
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<h2>{title}</h2><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _bad(text: str) -> str:
    return f'<span class="bad">{_text(text)}</span>'


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


def _figure(height: float = 3.6) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


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


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _text(value: object) -> str:
    return html.escape(str(value))

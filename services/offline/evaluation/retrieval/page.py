"""The page and plots of `freshet bench retrieval`, from its report: trained bundles first, then synthetic rows.

Of a generated catalogue the page shows neither recall nor hit rate: see `rows`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.offline.evaluation.catalogues.scene import SYNTHETIC
from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.report import filled
from services.offline.evaluation.retrieval.algorithms import TRANSCRIPTION

Row = dict[str, Any]
Report = dict[str, Any]

_FOLDER = Path(__file__).parent
# One colour per family, the same in every plot; hollow is the transcription.
_COLOURS = {
    "brute_force": "#4d4d4d",
    "exact": "#0b6e4f",
    "top_k_avg": "#1f77b4",
    "top_k_per_embedding": "#d95f02",
    "combined_top_k": "#7b3294",
    "quantized": "#008b8b",
}
_LEAST_MISSED = 3e-4  # a logarithm has no place for nothing missed: that is the left edge


def page(report: Report) -> str:
    """retrieval.md; the report's `notes`, sentences that may be absent, stand before the first synthetic table."""
    trained = _groups([row for row in report["rows"] if row["catalogue"] != SYNTHETIC])
    proof = report["proof"]
    return filled(
        _FOLDER / "page.template.md",
        **report
        | {
            "trained": trained,
            "untrained": not trained,
            "synthetic": _groups([row for row in report["rows"] if row["catalogue"] == SYNTHETIC]),
            "notes": "\n\n".join(report.get("notes", ())),
            "left_out": [f"Left out: {sentence}." for sentence in report["left_out"]],
            "books": proof is not None and "books" in proof,
        },
    )


def plot(report: Report, out: Path) -> None:
    """growth.png, and retrieval.png of the rows of trained bundles, where there are some."""
    trained = [row for row in report["rows"] if row["catalogue"] != SYNTHETIC]
    if trained:
        plot_retrieval(trained, out / "retrieval.png")
    plot_growth(report["growth"], out / "growth.png")


def plot_retrieval(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds against the share of the top 100 missed, a line per shape and a panel per batch.

    Best is bottom left. Filled: Freshet; hollow: the same formulas in plain PyTorch; ringed: proven exact.
    """
    shapes = sorted({(row["num_items"], row["shape"]) for row in rows})
    batches = sorted({row["batch"] for row in rows})
    with panels(path, len(shapes), len(batches), size=(6.5, 4.2)) as drawn:
        for line, (items, shape) in enumerate(shapes):
            for column, batch in enumerate(batches):
                panel = titled(drawn[line][column], f"{shape}: {items:,} items, batch {batch}", xscale="log",
                               yscale="log", xlim=(_LEAST_MISSED / 1.5, 1.5), ylabel="ms per batch",
                               xlabel="share of the top 100 missed (left edge: none)")  # fmt: skip
                for row in rows:
                    if (row["shape"], row["batch"]) == (shape, batch):
                        _point(panel, row)


def plot_growth(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds and index memory against the number of items."""
    with panels(path, 1, 2, size=(6, 4.4)) as drawn:
        milliseconds = titled(drawn[0][0], "milliseconds per batch")
        megabytes = titled(drawn[0][1], "index, MB")
        for number, name in enumerate(dict.fromkeys(row["algorithm"] for row in rows)):
            for batch, style in ((1, "o--"), (32, "o-")):
                part = [row for row in rows if (row["algorithm"], row["batch"]) == (name, batch)]
                sizes, colour = [row["num_items"] for row in part], f"C{number}"
                milliseconds.plot(
                    sizes, [row["milliseconds"] for row in part], style, color=colour, label=f"{name}, batch {batch}"
                )
                if batch == 1:
                    megabytes.plot(sizes, [row["index_bytes"] / 1e6 for row in part], "o-", color=colour, label=name)
        for panel in drawn.flat:
            panel.set(xscale="log", yscale="log", xlabel="items")


def _groups(rows: Sequence[Row]) -> list[str]:
    found = []
    groups = dict.fromkeys((row["num_items"], row["batch"], row["catalogue"], row["shape"]) for row in rows)
    for group in sorted(groups):
        items, batch, catalogue, shape = group
        part = [
            row
            | {"shown": row["algorithm"] if row["algorithm"].startswith(TRANSCRIPTION) else f"**{row['algorithm']}**"}
            for row in rows
            if (row["num_items"], row["batch"], row["catalogue"], row["shape"]) == group
        ]
        is_synthetic = catalogue == SYNTHETIC
        found.append(
            filled(
                _FOLDER / "group.template.md",
                heading=f"Synthetic, {shape}" if is_synthetic else catalogue,
                items=items,
                batch=batch,
                trained=[] if is_synthetic else part,
                synthetic=part if is_synthetic else [],
            )
        )
    return found


def _point(panel: Any, row: Row) -> None:
    name = row["algorithm"].removeprefix(TRANSCRIPTION)
    colour = next((colour for start, colour in _COLOURS.items() if name.startswith(start)), "#999999")
    missed, milliseconds = max(_LEAST_MISSED, 1 - row["recall_100"]), row["milliseconds"]
    transcribed = row["algorithm"].startswith(TRANSCRIPTION)
    face = "none" if transcribed else colour
    panel.scatter(missed, milliseconds, s=36, facecolors=face, edgecolors=colour, linewidths=1.2, zorder=3)
    if row["exact"] == 1.0:
        panel.scatter(missed, milliseconds, s=120, facecolors="none", edgecolors=colour, linewidths=0.8)
    if not transcribed:
        panel.annotate(name, (missed, milliseconds), xytext=(7, 0), textcoords="offset points", fontsize=6, va="center")

"""Plots of benchmark rows, as PNG: speed against recall, and cost against the catalogue's size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, wherever it runs

from matplotlib import pyplot as plt

from services.offline.evaluation.retrieval.rows import TRANSCRIPTION

Row = dict[str, Any]

# One colour per family, the same in every plot; hollow is the transcription.
_COLOURS = {
    "brute_force": "#4d4d4d",
    "exact": "#0b6e4f",
    "top_k_avg": "#1f77b4",
    "top_k_per_embedding": "#d95f02",
    "combined_top_k": "#7b3294",
    "adaptive": "#c51b7d",
    "quantized": "#008b8b",
}


def plot_retrieval(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds against the share of the top 100 missed, one panel per shape and batch; best is bottom left.

    For rows of trained bundles: on a generated catalogue recall says nothing about a model's.
    """
    groups = sorted({(row["num_items"], row["shape"], row["batch"]) for row in rows})
    shapes = sorted({group[:2] for group in groups})
    columns = max(sum(1 for group in groups if group[:2] == shape) for shape in shapes)
    figure, panels = plt.subplots(
        len(shapes), columns, figsize=(6.5 * columns, 4.2 * len(shapes)), squeeze=False, constrained_layout=True
    )
    for line, shape in enumerate(shapes):
        batches = [group[2] for group in groups if group[:2] == shape]
        for column in range(columns):
            panel = panels[line][column]
            if column >= len(batches):
                panel.axis("off")
                continue
            part = [row for row in rows if row["shape"] == shape[1] and row["batch"] == batches[column]]
            _recall_panel(panel, part)
            panel.set_title(f"{shape[1]}: {shape[0]:,} items, batch {batches[column]}", loc="left", fontsize=10)
    figure.suptitle("Filled: Freshet. Hollow: the same formulas in plain PyTorch. Ringed: proven exact.", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_growth(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds and index memory against the number of items."""
    figure, (time_panel, memory_panel) = plt.subplots(1, 2, figsize=(12, 4.4), constrained_layout=True)
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    for number, name in enumerate(names):
        colour = f"C{number}"
        for batch, style in ((1, "--"), (32, "-")):
            part = [row for row in rows if row["algorithm"] == name and row["batch"] == batch]
            sizes = [row["num_items"] for row in part]
            label = f"{name}, batch {batch}"
            time_panel.plot(sizes, [row["milliseconds"] for row in part], style, color=colour, marker="o", label=label)
        part = [row for row in rows if row["algorithm"] == name and row["batch"] == 1]
        memory_panel.plot(
            [row["num_items"] for row in part],
            [row["index_bytes"] / 1e6 for row in part],
            color=colour,
            marker="o",
            label=name,
        )
    for panel, label in ((time_panel, "milliseconds per batch"), (memory_panel, "index, MB")):
        panel.set(xscale="log", yscale="log", xlabel="items")
        panel.set_title(label, loc="left", fontsize=10)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _recall_panel(panel: Any, rows: Sequence[Row]) -> None:
    least = 3e-4  # a logarithm has no place for nothing missed: that is the left edge
    for row in rows:
        name = row["algorithm"].removeprefix(TRANSCRIPTION)
        colour = next((colour for start, colour in _COLOURS.items() if name.startswith(start)), "#999999")
        missed = max(least, 1 - row["recall_100"])
        transcribed = row["algorithm"].startswith(TRANSCRIPTION)
        face = "none" if transcribed else colour
        panel.scatter(missed, row["milliseconds"], s=36, facecolors=face, edgecolors=colour, linewidths=1.2, zorder=3)
        if row["exact"] == 1.0:
            panel.scatter(missed, row["milliseconds"], s=120, facecolors="none", edgecolors=colour, linewidths=0.8)
        if not transcribed:
            panel.annotate(
                name, (missed, row["milliseconds"]), xytext=(7, 0), textcoords="offset points", fontsize=6, va="center"
            )
    panel.set(xscale="log", yscale="log", xlim=(least / 1.5, 1.5))
    panel.set_xlabel("share of the top 100 missed (left edge: none)", fontsize=8)
    panel.set_ylabel("ms per batch", fontsize=8)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)

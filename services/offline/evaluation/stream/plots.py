"""Plots of a walked stream, as PNG: hit rate as it goes, and how soon a new item is found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")  # no window, wherever it runs

from matplotlib import pyplot as plt

from services.offline.evaluation.stream.measures import EventColumns
from services.offline.evaluation.stream.setting import BoolArray, IntArray

# One colour per contender, the same in every plot.
_COLOURS = {
    "frozen": "#4d4d4d",
    "XS": "#0b6e4f",
    "XS, m = 1": "#7fbf9e",
    "frozen + XL": "#7b3294",
    "XS + XL": "#1f77b4",
    "retrained": "#d95f02",
    "popularity": "#b8860b",
    "item-kNN": "#c51b7d",
}
_FURTHEST_INTERACTION = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkedSet:
    """One data set's walks: columns and ranks of all seeds, one after the other; `trainings` are stream places."""

    name: str
    table: EventColumns
    ranks: Mapping[str, IntArray]
    trainings: Sequence[int]


def plot_stream(sets: Sequence[WalkedSet], path: Path) -> None:
    """Sliding hit rates over the stream, overall and for new items: one line of panels per data set."""
    figure, panels = plt.subplots(len(sets), 2, figsize=(13, 4.2 * len(sets)), squeeze=False, constrained_layout=True)
    for line, walked in enumerate(sets):
        every = walked.table.predictable
        new = every & (walked.table.past_events == 0) & (walked.table.nth >= 3)
        _sliding(panels[line][0], walked, every, 10)
        panels[line][0].set_title(f"{walked.name}: hit rate@10, all events", loc="left", fontsize=10)
        _sliding(panels[line][1], walked, new, 50)
        title = f"{walked.name}: hit rate@50, new items from their 3rd interaction"
        panels[line][1].set_title(title, loc="left", fontsize=10)
    panels[0][0].legend(frameon=False, fontsize=7, ncol=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_new_items(sets: Sequence[WalkedSet], path: Path) -> None:
    """Hit rate@50 of new items by their own interactions so far."""
    figure, panels = plt.subplots(1, len(sets), figsize=(6.5 * len(sets), 4.2), squeeze=False, constrained_layout=True)
    for panel, walked in zip(panels[0], sets, strict=True):
        new = walked.table.predictable & (walked.table.past_events == 0)
        nth, hits = walked.table.nth[new], {name: ranks[new] < 50 for name, ranks in walked.ranks.items()}
        inside = nth <= _FURTHEST_INTERACTION
        counts = np.bincount(nth[inside], minlength=_FURTHEST_INTERACTION + 1)
        # Three neighbours together: single interactions are few where the stream is short.
        reach = np.convolve(counts, np.ones(3), mode="same")
        enough = np.flatnonzero(reach >= 30)
        for name, hit in hits.items():
            found = np.bincount(nth[inside], hit[inside], minlength=_FURTHEST_INTERACTION + 1)
            rates = np.convolve(found, np.ones(3), mode="same")[enough] / reach[enough]
            panel.plot(enough, rates, color=_COLOURS.get(name), label=name, linewidth=1.4)
        panel.set(xlabel="the item's interaction in the stream, predicted", ylabel="hit rate@50", ylim=(0, None))
        panel.set_title(f"{walked.name}: items new to the model", loc="left", fontsize=10)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def sliding_rate(
    places: IntArray, hits: BoolArray, *, centres: npt.NDArray[np.floating], width: float
) -> npt.NDArray[np.float64]:
    """Mean of hits within `width` / 2 of each centre; NaN where there are fewer than 30."""
    order = np.argsort(places, kind="stable")
    running = np.concatenate([[0.0], np.cumsum(hits[order])])
    low = np.searchsorted(places[order], centres - width / 2, side="left")
    high = np.searchsorted(places[order], centres + width / 2, side="right")
    counts = (high - low).astype(np.float64)
    return np.where(counts >= 30, (running[high] - running[low]) / np.maximum(counts, 1), np.nan)


def _sliding(panel: Any, walked: WalkedSet, mask: BoolArray, k: int) -> None:
    length = float(walked.table.places.max()) + 1
    width = length / 20
    centres = np.linspace(width / 2, length - width / 2, 120)
    for name, ranks in walked.ranks.items():
        rates = sliding_rate(walked.table.places[mask], ranks[mask] < k, centres=centres, width=width)
        panel.plot(centres, rates, color=_COLOURS.get(name), label=name, linewidth=1.4)
    for place in walked.trainings:
        panel.axvline(place, color=_COLOURS["retrained"], linewidth=0.8, linestyle=":")
    panel.set(xlabel=f"events streamed (each point: {width:,.0f} events)", ylabel=f"hit rate@{k}", ylim=(0, None))
    panel.set_xlim(0, length)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)

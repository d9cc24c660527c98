"""docs/benchmarks/freshness.md and its plot, from a report and the walked sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.report import filled
from services.offline.evaluation.stream.measures import EventColumns
from services.offline.evaluation.stream.walk import BoolArray, IntArray

Row = dict[str, Any]

ALL, NEW, KNOWN = "all", "new items, from their 3rd interaction", "items of the training"
# The rankers' colours, in the page's order.
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
_FEWEST_EVENTS = 30  # for a point of a curve


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkedSet:
    """One data set's walks: all seeds' columns and ranks. `trainings`: places of retrainings."""

    name: str
    table: EventColumns
    ranks: Mapping[str, IntArray]
    trainings: Sequence[int]


def page(report: Row) -> str:
    """Return the whole page."""
    kinds: dict[str, dict[str, dict[str, Row]]] = {}
    for row in report["rows"]:
        kinds.setdefault(row["dataset"], {}).setdefault(row["kind"], {})[row["contender"]] = row
    tables_of = {name: (found, [one for one in _COLOURS if one in found[ALL]]) for name, found in kinds.items()}
    template = Path(__file__).with_name("page.md.j2")
    return filled(template, **report, tables_of=tables_of, all=ALL, new=NEW, known=KNOWN)


def plot_stream(sets: Sequence[WalkedSet], path: Path) -> None:
    """Plot sliding hit rates over the stream, overall and for new items, by data set."""
    with panels(path, len(sets), 2, size=(6.5, 4.2)) as drawn:
        for line, walked in enumerate(sets):
            table = walked.table
            new = table.predictable & (table.past_events == 0) & (table.nth >= 3)
            _sliding(drawn[line][0], walked, table.predictable, 10, "all events")
            _sliding(drawn[line][1], walked, new, 50, "new items from their 3rd interaction")


def sliding_rate(
    places: IntArray, hits: BoolArray, *, centres: npt.NDArray[np.number[Any]], width: float
) -> npt.NDArray[np.float64]:
    """Return the mean of hits within `width` / 2 of each centre; NaN for fewer than 30 events."""
    order = np.argsort(places, kind="stable")
    running = np.concatenate([[0.0], np.cumsum(hits[order])])
    low = np.searchsorted(places[order], centres - width / 2, side="left")
    high = np.searchsorted(places[order], centres + width / 2, side="right")
    counts = (high - low).astype(np.float64)
    return np.where(counts >= _FEWEST_EVENTS, (running[high] - running[low]) / np.maximum(counts, 1), np.nan)


def _sliding(panel: Any, walked: WalkedSet, mask: BoolArray, k: int, what: str) -> None:
    places = walked.table.places
    length = float(places.max()) + 1
    width = length / 20
    centres = np.linspace(width / 2, length - width / 2, 120)
    for name, ranks in walked.ranks.items():
        rates = sliding_rate(places[mask], ranks[mask] < k, centres=centres, width=width)
        panel.plot(centres, rates, color=_COLOURS.get(name), label=name, linewidth=1.4)
    for place in walked.trainings:
        panel.axvline(place, color=_COLOURS["retrained"], linewidth=0.8, linestyle=":")
    titled(panel, f"{walked.name}: hit rate@{k}, {what}", xlim=(0, length), ylim=(0, None),
           xlabel=f"events streamed (each point: {width:,.0f} events)", ylabel=f"hit rate@{k}")  # fmt: skip

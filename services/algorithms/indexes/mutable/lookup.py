"""Items of one version by id: states, and exact scores for one query, at a cost per requested item.

Letters: n found ids, P_x item components, P pairs, d component width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.segment import Segment
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.indexes.protocol import Indices, Scores
from services.algorithms.item_table.ids import hash_ids
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundItems:
    """n items in the requested order. parts: per segment, positions in that order and rows."""

    item_ids: tuple[str, ...]
    parts: tuple[tuple[Segment, Indices, Indices], ...]

    def __len__(self) -> int:
        return len(self.item_ids)

    def scores(self, queries: QueryStates, query: int) -> Scores:
        """s for one query, in float64 over the stored states: (n,), each within `error`."""
        out = np.empty(len(self))
        for segment, positions, rows in self.parts:
            out[positions] = segment.scorer.scores_float64(queries, query, rows)
        return out

    def error(self, queries: QueryStates, query: int) -> float:
        """The largest error of that query's scores."""
        return max(
            (float(segment.scorer.error_bounds_float64(queries)[query]) for segment, _, _ in self.parts), default=0.0
        )

    def components(self) -> FloatArray:
        """Components (n, P_x, d) of at least one item."""
        return _gather(self, [segment.scorer.components[rows] for segment, _, rows in self.parts])

    def states(self) -> ItemStates:
        """Components (n, P_x, d) and gate (n, P) of at least one item."""
        gates = [
            segment.rows.states.gate[rows] for segment, _, rows in self.parts if segment.rows.states.gate is not None
        ]
        return ItemStates(components=self.components(), gate=_gather(self, gates) if gates else None)


def score_error(version: Version, queries: QueryStates, query: int) -> float:
    """The largest error of one query's float64 scores in the version."""
    # Asks for the bounds of all queries, because the scorer has cached those.
    bounds = (source.segment.scorer.error_bounds_float64(queries)[query] for source in version.sources())
    return max(map(float, bounds), default=0.0)


def find_items(version: Version, item_ids: Sequence[str]) -> FoundItems:
    """The living items of distinct ids; unknown ids are omitted."""
    hashes = hash_ids(item_ids)
    found = np.zeros(len(item_ids), dtype=bool)
    parts = []
    for source in version.sources():
        rows = source.segment.find(item_ids, hashes)
        alive = source.segment.alive(source.num_dead)
        if alive is not None:
            rows[(rows >= 0) & ~alive[rows]] = -1
        here = np.flatnonzero(rows >= 0)
        if len(here):
            parts.append((source.segment, here, rows[here]))
            found[here] = True
        if found.all():
            break
    order = np.cumsum(found) - 1
    return FoundItems(
        item_ids=tuple(item_id for item_id, known in zip(item_ids, found.tolist(), strict=True) if known),
        parts=tuple((segment, order[here], rows) for segment, here, rows in parts),
    )


def _gather(found: FoundItems, arrays: Sequence[FloatArray]) -> FloatArray:
    out = np.empty((len(found), *arrays[0].shape[1:]), dtype=np.float32)
    for (_, positions, _), array in zip(found.parts, arrays, strict=True):
        out[positions] = array
    return out

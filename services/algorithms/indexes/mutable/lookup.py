"""Items of one version by id: states, exact scores for one query, and the items most similar to one item.

sim(x, y) = mean over p_x of <N(g_px(x)), N(g_px(y))>          N scales to unit length

Two items are similar if, component by component, both are near the same queries; gates are not used.

Letters: n found ids or rows of a segment, P_x item components, P pairs, d component width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.mutable.segment import Segment
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.indexes.protocol import Indices, Scores
from services.algorithms.item_table.ids import hash_ids
from services.algorithms.pefa.refresh import unit
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundItems:
    """n items in the requested order. parts: segments with their items' positions in that order and rows."""

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
    # This asks for the bounds of all queries, which the scorer has cached.
    bounds = (source.segment.scorer.error_bounds_float64(queries)[query] for source in version.sources())
    return max(map(float, bounds), default=0.0)


def find_items(version: Version, item_ids: Sequence[str]) -> FoundItems:
    """The living items of `item_ids`, which must be distinct; unknown ids are omitted."""
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


_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class SimilarItems:
    """At most K items, best first, with similarities in [-1, 1]."""

    item_ids: list[str]
    similarities: list[float]


def components_of(version: Version, item_id: str) -> FloatArray | None:
    """The item's components (P_x, d), if the version has it."""
    found = find_items(version, [item_id])
    return found.components()[0] if len(found) else None


def similar_items(version: Version, item_id: str, components: FloatArray, k: int, wanted: ItemFilter) -> SimilarItems:
    """The `k` allowed items most similar to `item_id`, without that item; `components` (P_x, d): its components.

    One float32 pass selects candidates, which are scored in float64; ties go by id. Cost: 2 n P_x d multiply-adds per
    segment.
    """
    direction = unit(components) / version.shape.num_components
    slack = 2 * (direction.size + 8) * 2.0**-24
    (checked,) = version.checked(wanted)
    ids: list[str] = []
    scores: list[npt.NDArray[np.float64]] = []
    least = -np.inf
    for source in version.sources():
        segment, allowed = source.segment, version.allowed(source, (checked,))
        components = segment.rows.states.components
        for start in range(0, len(segment), _CHUNK):
            part = components[start : start + _CHUNK]
            rough = _rough(part, direction.astype(np.float32))
            if allowed is not None:
                rough[~allowed[start : start + _CHUNK]] = -np.inf
            if np.count_nonzero(rough > -np.inf) > k:  # K + 1, because the item itself may be among them
                least = max(least, float(np.partition(rough, -k - 1)[-k - 1]))
            rows = np.flatnonzero((rough >= least - slack) & (rough > -np.inf))
            ids += segment.rows.ids.strings.take(rows + start)
            scores.append(np.einsum("npd,pd->n", unit(part[rows]), direction))
    exact = np.concatenate(scores) if scores else np.empty(0)
    order = sorted((-score, one) for score, one in zip(exact.tolist(), ids, strict=True) if one != item_id)[:k]
    return SimilarItems([one for _, one in order], [-score for score, _ in order])


def _rough(components: npt.NDArray[np.float32], direction: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Float32 similarities (n,); a component of length 0 adds nothing."""
    products = np.einsum("npd,pd->np", components, direction)
    norms = np.sqrt(np.einsum("npd,npd->np", components, components))
    np.divide(products, norms, out=products, where=norms > 0)
    return np.asarray(products.sum(axis=1))

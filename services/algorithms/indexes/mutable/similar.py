"""The items whose states are most similar to one item's, exact over one version.

sim(x, y) = mean over p_x of <N(g_px(x)), N(g_px(y))>          N: to unit length

Two items are similar if the model puts both near the same queries, component by component; gates are not used. One
float32 pass over the components, then float64 for possible results; ties by id.

Letters: n rows of a segment, P_x item components, d width. Cost: n P_x d multiply-adds, twice, per segment.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.mutable.lookup import find_items
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.pefa.refresh import unit
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import FloatArray

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
    """The `k` allowed items most similar to `item_id`, without itself; `components` (P_x, d) are its own."""
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

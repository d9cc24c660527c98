"""Choose K of a ranked pool with pins, category limits, caps and maximal marginal relevance (MMR).

MMR (Carbonell and Goldstein, 1998) takes, one by one, the item with the largest (1 - w) * s - w * (largest likeness to
the chosen items). Two items' likeness is the mean cosine of their components, on the scale of s. Items beyond a limit
are skipped. Pinned items are chosen first and count towards every limit.

Letters: n pool size, P_x item components, d component width, K results.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from services.algorithms.rules.filters import Mask

Positions = npt.NDArray[np.int64]


def likeness_vectors(components: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Vectors (n, P_x * d) whose dot products are the mean cosine of components (n, P_x, d), 0 for zero vectors."""
    norms = np.linalg.norm(components, axis=-1, keepdims=True)
    unit = np.divide(components, norms, out=np.zeros_like(components), where=norms > 0)
    _, num_components, width = components.shape
    flat = unit.reshape(len(components), num_components * width)
    return np.asarray(flat / np.sqrt(num_components), dtype=np.float32)


def select(
    scores: npt.NDArray[np.float64],
    k: int,
    *,
    components: npt.NDArray[np.floating] | None = None,
    diversity: float = 0.0,
    categories: Sequence[Sequence[Hashable]] | None = None,
    max_per_category: int = 0,
    caps: Sequence[tuple[Mask, int]] = (),
    pins: Sequence[tuple[Mask, int]] = (),
) -> Positions:
    """The positions of at most `k` chosen items, in display order.

    scores (n,): best first; ties keep the pool's order. components (n, P_x, d): required if `diversity`, the weight w
    in [0, 1], is above 0. categories: each item's categories. max_per_category: 0 means no limit. caps: masks of items
    (n,), and how many items of each mask may be chosen. pins: masks of items (n,), and a position from 1 for the first
    item of the mask that the limits admit. Of pins with the same position, the first that has such an item counts.
    Raises: ValueError with the invalid or missing field. Cost: O(K n P_x d) with diversity, and O(n) per skipped item;
    O(n) without.
    """
    if k < 1:
        raise ValueError(f"k={k} allowed: at least 1")
    if not 0 <= diversity <= 1:
        raise ValueError(f"diversity={diversity} allowed: 0-1")
    if max_per_category < 0 or (max_per_category and categories is None):
        raise ValueError(f"max_per_category={max_per_category} allowed: at least 0, and above 0 only with categories")
    limits = _Limits(len(scores), categories if max_per_category else None, max_per_category, caps)
    if diversity and components is None:
        raise ValueError(f"diversity={diversity} needs the items' components")
    pinned: dict[int, int] = {}
    for mask, position in pins:
        named = () if position - 1 in pinned else np.flatnonzero(mask).tolist()
        row = next((row for row in named if row not in pinned.values() and limits.admits(row)), None)
        if row is not None:
            limits.take(row)
            pinned[position - 1] = row
    taken = list(pinned.values())
    if diversity == 0 or components is None:
        chosen = _first_within_limits(len(scores), k, limits, taken)
    else:
        chosen = _marginal_relevance(scores, k, likeness_vectors(components), diversity, limits, taken)
    for position, row in sorted(pinned.items()):
        chosen.insert(position, row)  # a position beyond the end is the end
    return np.array(chosen[:k], dtype=np.int64)


class _Limits:
    def __init__(
        self,
        num_items: int,
        categories: Sequence[Sequence[Hashable]] | None,
        limit: int,
        caps: Sequence[tuple[Mask, int]],
    ) -> None:
        self._groups: list[set[Hashable]] | None = None
        self._room: dict[Hashable, int] = {}
        if categories is None and not caps:
            return
        self._groups = [set(names) for names in categories] if categories else [set() for _ in range(num_items)]
        self._room = {name: limit for names in self._groups for name in names}
        for number, (mask, most) in enumerate(caps):
            cap = "cap", number
            self._room[cap] = most
            for position in np.flatnonzero(mask).tolist():
                self._groups[position].add(cap)

    def admits(self, position: int) -> bool:
        return self._groups is None or all(self._room[group] > 0 for group in self._groups[position])

    def take(self, position: int) -> None:
        for group in () if self._groups is None else self._groups[position]:
            self._room[group] -= 1


def _first_within_limits(num_items: int, k: int, limits: _Limits, taken: Sequence[int]) -> list[int]:
    chosen: list[int] = []
    for position in range(num_items):
        if len(chosen) == k:
            break
        if position not in taken and limits.admits(position):
            limits.take(position)
            chosen.append(position)
    return chosen


def _marginal_relevance(
    scores: npt.NDArray[np.float64],
    k: int,
    vectors: npt.NDArray[np.float32],
    weight: float,
    limits: _Limits,
    taken: Sequence[int],
) -> list[int]:
    relevance = (1 - weight) * scores
    nearest = np.full(len(scores), -np.inf)
    available = np.ones(len(scores), dtype=bool)
    for row in taken:
        available[row] = False
        np.maximum(nearest, vectors @ vectors[row], out=nearest)
    value = np.where(available, relevance - weight * nearest if taken else scores, -np.inf)
    chosen: list[int] = []
    while len(chosen) < k and available.any():
        best = int(np.argmax(value))
        available[best] = False
        value[best] = -np.inf
        if not limits.admits(best):
            continue
        limits.take(best)
        chosen.append(best)
        np.maximum(nearest, vectors @ vectors[best], out=nearest)
        value = np.where(available, relevance - weight * nearest, -np.inf)
    return chosen

"""Grouped top-N in NumPy, for installs without a compiler: tiles of items, np.argpartition, ties by rank.

np.argpartition leaves it open which of equal scores it returns. Where a cut fell between equal scores a query vector is
answered again with scores and ranks as one integer, which costs several times as much and knows no ties.

Letters: M query vectors, X items, d width, n kept per vector.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
ItemTile = Callable[[int, int], FloatArray]  # vectors start..stop-1 (x, d)
MaskTile = Callable[[int, int], Mask]  # which of them each query vector may have (M, x)

_TILE_FLOATS = 1 << 21  # scores (M, x) at a time: 8 MiB
_LOWEST = int(np.iinfo(np.int64).min)


def tiled_top_k(
    queries: FloatArray, tile: ItemTile, allowed: MaskTile | None, ranks: Integers, size: int
) -> tuple[Integers, FloatArray]:
    """The `size` best items of each query vector by (-score, rank).

    Shapes: queries (M, d), ranks (X,), a permutation -> rows (M, size) and scores (M, size), ending in -1 and -inf
    where fewer are allowed. `size` is at most X.
    """
    num_items = len(ranks)
    best = np.empty((len(queries), 0), dtype=np.float32)
    rows = np.empty((len(queries), 0), dtype=np.int64)
    cut_a_tie = np.zeros(len(queries), dtype=np.bool_)
    step = _step(len(queries), num_items)
    for x in range(0, num_items, step):
        stop = min(x + step, num_items)
        found, columns = _largest(_scores(queries, tile, allowed, x, stop), size + 1)
        cut_a_tie |= _between_equals(found, size)
        best = np.concatenate([best, found[:, :size]], axis=1)
        rows = np.concatenate([rows, columns[:, :size] + x], axis=1)
        if best.shape[1] > size:
            found, columns = _largest(best, size + 1)
            cut_a_tie |= _between_equals(found, size)
            best, rows = found[:, :size], np.take_along_axis(rows, columns[:, :size], axis=1)
    order = np.lexsort((ranks[rows], -best), axis=1)
    best, rows = np.take_along_axis(best, order, axis=1), np.take_along_axis(rows, order, axis=1)
    again = np.flatnonzero(cut_a_tie)
    if len(again):
        few = None if allowed is None else lambda start, stop: allowed(start, stop)[again]
        rows[again], best[again] = _by_keys(queries[again], tile, few, ranks, size)
    return np.where(best > -np.inf, rows, -1), best


def _by_keys(
    queries: FloatArray, tile: ItemTile, allowed: MaskTile | None, ranks: Integers, size: int
) -> tuple[Integers, FloatArray]:
    """The same with a score and a rank as one integer."""
    num_items = len(ranks)
    kept = np.full((len(queries), size), _LOWEST)
    step = _step(len(queries), num_items)
    for x in range(0, num_items, step):
        stop = min(x + step, num_items)
        scores = _scores(queries, tile, allowed, x, stop)
        # Adding 0 makes -0 equal to +0; flipping the lower bits of negative floats makes integers of the same order.
        bits = (scores + np.float32(0)).view(np.int32)
        keys = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
        keys <<= 32
        keys += 0xFFFFFFFF - ranks[x:stop]
        keys[scores == -np.inf] = _LOWEST
        joined = np.concatenate([kept, keys], axis=1)
        kept = np.partition(joined, joined.shape[1] - size, axis=1)[:, joined.shape[1] - size :]
    kept = np.sort(kept, axis=1)[:, ::-1]
    bits = (kept >> 32).astype(np.int32)
    scores = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
    missing = kept == _LOWEST
    rank = np.where(missing, 0, 0xFFFFFFFF - (kept & 0xFFFFFFFF))
    return np.argsort(ranks)[rank], np.where(missing, np.float32(-np.inf), scores)


def _largest(scores: FloatArray, size: int) -> tuple[FloatArray, Integers]:
    """The at most `size` largest of each row, largest first, and their columns."""
    width = scores.shape[1]
    if size < width:
        columns = np.argpartition(scores, width - size, axis=1)[:, width - size :]
        scores = np.take_along_axis(scores, columns, axis=1)
    else:
        columns = np.broadcast_to(np.arange(width), scores.shape)
    order = np.argsort(-scores, axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(columns, order, axis=1)


def _scores(queries: FloatArray, tile: ItemTile, allowed: MaskTile | None, start: int, stop: int) -> FloatArray:
    scores = queries @ tile(start, stop).T
    if allowed is not None:
        scores[~allowed(start, stop)] = -np.inf
    return scores


def _between_equals(found: FloatArray, size: int) -> Mask:
    """Which rows of descending scores are cut between equal ones after `size` columns."""
    if found.shape[1] <= size:
        return np.zeros(len(found), dtype=np.bool_)
    return np.asarray((found[:, size] == found[:, size - 1]) & (found[:, size] > -np.inf))


def _step(num_queries: int, num_items: int) -> int:
    """Items per tile, a multiple of the panel that stored vectors come in."""
    return max(64, min(num_items, _TILE_FLOATS // num_queries) // 64 * 64)

"""Grouped top-N in plain PyTorch, for installs without a compiler: tiles of items, torch.topk, ties by rank.

torch.topk leaves it open which of equal scores it returns. Where a cut fell between equal scores a query vector is
answered again with scores and ranks as one integer, which costs several times as much and knows no ties.

Letters: M query vectors, X items, d width, n kept per vector.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ItemTile = Callable[[int, int], Tensor]  # vectors start..stop-1 (x, d)
MaskTile = Callable[[int, int], Tensor]  # which of them each query vector may have (M, x)

_TILE_FLOATS = 1 << 21  # scores (M, x) at a time: 8 MiB
_LOWEST = torch.iinfo(torch.int64).min


def tiled_top_k(
    queries: Tensor, tile: ItemTile, allowed: MaskTile | None, ranks: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The `size` best items of each query vector by (-score, rank).

    Shapes: queries (M, d), ranks (X,) int64, a permutation -> rows (M, size) int64 and scores (M, size) float32,
    ending in -1 and -inf where fewer are allowed. `size` is at most X.
    """
    num_items = len(ranks)
    best = torch.full((len(queries), 0), -torch.inf)
    rows = torch.empty((len(queries), 0), dtype=torch.int64)
    cut_a_tie = torch.zeros(len(queries), dtype=torch.bool)
    step = _step(len(queries), num_items)
    for x in range(0, num_items, step):
        stop = min(x + step, num_items)
        scores = _scores(queries, tile, allowed, x, stop)
        found, places = torch.topk(scores, min(size + 1, stop - x), dim=1)
        cut_a_tie |= _between_equals(found, size)
        best = torch.cat([best, found[:, :size]], dim=1)
        rows = torch.cat([rows, places[:, :size] + x], dim=1)
        if best.shape[1] > size:
            found, places = torch.topk(best, size + 1, dim=1)
            cut_a_tie |= _between_equals(found, size)
            best, rows = found[:, :size], torch.gather(rows, 1, places[:, :size])
    order = torch.argsort(ranks[rows], dim=1)
    best, rows = torch.gather(best, 1, order), torch.gather(rows, 1, order)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    best, rows = torch.gather(best, 1, order), torch.gather(rows, 1, order)
    again = torch.nonzero(cut_a_tie)[:, 0]
    if len(again):
        few = None if allowed is None else lambda start, stop: allowed(start, stop)[again]
        rows[again], best[again] = _by_keys(queries[again], tile, few, ranks, size)
    return torch.where(best > -torch.inf, rows, -1), best


def _by_keys(
    queries: Tensor, tile: ItemTile, allowed: MaskTile | None, ranks: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The same with a score and a rank as one integer."""
    num_items = len(ranks)
    kept = torch.full((len(queries), size), _LOWEST)
    step = _step(len(queries), num_items)
    for x in range(0, num_items, step):
        stop = min(x + step, num_items)
        scores = _scores(queries, tile, allowed, x, stop)
        # Adding 0 makes -0 equal to +0; flipping the lower bits of negative floats makes integers of the same order.
        bits = (scores + 0.0).view(torch.int32)
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        keys = (keys << 32).add_(0xFFFFFFFF - ranks[x:stop])
        keys.masked_fill_(scores == -torch.inf, _LOWEST)
        kept = torch.topk(torch.cat([kept, keys], dim=1), size, dim=1).values
    bits = (kept >> 32).int()
    scores = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
    missing = kept == _LOWEST
    rank = torch.where(missing, 0, 0xFFFFFFFF - (kept & 0xFFFFFFFF))
    return torch.argsort(ranks)[rank], torch.where(missing, -torch.inf, scores)


def _scores(queries: Tensor, tile: ItemTile, allowed: MaskTile | None, start: int, stop: int) -> Tensor:
    scores = queries @ tile(start, stop).T
    if allowed is not None:
        scores.masked_fill_(~allowed(start, stop), -torch.inf)
    return scores


def _between_equals(found: Tensor, size: int) -> Tensor:
    """Which rows of descending scores are cut between equal ones after `size` columns."""
    if found.shape[1] <= size:
        return torch.zeros(len(found), dtype=torch.bool)
    return (found[:, size] == found[:, size - 1]) & (found[:, size] > -torch.inf)


def _step(num_queries: int, num_items: int) -> int:
    """Items per tile, a multiple of the panel that stored vectors come in."""
    return max(64, min(num_items, _TILE_FLOATS // num_queries) // 64 * 64)

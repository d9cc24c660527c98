"""Launches the kernels of `kernel.py`. Importing this imports Triton, see `mol_scores/fused.py`.

Letters: B queries, Q vectors per query, X items, S item components, d width.
"""

from typing import Any

import torch
import triton

from services.algorithms.ops.grouped_top_k.kernel import collect_kernel, collect_values_kernel, tile_maxima_kernel

NO_KEY = torch.iinfo(torch.int64).min
_ROWS, _ITEMS = 64, 128  # a tile has at most 64 x 128 accumulators, 64 registers per thread
_TILES_PER_RESULT = 4  # then about one collected item in eight is surplus
_BLOCK = 1024


def items_per_maximum(num_items: int, size: int) -> int | None:
    """The largest tile width that gives enough tiles for `size`; None if the catalogue is too small."""
    return next((w for w in (128, 64, 32, 16) if num_items // w >= _TILES_PER_RESULT * size), None)


def collect_best(
    items: torch.Tensor,
    queries: torch.Tensor,
    size: int,
    allowed: torch.Tensor | None,
    *,
    width_of_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of the `size` best items of each vector and component, and whether any list of collected keys overflowed.

    Shapes: items (X, S, d), queries (B, Q, d) of one dtype, allowed (1 or B, X) uint8 -> keys (B, Q, S,
    size) int64 descending, padded with `NO_KEY`, and a boolean without axes, on the device.
    """
    queries, allowed = queries.contiguous(), None if allowed is None else allowed.contiguous()
    num_queries, vectors, width = queries.shape
    num_items, num_groups, _ = items.shape
    rows = num_queries * vectors
    device = items.device
    tiles = triton.cdiv(num_items, width_of_tile)
    capacity = 2 * size + 64
    rows_of_tile = _ROWS if rows > _ROWS // 2 else _ROWS // 2
    grid = (triton.cdiv(num_items, _ITEMS), num_groups, triton.cdiv(rows, rows_of_tile))
    maxima = torch.empty((rows, num_groups, tiles), dtype=torch.float32, device=device)
    mask, stride = (maxima, 0) if allowed is None else (allowed, 0 if len(allowed) == 1 else num_items)
    compiled: dict[str, Any] = {
        "ROWS": rows_of_tile,
        "ITEMS": _ITEMS,
        "STEP": min(64, max(16, int(triton.next_power_of_2(width)))),
        "MASKED": allowed is not None,
        "FAST": device.type == "cuda" and torch.version.hip is None,
        "num_warps": 4,
        "num_stages": 2,
        "enable_fp_fusion": True,
    }
    sizes = (stride, num_items, rows, num_groups)
    tile_maxima_kernel[grid](items, queries, mask, maxima, *sizes, tiles, vectors, width, W=width_of_tile, **compiled)
    thresholds = torch.topk(maxima, size, dim=-1, sorted=False).values.amin(dim=-1)
    keys = torch.full((rows, num_groups, capacity), NO_KEY, dtype=torch.int64, device=device)
    counts = torch.zeros((rows, num_groups), dtype=torch.int32, device=device)
    collect_kernel[grid](items, queries, mask, thresholds, keys, counts, *sizes, capacity, vectors, width, **compiled)
    best = torch.topk(keys, size, dim=-1).values
    return best.view(num_queries, vectors, num_groups, size), (counts > capacity).any()


def collect_values(values: torch.Tensor, thresholds: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of each row's values at or above its threshold, see `device.at_least`."""
    values, thresholds = values.contiguous(), thresholds.contiguous()
    columns = torch.full((len(values), capacity), -1, dtype=torch.int64, device=values.device)
    counts = torch.zeros(len(values), dtype=torch.int32, device=values.device)
    if values.numel():
        grid = (triton.cdiv(values.shape[1], _BLOCK), len(values))
        collect_values_kernel[grid](
            values, thresholds, columns, counts, values.shape[1], capacity, BLOCK=_BLOCK, num_warps=4
        )
    return columns, counts

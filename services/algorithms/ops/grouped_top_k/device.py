"""Grouped top-N over torch tensors on a device, and the selection of values that reach a threshold.

On a CUDA card, `kernel.py` finds the best items. Elsewhere, and for catalogues too small for tiles, PyTorch computes
dot products in chunks of items. Both order by (-score, row). Nothing here waits for the device.

Letters: B queries, Q vectors per query, X items, S item components, d width, N results per (vector, component).
"""

from dataclasses import dataclass

import torch

_CHUNK_ELEMENTS = 16 << 20  # dot products in memory at a time on the plain path
_NO_KEY = torch.iinfo(torch.int64).min


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBest:
    """The N best of each (query vector, item component), best first, equal scores by row.

    Shapes: as `GroupedBest`. overflowed, a boolean without axes: the fast path lost items because scores are unevenly
    distributed; ask again with `plain=True`.
    """

    rows: torch.Tensor
    scores: torch.Tensor
    following: torch.Tensor
    overflowed: torch.Tensor


def best_of_groups(
    items: torch.Tensor,
    queries: torch.Tensor,
    size: int,
    allowed: torch.Tensor | None,
    *,
    fused: bool,
    plain: bool = False,
) -> DeviceBest:
    """The `size` best allowed items of each query vector and item component.

    Shapes: items (X, S, d), queries (B, Q, d) of one dtype, allowed (1 or B, X) uint8. Sums are float32. fused: whether
    kernels can run. plain: forbid kernels.
    """
    num_items = len(items)
    size = min(size, num_items)
    keep = min(size + 1, num_items)
    keys = None
    overflowed = torch.zeros((), dtype=torch.bool, device=items.device)
    if fused and not plain and queries.numel():
        # Triton is required only where kernels run.
        from services.algorithms.ops.grouped_top_k import collect

        width_of_tile = collect.items_per_maximum(num_items, keep)
        if width_of_tile is not None:
            keys, overflowed = collect.collect_best(items, queries, keep, allowed, width_of_tile=width_of_tile)
    if keys is None:
        keys = _plain_keys(items, queries, keep, allowed)
    bits = keys >> 32
    scores = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int32).view(torch.float32)
    scores = torch.where(keys == _NO_KEY, -torch.inf, scores)
    rows = torch.where(keys == _NO_KEY, -1, 0xFFFFFFFF - (keys & 0xFFFFFFFF))
    if keep > size:
        following = scores[..., size]
    else:
        following = torch.full(scores.shape[:-1], -torch.inf, device=items.device)
    return DeviceBest(rows=rows[..., :size], scores=scores[..., :size], following=following, overflowed=overflowed)


def _plain_keys(items: torch.Tensor, queries: torch.Tensor, keep: int, allowed: torch.Tensor | None) -> torch.Tensor:
    """Keys (score and row as one integer) of the `keep` best: (B, Q, S, keep) descending."""
    num_queries, vectors, width = queries.shape
    num_items, num_groups, _ = items.shape
    flat = queries.reshape(-1, width).float()
    best = torch.full((len(flat), num_groups, keep), _NO_KEY, dtype=torch.int64, device=items.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, len(flat) * num_groups))
    for x in range(0, num_items if len(flat) else 0, step):
        # Adding 0 makes -0 equal to +0; flipping the lower bits of negative floats gives integers in float order.
        scores = torch.einsum("rd,xsd->rsx", flat, items[x : x + step].float()).add_(0.0).contiguous()
        bits = scores.view(torch.int32)
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        keys = (keys << 32).add_(0xFFFFFFFF - torch.arange(x, x + keys.shape[-1], device=items.device))
        if allowed is not None:
            mask = allowed[:, x : x + step].bool().expand(num_queries, -1)
            keys = torch.where(mask.repeat_interleave(vectors, dim=0)[:, None, :], keys, _NO_KEY)
        best = torch.topk(torch.cat([best, keys], dim=-1), keep, dim=-1).values
    return best.view(num_queries, vectors, num_groups, keep)


def at_least(
    values: torch.Tensor, thresholds: torch.Tensor, capacity: int, *, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of each row's values at or above its threshold: values (B, n), thresholds (B,).

    Returns: columns (B, capacity) int64, unordered, padded with -1, never of -inf; counts (B,), above `capacity` if
    columns were lost.
    """
    if fused:
        from services.algorithms.ops.grouped_top_k import collect

        return collect.collect_values(values, thresholds, capacity)
    reached = (values >= thresholds[:, None]) & (values > -torch.inf)
    taken = min(capacity, values.shape[1])
    order = torch.topk(reached.to(torch.int8), taken, dim=1)
    columns = torch.where(order.values > 0, order.indices, -1)
    return torch.nn.functional.pad(columns, (0, capacity - taken), value=-1), reached.sum(dim=1)

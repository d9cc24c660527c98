"""The last step of every algorithm on a device: the exact top K of a pool, or of all items, from certified bounds.

The K-th largest lower bound is the threshold, because K items score at least as much. Items whose upper bound reaches
it are evaluated in float64; equal scores are ordered by row. Nothing waits for the device, so that a CUDA graph can
capture the step. So `capacity` limits the evaluated items in advance; if it was too low, the caller repeats the step.

Letters: B queries, X items, n pool size, K results.
"""

from dataclasses import dataclass

import torch

from services.algorithms.ops.grouped_top_k.device import at_least
from services.algorithms.ops.mol_scores.device import DeviceQueries, DeviceScorer

_GROUP, _GROUPS_PER_RESULT = 64, 4  # one lower bound per 64 items suffices with at least 4 K groups


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAnswer:
    """The exact top K of B pools, on the device.

    Shapes: rows (B, K') int64 and scores (B, K') float64, padded with -1 and -inf; kth_scores (B,): a lower bound of
    the K-th exact score, -inf if a pool had fewer items; evaluated (B,): items to evaluate in float64. Above `capacity`
    the answer is invalid.
    """

    rows: torch.Tensor
    scores: torch.Tensor
    kth_scores: torch.Tensor
    evaluated: torch.Tensor


def exact_answer(
    scorer: DeviceScorer,
    queries: DeviceQueries,
    pool: torch.Tensor | None,
    allowed: torch.Tensor | None,
    *,
    k: int,
    capacity: int,
) -> DeviceAnswer:
    """The top `k` of each query's pool (B, n) of distinct rows, padded with -1, or of all items. allowed (1 or B, X):
    uint8.
    """
    count = scorer.num_items if pool is None else pool.shape[1]
    grouped = pool is None and queries.fused and count // _GROUP >= _GROUPS_PER_RESULT * k
    upper, lower = scorer.bounds(queries, rows=pool, allowed=allowed, grouped=grouped)
    if lower.shape[1] < k:
        thresholds = torch.full((len(lower),), -torch.inf, device=lower.device)
    else:
        thresholds = torch.topk(lower, k, dim=1, sorted=False).values.amin(dim=1)
    columns, evaluated = at_least(upper, thresholds, capacity, fused=scorer.kernels)
    rows = columns if pool is None else torch.where(columns >= 0, pool.gather(1, columns.clamp_min(0)), -1)
    scores = scorer.scores_float64(queries, rows)
    ordered_rows, ordered, raw = _in_order(rows, scores, scorer.num_items, 2 * queries.double_error)
    wanted = min(k, scorer.num_items)
    kth_scores = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=rows.device)
    if k <= capacity:
        kth_scores = raw[:, k - 1] - queries.double_error
    return DeviceAnswer(
        rows=ordered_rows[:, :wanted], scores=ordered[:, :wanted], kth_scores=kth_scores, evaluated=evaluated
    )


def _in_order(
    rows: torch.Tensor, scores: torch.Tensor, num_items: int, tolerance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and scores (B, n) by (-score, row), and the sorted raw scores; see `order_by_score_then_id`."""
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    raw, rows = scores.gather(1, order), rows.gather(1, order)
    new_group = torch.ones_like(rows, dtype=torch.bool)
    # -inf minus -inf is NaN and starts no new group.
    new_group[:, 1:] = raw[:, :-1] - raw[:, 1:] > tolerance[:, None]
    columns = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    starts = torch.cummax(torch.where(new_group, columns, 0), dim=1).values
    group = new_group.cumsum(dim=1)
    order = torch.argsort(group * (num_items + 1) + torch.where(rows >= 0, rows, num_items), dim=1)
    return rows.gather(1, order), raw.gather(1, starts), raw

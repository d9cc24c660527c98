"""The N best items of each (query vector, item component) in plain PyTorch: what every faster path is compared with.

It materialises (B, Q, S, X), so it is for tests and small catalogues.

Letters: B queries, Q vectors per query, X items, S item components, d width, N results.
"""

import torch


def grouped_top_k_reference(
    queries: torch.Tensor, items: torch.Tensor, size: int, allowed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `size` best items of each pair of a query vector and an item component by (-score, row), and the next score.

    Shapes: queries (B, Q, d), items (X, S, d), allowed (B, X) bool -> rows (B, Q, S, N) int64 and scores
    (B, Q, S, N) with N = min(size, X), ending in -1 and -inf where fewer are allowed, and the (N + 1)-th best score
    (B, Q, S), -inf where there is none. In the queries' dtype.
    """
    scores = torch.einsum("bqd,xsd->bqsx", queries, items)
    scores = scores.masked_fill(~allowed[:, None, None, :], -torch.inf)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    ordered = torch.gather(scores, -1, order)
    rows = torch.where(ordered > -torch.inf, order, -1)[..., :size]
    following = ordered[..., size] if size < len(items) else torch.full(ordered.shape[:-1], -torch.inf)
    return rows, ordered[..., :size], following

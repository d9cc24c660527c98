"""The Mixture-of-Logits formula in plain PyTorch: the reference for every faster path.

It materialises (B, X, P) and (B, X, G), so it suits tests and small catalogues. Its float64 scores are the *exact*
scores of this library; its float32 scores show the error of a direct transcription.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

import torch

from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates, check_shapes


def mol_scores_reference(
    queries: QueryStates, items: ItemStates, pair_gate: PairGate | None, *, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """s = sum_p pi_p c_p with c_p the pair's cosine and pi = softmax(SiLU(q_p x_p + (W2 SiLU(W1 c + b1) + b2)_p)).

    Shapes: queries (B, P_q, d) and (B, P), items (X, P_x, d) and (X, P) -> (B, X) in `dtype`.
    Raises: ValueError if widths or pair counts differ.
    """
    check_shapes(queries, items, pair_gate)
    silu = torch.nn.functional.silu
    query_components = torch.tensor(queries.components, dtype=dtype)
    item_components = torch.tensor(items.components, dtype=dtype)
    cosines = torch.einsum("bqd,xpd->bxqp", query_components, item_components).flatten(2)
    gate = torch.zeros_like(cosines)
    if queries.gate is not None and items.gate is not None:
        gate = gate + torch.tensor(queries.gate, dtype=dtype)[:, None, :] * torch.tensor(items.gate, dtype=dtype)
    if pair_gate is not None:
        w1, b1 = torch.tensor(pair_gate.hidden_weight, dtype=dtype), torch.tensor(pair_gate.hidden_bias, dtype=dtype)
        w2, b2 = torch.tensor(pair_gate.out_weight, dtype=dtype), torch.tensor(pair_gate.out_bias, dtype=dtype)
        gate = gate + silu(cosines @ w1.T + b1) @ w2.T + b2
    weights = torch.softmax(silu(gate), dim=-1)
    return (weights * cosines).sum(dim=-1)

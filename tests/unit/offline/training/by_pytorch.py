"""The sampled softmax over mixture-of-logits scores in plain PyTorch: what the fused version must equal.

Letters: N positions, R positions per group, K negatives per group, M items, P_q, P_x components, P = P_q * P_x.
"""

import torch
from torch import Tensor
from torch.nn import functional

from services.offline.training.mol_sampled_softmax import GateWeights, Negatives, States


def mol_sampled_softmax_reference(
    positive: Tensor, queries: States, items: States, gate: GateWeights, negatives: Negatives, *, tau: float
) -> Tensor:
    """Same contract as the fused op, without gate dropout; every pair's activations are kept for autograd."""
    group = torch.arange(len(positive), device=positive.device) // negatives.group_size
    rows = negatives.rows[group]
    cosines = torch.einsum("nqd,nkxd->nkqx", queries.components, items.components[rows]).flatten(-2)
    hidden = functional.silu(functional.linear(cosines, gate.hidden_weight, gate.hidden_bias))
    mlp = functional.linear(hidden, gate.out_weight, gate.out_bias)
    weights = functional.silu(queries.gate.unsqueeze(1) * items.gate[rows] + mlp).softmax(dim=-1)
    logits = (weights * cosines).sum(dim=-1) / tau
    logits = logits.masked_fill(rows == negatives.target_rows.unsqueeze(1), float("-inf"))
    return torch.cat([positive.unsqueeze(1) / tau, logits], dim=1).logsumexp(dim=1) - positive / tau

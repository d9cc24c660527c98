"""A loss over sampled negatives' mixture-of-logits scores.

On a CPU, in float32, a kernel computes loss and gradients without storing anything of size N * K * G (`mol_gradients`).
Elsewhere autograd computes them, with about 2 G + 5 P floats in memory for each of the N K pairs: 5.5 GB for a batch
of preset ml-1m.

Letters: N positions, R positions per group, g groups, K negatives, M items, P_q, P_x components, P = P_q * P_x, d
component width, G gate hidden width.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.offline.training.mol_gradients import INPUTS, SampledSoftmax


class States(NamedTuple):
    """States of queries, components (N, P_q, d) and gate (N, P), or of items, (M, P_x, d) and (M, P). Components are
    l2-normalised or zero.
    """

    components: Tensor
    gate: Tensor


class GateWeights(NamedTuple):
    """W1 (G, P), b1 (G,), W2 (P, G) and b2 (P,) of the pair network W2 SiLU(W1 c + b1) + b2."""

    hidden_weight: Tensor
    hidden_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


class Negatives(NamedTuple):
    """Positions j * R to (j + 1) * R - 1 share the K negatives rows[j], which are row numbers of the item states.

    Shapes: rows (ceil(N / R), K), target_rows (N,): a negative equal to the position's target doesn't count.
    """

    rows: Tensor
    target_rows: Tensor
    group_size: int


def mol_sampled_softmax(
    positive: Tensor,
    queries: States,
    items: States,
    gate: GateWeights,
    negatives: Negatives,
    *,
    tau: float,
    gate_dropout: float = 0.0,
    pair_dropout: float = 0.0,
    correction: float = 0.0,
    backward_negatives: int = 0,
) -> Tensor:
    """Return the sum over positions of -log softmax of the positive's logit, among it and the group's negatives.

    Shapes: positive (N,) similarities of each position with its target; queries (N, P_q, d) and (N, P); items (M, P_x,
    d) and (M, P); returns a scalar. Differentiable in all of them and in the gate's weights. `correction` is added to
    the negatives' logits.
    Dropout: pair weights are dropped with probability `gate_dropout`, cosines that the gate's network reads with
    `pair_dropout`; the rest are rescaled. Both use PyTorch's global generator.
    backward_negatives: about how many negatives of a position get a gradient; 0: all. A gradient v is used with
    probability q = min(1, backward_negatives |v| / sum |v|) and divided by q, so the estimate is unbiased. Only the
    CPU kernel samples gradients.
    Cost: O(N K P (d + G)) time.
    Raises: ValueError if the groups don't cover the positions.
    """
    groups = -(-len(positive) // negatives.group_size)
    if len(negatives.rows) != groups or len(negatives.target_rows) != len(positive):
        raise ValueError(
            f"{len(negatives.rows)} groups and {len(negatives.target_rows)} targets; expected {groups} and "
            f"{len(positive)} for {len(positive)} positions in groups of {negatives.group_size}"
        )
    if positive.device.type == "cpu" and positive.dtype == torch.float32:
        tensors = (positive, *queries, *items, *gate)
        options = (negatives, tau, gate_dropout, pair_dropout, correction, backward_negatives)
        summed: Tensor = _ByKernel.apply(*tensors, *options)
        return summed
    logits = _logits(queries, items, gate, negatives, tau, gate_dropout, pair_dropout)[: len(positive)] + correction
    shared = negatives.rows.repeat_interleave(negatives.group_size, dim=0)[: len(positive)]
    logits = logits.masked_fill(shared == negatives.target_rows.unsqueeze(1), float("-inf"))
    own = positive / tau
    return (torch.cat([own.unsqueeze(1), logits], dim=1).logsumexp(dim=1) - own).sum()


class _ByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        negatives, tau, gate_dropout, pair_dropout, correction, backward_negatives = args[len(INPUTS) :]
        loss, gradients = SampledSoftmax(
            **{name: tensor.contiguous().numpy() for name, tensor in zip(INPUTS, args, strict=False)},
            rows=negatives.rows.contiguous().numpy(),
            targets=negatives.target_rows.contiguous().numpy(),
            uniforms=torch.rand(len(negatives.target_rows)).numpy(),
            group_size=negatives.group_size,
            tau=tau,
            correction=correction,
            backward_negatives=backward_negatives if backward_negatives < negatives.rows.shape[1] else 0,
            gate_dropout=gate_dropout,
            pair_dropout=pair_dropout,
            seed=int(torch.randint(2**62, ())) if gate_dropout or pair_dropout else 0,
            threads=torch.get_num_threads(),
        ).loss_and_gradients()
        ctx.save_for_backward(*(torch.from_numpy(gradients[name]) for name in INPUTS))
        summed: Tensor = args[0].new_tensor(loss)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(gradient * grads[0] for gradient in ctx.saved_tensors), *([None] * 6))


def _logits(
    queries: States,
    items: States,
    gate: GateWeights,
    negatives: Negatives,
    tau: float,
    gate_dropout: float,
    pair_dropout: float,
) -> Tensor:
    """Return logits (g R, K) of the positions, padded to whole groups, with their group's negatives."""
    groups, size = len(negatives.rows), negatives.group_size
    missing = groups * size - len(queries.gate)
    query = functional.pad(queries.components, (0, 0, 0, 0, 0, missing))
    query_gate = functional.pad(queries.gate, (0, 0, 0, missing)).view(groups, size, 1, -1)
    item, item_gate = (each.index_select(0, negatives.rows.flatten()) for each in items)
    cosines = torch.einsum(
        "grqd,gkxd->grkqx", query.view(groups, size, *query.shape[1:]), item.view(groups, -1, *item.shape[1:])
    ).flatten(-2)
    read = functional.dropout(cosines, pair_dropout)
    hidden = functional.silu(functional.linear(read, gate.hidden_weight, gate.hidden_bias))
    network = functional.linear(hidden, gate.out_weight, gate.out_bias)
    weights = functional.silu(query_gate * item_gate.view(groups, 1, -1, query_gate.shape[-1]) + network).softmax(
        dim=-1
    )
    if gate_dropout:
        weights = weights * (torch.rand_like(weights) >= gate_dropout)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-6)
    return (weights * cosines).sum(dim=-1).flatten(0, 1) / tau


def sampled_softmax(positive: Tensor, negatives: Tensor, correction: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log softmax of the positive among itself and the negatives, each plus `correction`, and its
    gradients.

    Shapes: positive (R,), negatives (R, K), overwritten -> (), (R,), (R, K). A negative of minus infinity (the
    position's own target) adds nothing. Source: arXiv:2407.15462, section 2.
    """
    negatives += correction
    total = torch.logaddexp(negatives.logsumexp(1), positive)
    return (total - positive).sum(), (positive - total).exp() - 1, (negatives - total.unsqueeze(1)).exp_()


def log_q_correction(num_items: int, num_negatives: int) -> float:
    """Return the correction with which K uniform negatives estimate the softmax over all X items.

    Each negative represents (X - 1) / K items (Bengio and Senecal, 2008, with a constant proposal distribution).
    """
    return math.log(max(num_items - 1, 1) / num_negatives)

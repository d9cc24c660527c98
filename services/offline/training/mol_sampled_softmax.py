"""A loss over sampled negatives' mixture-of-logits scores, with its gradients, in one pass over groups of positions.

A position's loss needs only its own K + 1 logits, so nothing of size N * K * G is stored. On a CPU, in float32, a
kernel computes it (`mol_gradients`). Elsewhere PyTorch does, over tiles, with component pairs along the slow axis: the
softmax over these is a few long vector operations. Gradients are those of a sum of losses with equal weight.

Letters: N positions, R positions per group, g groups of one tile, K negatives, M items, n = g * R * K pairs, P_q, P_x
components, P = P_q * P_x, d component width, G gate hidden width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.offline.training.mol_gradients import INPUTS, SampledSoftmax

# Groups per pass on a GPU, where launches are slow. One group per pass needs some 6,000 launches for a batch of ML-1M;
# with 32 per pass the host still took 4 times the GPU's time (H200). At R K = 16,384 and G = 128 a tile takes 6 GB.
_GROUPS_PER_GPU_PASS = 128


class States(NamedTuple):
    """States of queries, components (N, P_q, d) and gate (N, P), or of items, (M, P_x, d) and (M, P). Components are
    l2-normalised or zero.
    """

    components: Tensor
    gate: Tensor


class GateWeights(NamedTuple):
    """The pair network W2 SiLU(W1 c + b1) + b2: (G, P), (G,), (P, G), (P,)."""

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
    CPU's kernel does so.
    Cost: O(N K P (d + G)) time; memory one tile, n * G floats a few times over.
    Raises: ValueError if the groups don't cover the positions.
    """
    groups = -(-len(positive) // negatives.group_size)
    if len(negatives.rows) != groups or len(negatives.target_rows) != len(positive):
        raise ValueError(
            f"{len(negatives.rows)} groups and {len(negatives.target_rows)} targets; expected {groups} and "
            f"{len(positive)} for {len(positive)} positions in groups of {negatives.group_size}"
        )
    loss: Tensor = _MolSampledSoftmax.apply(
        positive,
        *queries,
        *items,
        *gate,
        negatives.rows,
        negatives.target_rows,
        negatives.group_size,
        tau,
        gate_dropout,
        pair_dropout,
        correction,
        backward_negatives,
    )
    return loss


class _MolSampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        positive, components, query_gate, item_components, item_gate, w1, b1, w2, b2 = args[:9]
        rows, target_rows, group_size, tau, gate_dropout, pair_dropout, correction, _ = args[9:]
        if positive.device.type == "cpu" and positive.dtype == torch.float32:
            summed, found = _by_kernel(*args)
            ctx.save_for_backward(*found)
            return summed
        gradients = _Gradients.zeros(args[:9])
        network = _PairNetwork.of(w1, b1, w2, b2)
        loss: Tensor = positive.new_zeros(())
        tile: _Tile | None = None
        together = _GROUPS_PER_GPU_PASS if positive.device.type == "cuda" else 1
        for first, groups, num_rows in _tiles(len(positive), group_size, together):
            if tile is None or (tile.num_groups, tile.num_rows) != (groups, num_rows):
                tile = _Tile.empty(network, groups, num_rows, rows.shape[1])
            begin, end = first * group_size, first * group_size + groups * num_rows
            chosen = rows[first : first + groups]
            of_target = target_rows[begin:end].view(groups, num_rows, 1)
            inputs = _TileInputs(
                positive=positive[begin:end],
                query=components[begin:end].transpose(0, 1),
                query_gate=query_gate[begin:end].t().contiguous(),
                item=item_components.index_select(0, chosen.flatten()).transpose(0, 1),
                item_gate=item_gate.index_select(0, chosen.flatten()).t().contiguous(),
                collision=(chosen.unsqueeze(1) == of_target).flatten(0, 1),
            )
            loss += _score_and_differentiate(
                inputs,
                network,
                tile,
                gradients,
                slice(begin, end),
                chosen.flatten(),
                tau=tau,
                gate_dropout=gate_dropout,
                pair_dropout=pair_dropout,
                correction=correction,
            )
        ctx.save_for_backward(*gradients.finish())
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [gradient * grads[0] for gradient in ctx.saved_tensors]
        return (*scaled, *([None] * 8))


def _tiles(num_positions: int, group_size: int, together: int) -> Iterator[tuple[int, int, int]]:
    """Yield first group, groups and positions per group; a smaller last group is its own tile."""
    whole = num_positions // group_size
    for first in range(0, whole, together):
        yield first, min(together, whole - first), group_size
    if rest := num_positions - whole * group_size:
        yield whole, 1, rest


def _by_kernel(*args: Any) -> tuple[Tensor, list[Tensor]]:
    rows, target_rows, group_size, tau, gate_dropout, pair_dropout, correction, backward_negatives = args[9:]
    loss, gradients = SampledSoftmax(
        **{name: tensor.contiguous().numpy() for name, tensor in zip(INPUTS, args, strict=False)},
        rows=rows.contiguous().numpy(),
        targets=target_rows.contiguous().numpy(),
        uniforms=torch.rand(len(target_rows)).numpy(),
        group_size=group_size,
        tau=tau,
        correction=correction,
        backward_negatives=backward_negatives if backward_negatives < rows.shape[1] else 0,
        gate_dropout=gate_dropout,
        pair_dropout=pair_dropout,
        seed=int(torch.randint(2**62, ())) if gate_dropout or pair_dropout else 0,
        threads=torch.get_num_threads(),
    ).loss_and_gradients()
    return args[0].new_tensor(loss), [torch.from_numpy(gradients[name]) for name in INPUTS]


@dataclass(frozen=True, kw_only=True, slots=True)
class _PairNetwork:
    """The gate's network, with biases as a last column, for inputs with a last row of ones."""

    hidden: Tensor  # (G, P + 1)
    out: Tensor  # (P, G + 1)

    @classmethod
    def of(cls, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> "_PairNetwork":
        return cls(hidden=torch.cat([w1, b1.unsqueeze(1)], 1), out=torch.cat([w2, b2.unsqueeze(1)], 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    """Memory of a tile, allocated once."""

    num_groups: int
    num_rows: int
    num_negatives: int
    cosines: Tensor  # (P + 1, n), last row ones
    hidden: Tensor  # (G, n)
    activated: Tensor  # (G + 1, n), last row ones
    gate_input: Tensor  # (P, n)

    @classmethod
    def empty(cls, network: _PairNetwork, num_groups: int, num_rows: int, num_negatives: int) -> "_Tile":
        pairs, hidden, n = len(network.out), len(network.hidden), num_groups * num_rows * num_negatives
        new = network.out.new_ones
        return cls(
            num_groups=num_groups,
            num_rows=num_rows,
            num_negatives=num_negatives,
            cosines=new(pairs + 1, n),
            hidden=new(hidden, n),
            activated=new(hidden + 1, n),
            gate_input=new(pairs, n),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TileInputs:
    """A tile's inputs. Shapes: query (P_q, g R, d), query_gate (P, g R), item (P_x, g K, d), item_gate (P, g K),
    positive (g R,), collision (g R, K).
    """

    positive: Tensor
    query: Tensor
    query_gate: Tensor
    item: Tensor
    item_gate: Tensor
    collision: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients:
    """Gradients summed over tiles, in the inputs' shapes; those of the network's weights include the bias column."""

    positive: Tensor
    components: Tensor
    query_gate: Tensor
    item_components: Tensor
    item_gate: Tensor
    hidden: Tensor
    out: Tensor

    @classmethod
    def zeros(cls, inputs: tuple[Tensor, ...]) -> "_Gradients":
        w1, w2 = inputs[5], inputs[7]
        names = ("positive", "components", "query_gate", "item_components", "item_gate")
        like = {name: torch.zeros_like(tensor) for name, tensor in zip(names, inputs[:5], strict=True)}
        return cls(**like, hidden=w1.new_zeros(len(w1), w1.shape[1] + 1), out=w2.new_zeros(len(w2), w2.shape[1] + 1))

    def finish(self) -> tuple[Tensor, ...]:
        by_input = (self.positive, self.components, self.query_gate, self.item_components, self.item_gate)
        return (*by_input, self.hidden[:, :-1], self.hidden[:, -1], self.out[:, :-1], self.out[:, -1])


def _score_and_differentiate(
    inputs: _TileInputs,
    network: _PairNetwork,
    tile: _Tile,
    gradients: _Gradients,
    positions: slice,
    chosen: Tensor,
    *,
    tau: float,
    gate_dropout: float,
    pair_dropout: float,
    correction: float,
) -> Tensor:
    num_groups, num_rows, num_negatives = tile.num_groups, tile.num_rows, tile.num_negatives
    shape = (-1, num_rows, num_negatives)  # P g matrices
    query_PRd, item_PKd = _pair_up(inputs.query, inputs.item, num_groups)
    query_gate = inputs.query_gate.view(-1, num_rows, 1)
    item_gate = inputs.item_gate.view(-1, 1, num_negatives)
    cosines = tile.cosines[:-1]
    torch.bmm(query_PRd, item_PKd.transpose(1, 2), out=cosines.view(shape))
    read, kept = tile.cosines, None
    if pair_dropout:
        kept = (torch.rand_like(cosines) >= pair_dropout).to(cosines.dtype).div_(1 - pair_dropout)
        read = torch.cat([cosines * kept, tile.cosines[-1:]])
    torch.mm(network.hidden, read, out=tile.hidden)
    torch.ops.aten.silu.out(tile.hidden, out=tile.activated[:-1])
    torch.mm(network.out, tile.activated, out=tile.gate_input)
    tile.gate_input.view(shape).addcmul_(query_gate, item_gate)
    weights = torch.softmax(torch.nn.functional.silu(tile.gate_input), 0)
    if gate_dropout:
        weights *= torch.rand_like(weights) >= gate_dropout
        weights /= weights.sum(0).clamp_(min=1e-6)
    scores = (weights * cosines).sum(0)

    logits = (scores / tau).view(-1, num_negatives).masked_fill_(inputs.collision, float("-inf"))
    loss, d_positive, d_logits = sampled_softmax(inputs.positive / tau, logits, correction)
    d_scores = d_logits.div_(tau).view(-1)
    gradients.positive[positions] = d_positive / tau

    # The weights w are a softmax of y = SiLU(z): d s / d y_p = w_p (c_p - s), d s / d c_p = w_p + the network's path.
    weights *= d_scores
    d_gate = torch.ops.aten.silu_backward(cosines.sub(scores).mul_(weights), tile.gate_input)
    gradients.out.addmm_(d_gate, tile.activated.t())
    d_hidden = torch.mm(network.out[:, :-1].t(), d_gate, out=tile.activated[:-1])
    torch.ops.aten.silu_backward.grad_input(d_hidden, tile.hidden, grad_input=tile.hidden)
    gradients.hidden.addmm_(tile.hidden, read.t())
    w1 = network.hidden[:, :-1].t()
    d_cosines = (weights.addmm_(w1, tile.hidden) if kept is None else weights.add_((w1 @ tile.hidden).mul_(kept))).view(
        shape
    )

    d_gate = d_gate.view(shape)
    num_query, num_item = len(inputs.query), len(inputs.item)
    pairs = num_query * num_item
    gradients.query_gate[positions] = torch.bmm(d_gate, item_gate.transpose(1, 2)).view(pairs, -1).t()
    d_item_gate = torch.bmm(query_gate.transpose(1, 2), d_gate).view(pairs, -1).t()
    gradients.item_gate.index_add_(0, chosen, d_item_gate)
    width = inputs.query.shape[2]
    d_query = torch.bmm(d_cosines, item_PKd).view(num_query, num_item, -1, width).sum(1)
    d_item = torch.bmm(d_cosines.transpose(1, 2), query_PRd).view(num_query, num_item, -1, width).sum(0)
    gradients.components[positions] = d_query.transpose(0, 1)
    gradients.item_components.index_add_(0, chosen, d_item.transpose(0, 1))
    return loss


def _pair_up(query: Tensor, item: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(P_q, g R, d) and (P_x, g K, d) -> (P g, R, d) and (P g, K, d), pair p = p_q * P_x + p_x."""
    num_query, num_item, width = len(query), len(item), query.shape[2]
    queries = query.unsqueeze(1).expand(-1, num_item, -1, -1)
    items = item.unsqueeze(0).expand(num_query, -1, -1, -1)
    batches = num_query * num_item * num_groups
    return queries.reshape(batches, -1, width), items.reshape(batches, -1, width)


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

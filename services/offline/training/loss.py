"""The training loss of one batch: ranking loss, mutual information over the positives, and size of user components.

A group of positions drawn from the whole batch shares negatives, so scoring is matrix products over tiles that stay in
the cache.

Letters: N positions, R positions per group, K negatives, M distinct items in the step, P component pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.offline.training.models.mol import DotHead, MolHead
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.mol_sampled_softmax import (
    GateWeights,
    Negatives,
    States,
    log_q_correction,
    mol_sampled_softmax,
    sampled_softmax,
)
from services.offline.training.presets import TrainConfig

# Positions times negatives of a tile, which is one group unless the configuration divides it. Two EPYC cores took 13.4,
# 11.4 and 10.2 microseconds per position with 4k, 8k and 16k pairs (P = 8, G = 64); larger tiles exceed the cache. The
# groups are part of the objective, so they are the same on a GPU.
_PAIRS_PER_TILE = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Means over positions. `total` is minimised. `ranking` is the loss named by `TrainConfig.loss`."""

    total: Tensor
    ranking: Tensor
    mutual_information: Tensor


def batch_loss(
    model: SequentialModel,
    config: TrainConfig,
    encoded: Tensor,
    users: Tensor | None,
    targets: Tensor,
    generator: torch.Generator,
    buckets: Tensor | None = None,
) -> Loss:
    """Return the loss of encoded (N, D) states in random order, users (N,) or None, targets (N,) dense items.

    `generator` draws items. buckets (N,): bucket of the absence between each state's last event and its target;
    None if the model has no absences.
    """
    query, gate = model.query_states(encoded, users, buckets)
    group_size = max(16, _PAIRS_PER_TILE // (config.num_negatives * config.groups_per_tile))
    groups = -(-len(targets) // group_size)
    if config.loss == "full-softmax":
        assert isinstance(model.head, DotHead)
        every = model.head.item_states(model.item_rows)[0]
        summed = _FullSoftmax.apply(query.squeeze(1), every.squeeze(1), targets, config.head.tau)
        return _plain(summed / len(targets))
    drawn = torch.randint(model.num_items, (groups, config.num_negatives), generator=generator).to(targets.device)
    items, target_rows, negative_rows = _distinct(model.num_items, targets, drawn)
    embedded = model.item_rows if items is None else model.item_embedding(items)
    negatives = Negatives(negative_rows, target_rows, group_size)
    # log Q, where Q is the probability of being drawn, equal for all items.
    correction = log_q_correction(model.num_items, config.num_negatives) if config.loss == "corrected-softmax" else 0.0
    if isinstance(model.head, MolHead):
        assert gate is not None
        return _mixture_loss(model.head, config, States(query, gate), users, embedded, negatives, correction)
    return _dot_loss(model.head, config, query.squeeze(1), embedded, negatives, correction)


def _distinct(num_items: int, targets: Tensor, drawn: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the step's distinct items (None for the whole catalogue), and their rows for targets and negatives."""
    if targets.numel() + drawn.numel() >= num_items:
        return None, targets, drawn
    items, rows = torch.unique(torch.cat([targets, drawn.flatten()]), return_inverse=True)
    return items, rows[: len(targets)], rows[len(targets) :].view_as(drawn)


def _mixture_loss(
    head: MolHead,
    config: TrainConfig,
    queries: States,
    users: Tensor | None,
    embedded: Tensor,
    negatives: Negatives,
    correction: float,
) -> Loss:
    items = States(*head.item_states(embedded))
    target = negatives.target_rows
    positive, weights = head.score_pairs(queries, (items.components[target], items.gate[target]))
    network = head.pair_gate
    gate = GateWeights(network.hidden_weight, network.hidden_bias, network.out_weight, network.out_bias)
    ranking = mol_sampled_softmax(
        positive,
        queries,
        items,
        gate,
        negatives,
        tau=config.head.tau,
        gate_dropout=head.dropouts.gate,
        pair_dropout=head.dropouts.pair,
        correction=correction,
        backward_negatives=config.backward_negatives,
    ) / len(queries.components)
    information = mutual_information(weights)
    total = ranking + config.mutual_information_weight * information
    if head.user is not None and users is not None and config.user_norm_weight:
        total = total + config.user_norm_weight * head.user(torch.unique(users)).square().sum(dim=1).mean()
    return Loss(total=total, ranking=ranking.detach(), mutual_information=information.detach())


def mutual_information(weights: Tensor) -> Tensor:
    """Return -H(p) + H(p | q, x) of pair weights (N, P), equation 3.

    It is low if the batch uses all pairs equally and each row uses few pairs.
    """
    mean = weights.mean(dim=0)
    return torch.xlogy(mean, mean).sum() - torch.xlogy(weights, weights.clamp(min=1e-9)).sum(dim=1).mean()


def _dot_loss(
    head: DotHead,
    config: TrainConfig,
    query: Tensor,
    embedded: Tensor,
    negatives: Negatives,
    correction: float,
) -> Loss:
    items = head.item_states(embedded)[0].squeeze(1)
    positive = (query * items[negatives.target_rows]).sum(dim=1)
    count, size = len(query), negatives.group_size
    missing = len(negatives.rows) * size - count
    grouped = functional.pad(query, (0, 0, 0, missing)).view(-1, size, query.shape[1])
    logits = (grouped @ items[negatives.rows].transpose(1, 2) / config.head.tau).flatten(0, 1)[:count]
    rows = negatives.rows.repeat_interleave(size, dim=0)[:count]
    logits = logits.masked_fill(rows == negatives.target_rows.unsqueeze(1), float("-inf"))
    return _plain(_SampledSoftmax.apply(positive / config.head.tau, logits, correction) / count)


def _plain(ranking: Tensor) -> Loss:
    return Loss(total=ranking, ranking=ranking.detach(), mutual_information=ranking.new_zeros(()))


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, positive: Tensor, negatives: Tensor, correction: float) -> Tensor:
        loss, *gradients = sampled_softmax(positive, negatives.clone(), correction)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(gradient * grads[0] for gradient in ctx.saved_tensors), None)


class _FullSoftmax(torch.autograd.Function):
    """The sum of -log softmax of each target over all X items; one pass over tiles computes loss and gradients.

    Memory: one tile. A tile of 2^20 logits is the fastest on one Xeon core at X = 12,101, D = 50, with 135 microseconds
    per position; 2^22 logits exceed the cache and take 173.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, items: Tensor, targets: Tensor, tau: float) -> Tensor:
        loss = query.new_zeros(())
        d_query, d_items = torch.empty_like(query), torch.zeros_like(items)
        scaled = items.t().contiguous() / tau
        size = max(16, (1 << 20) // len(items))
        for begin in range(0, len(query), size):
            part, target = query[begin : begin + size], targets[begin : begin + size].unsqueeze(1)
            logits = part @ scaled
            highest = logits.amax(1, keepdim=True)
            positive = logits.gather(1, target)
            weights = logits.sub_(highest).exp_()
            total = weights.sum(1, keepdim=True)
            loss += (total.log() + highest - positive).sum()
            weights.div_(total).scatter_add_(1, target, weights.new_full(target.shape, -1.0))
            d_query[begin : begin + size] = weights @ items / tau
            d_items.addmm_(weights.t(), part, alpha=1 / tau)
        ctx.save_for_backward(d_query, d_items)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(gradient * grads[0] for gradient in ctx.saved_tensors), None, None)

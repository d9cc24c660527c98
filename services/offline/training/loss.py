"""The training loss of one batch: sampled softmax, mutual information over the positives, size of user components.

Item states are computed once per distinct item of a step, never per occurrence, and negatives are shared by a group
of positions drawn from the whole batch, so that scoring them is matrix products over tiles that stay in the cache.

Letters: N positions, R positions per group, K negatives, M distinct items in the step, P component pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.algorithms.models.mol import DotHead, MolHead
from services.algorithms.models.sequential import SequentialModel
from services.algorithms.ops.mol_sampled_softmax import GateWeights, Negatives, States, mol_sampled_softmax
from services.offline.training.presets import TrainConfig

# Pairs (position, negative) per tile. Measured on two EPYC cores, P = 8, G = 64: 8k pairs 11.4, 16k 10.2, 4k 13.4
# microseconds per position; larger tiles leave the cache.
_PAIRS_PER_TILE = 16384
_PAIRS_PER_TILE_ON_GPU = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """`total` is what is minimised; the parts are for the report. All are means over positions."""

    total: Tensor
    sampled_softmax: Tensor
    mutual_information: Tensor


def batch_loss(
    model: SequentialModel,
    config: TrainConfig,
    encoded: Tensor,
    users: Tensor | None,
    targets: Tensor,
    generator: torch.Generator,
) -> Loss:
    """encoded (N, D) states in random order, users (N,) or None, targets (N,) dense items. `generator` draws items."""
    per_tile = _PAIRS_PER_TILE if encoded.device.type == "cpu" else _PAIRS_PER_TILE_ON_GPU
    group_size = max(16, per_tile // config.num_negatives)
    groups = -(-len(targets) // group_size)
    drawn = torch.randint(model.num_items, (groups, config.num_negatives), generator=generator).to(targets.device)
    items, target_rows, negative_rows = _distinct(model.num_items, targets, drawn)
    embedded = model.item_rows if items is None else model.item_embedding(items)
    negatives = Negatives(negative_rows, target_rows, group_size)
    if isinstance(model.head, MolHead):
        return _mixture_loss(model.head, config, encoded, users, embedded, negatives)
    return _dot_loss(model.head, config, encoded, embedded, negatives)


def _distinct(num_items: int, targets: Tensor, drawn: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """The step's distinct items, None for the whole catalogue, and the rows of targets and negatives among them."""
    if targets.numel() + drawn.numel() >= num_items:
        return None, targets, drawn
    items, rows = torch.unique(torch.cat([targets, drawn.flatten()]), return_inverse=True)
    return items, rows[: len(targets)], rows[len(targets) :].view_as(drawn)


def _mixture_loss(
    head: MolHead, config: TrainConfig, encoded: Tensor, users: Tensor | None, embedded: Tensor, negatives: Negatives
) -> Loss:
    queries = States(*head.query_states(encoded, users))
    items = States(*head.item_states(embedded))
    target = negatives.target_rows
    positive, weights = head.score_pairs(queries, (items.components[target], items.gate[target]))
    network = head.pair_gate
    gate = GateWeights(network.hidden_weight, network.hidden_bias, network.out_weight, network.out_bias)
    softmax = mol_sampled_softmax(
        positive, queries, items, gate, negatives, tau=config.head.tau, gate_dropout=head.gate_dropout
    ) / len(encoded)
    information = mutual_information(weights)
    total = softmax + config.mutual_information_weight * information
    if head.user is not None and users is not None and config.user_norm_weight:
        total = total + config.user_norm_weight * head.user(torch.unique(users)).square().sum(dim=1).mean()
    return Loss(total=total, sampled_softmax=softmax.detach(), mutual_information=information.detach())


def mutual_information(weights: Tensor) -> Tensor:
    """-H(p) + H(p | q, x) of pair weights (N, P): equation 3, low when pairs share the load and each row is decided."""
    mean = weights.mean(dim=0)
    return torch.xlogy(mean, mean).sum() - torch.xlogy(weights, weights.clamp(min=1e-9)).sum(dim=1).mean()


def _dot_loss(head: DotHead, config: TrainConfig, encoded: Tensor, embedded: Tensor, negatives: Negatives) -> Loss:
    query = head.query_states(encoded)[0].squeeze(1)
    items = head.item_states(embedded)[0].squeeze(1)
    positive = (query * items[negatives.target_rows]).sum(dim=1)
    count, size = len(query), negatives.group_size
    missing = len(negatives.rows) * size - count
    grouped = functional.pad(query, (0, 0, 0, missing)).view(-1, size, query.shape[1])
    logits = (grouped @ items[negatives.rows].transpose(1, 2) / config.head.tau).flatten(0, 1)[:count]
    rows = negatives.rows.repeat_interleave(size, dim=0)[:count]
    logits = logits.masked_fill(rows == negatives.target_rows.unsqueeze(1), float("-inf"))
    positive = positive.unsqueeze(1) / config.head.tau
    softmax = (torch.cat([positive, logits], dim=1).logsumexp(dim=1, keepdim=True) - positive).mean()
    return Loss(total=softmax, sampled_softmax=softmax.detach(), mutual_information=softmax.new_zeros(()))

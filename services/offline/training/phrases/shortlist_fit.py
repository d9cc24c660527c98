"""The shortlist's vectors c_1 .. c_m and token sets W_1 .. W_m, fitted to a trained model (arXiv:2406.06739, 4.2).

e_i = argmax_j <x_0(q_i), c_j>; minimise -sum_i sum_t log P_c(e_i)(d_i^t) with P_c = softmax(c^T w) over the whole
vocabulary; W_j is the r most probable tokens of P_c_j. For fixed e_i the sum needs only each question's summed output
rows of its tokens, so a step costs m V D; e_i and c_j are improved in turns. Vectors start at the means of x_0's
clusters. A vector that no question chooses moves to the x_0 of a question that gains most. Lengths are not bounded, so
a turn can make the result worse; the turn whose sets contain the most of the questions' tokens is used.

Letters: N questions, m vectors, r tokens of a set, V vocabulary, D width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.offline.training.codebooks.k_means import product_k_means
from services.offline.training.phrases.losses import log_partition

_STEPS_OF_A_TURN = 5
_RATE = 0.02
_MEASURED = 1000  # so many questions compare turns
_MOST_CLUSTERED = 1024  # seeding costs m^2 D, so further vectors start at drawn x_0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortlistSize:
    """Sizes m, r and k of the paper (4096, 20,000 and 5 at 5 million tokens)."""

    vectors: int
    tokens: int
    joined: int = 5

    def __post_init__(self) -> None:
        for name in ("vectors", "tokens", "joined"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: 1 or more")

    @classmethod
    def of(cls, questions: int, vocabulary: int) -> "ShortlistSize":
        """Return sizes: a vector per 32 questions (8 to 4096), sets of a twentieth of V (512 to 20,000)."""
        vectors = min(4096, max(8, 2 ** round(math.log2(max(1, questions) / 32))))
        return cls(vectors=vectors, tokens=min(vocabulary, 20_000, max(512, vocabulary // 20)))


def fit_shortlist(
    x0: Tensor,
    targets: Sequence[Sequence[int]],
    weights: Tensor,
    size: ShortlistSize,
    *,
    turns: int = 4,
    half: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return centers (m, D) float32 and sets (m, r) int32, most probable first, from x0 (N, D) and N lists of real
    tokens.

    m is at most N, r at most V. Raises: ValueError if the lengths differ or there is no question.
    """
    if not len(x0) or len(x0) != len(targets):
        raise ValueError(f"x0 has {len(x0)} rows, targets {len(targets)}; allowed: equally many, at least 1")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    m, r = min(size.vectors, len(x0)), min(size.tokens, len(weights))
    counts = torch.tensor([float(len(tokens)) for tokens in targets], device=x0.device)
    sums = _summed_rows(targets, weights)
    centers = _first_centers(x0, m, generator).requires_grad_()
    sample = torch.randperm(len(x0), generator=generator)[:_MEASURED]
    measured = x0[sample.to(x0.device)], [targets[row] for row in sample.tolist()]
    best, best_state = -1.0, (centers.detach(), torch.empty(0))
    optimizer = torch.optim.Adam([centers], lr=_RATE)
    for turn in range(turns + 1):
        sets = _sets(centers, weights, r)
        share = covered(*measured, centers.detach(), sets, size.joined)
        if share > best:
            best, best_state = share, (centers.detach().clone(), sets)
        if turn == turns:
            break
        with torch.no_grad():
            _reseed(centers, _chosen(x0, centers), x0, sums, counts)
        chosen = _chosen(x0, centers)
        near = torch.zeros_like(centers).index_add_(0, chosen, sums)
        tokens = torch.zeros(m, device=x0.device).index_add_(0, chosen, counts).clamp_(min=1.0)
        for _ in range(_STEPS_OF_A_TURN):
            optimizer.zero_grad()
            # The mean over the cluster's own tokens lets a rare cluster move as far as a frequent one.
            loss = (log_partition(centers, weights, half=half) - (centers * near).sum(dim=1) / tokens).sum()
            torch.autograd.backward(loss)
            optimizer.step()
    return best_state[0].float(), best_state[1].to(torch.int32)


def covered(x0: Tensor, targets: Sequence[Sequence[int]], centers: Tensor, sets: Tensor, joined: int) -> float:
    """Return the share of the questions' tokens in the union of their `joined` nearest vectors' sets."""
    nearest = (x0 @ centers.T).topk(min(joined, len(centers)), dim=1).indices.cpu().numpy()
    members = [set(row) for row in sets.cpu().numpy().tolist()]
    found = total = 0
    for row, tokens in enumerate(targets):
        for token in tokens:
            found += any(token in members[vector] for vector in nearest[row])
            total += 1
    return found / max(1, total)


def _first_centers(x0: Tensor, m: int, generator: torch.Generator) -> Tensor:
    if m > _MOST_CLUSTERED or m == len(x0):
        return x0[torch.randperm(len(x0), generator=generator)[:m].to(x0.device)].clone()
    return product_k_means(x0.cpu().float(), 1, m, generator)[0].to(x0.device)


@torch.no_grad()
def _sets(centers: Tensor, weights: Tensor, r: int) -> Tensor:
    return torch.cat([(part @ weights.T).topk(r, dim=1).indices for part in torch.split(centers, 64)])


def _chosen(x0: Tensor, centers: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([(part @ centers.T).argmax(dim=1) for part in torch.split(x0, 4096)])


def _reseed(centers: Tensor, chosen: Tensor, x0: Tensor, sums: Tensor, counts: Tensor) -> None:
    """Move unchosen vectors to the x_0 of the questions that gain most by it."""
    empty = torch.nonzero(torch.bincount(chosen, minlength=len(centers)) == 0).flatten()
    if len(empty):
        gain = ((x0 - centers[chosen]) * sums).sum(dim=1) / counts.clamp(min=1.0)
        centers[empty] = x0[gain.topk(min(len(empty), len(x0))).indices]


def _summed_rows(targets: Sequence[Sequence[int]], weights: Tensor) -> Tensor:
    lengths = torch.tensor([len(tokens) for tokens in targets])
    rows = torch.repeat_interleave(torch.arange(len(targets)), lengths).to(weights.device)
    tokens = torch.from_numpy(np.concatenate([np.asarray(row, dtype=np.int64) for row in targets])).to(weights.device)
    sums = torch.zeros(len(targets), weights.shape[1], device=weights.device)
    return sums.index_add_(0, rows, weights[tokens])

"""HSTU: a causal sequence encoder with pointwise SiLU attention, gated by u (arXiv:2402.17152, as the design has it).

Attention weights are SiLU(q k^T + position bias + time bias) / L with L the *constant* maximum history, not a softmax:
intensity counts, and a state never depends on events after it. Where we differ from the authors' code: the time of
position i is its own event's time (serving does not know the next one), and there are no absolute positions, so that
a state depends on the events of its window alone and appending is exact: `step` encodes new events from the keys and
values of those before them, and is the same computation.

Letters: B batch, L history length, C places for past events, S new events, T = C + S, D model width, H heads,
d_qk and d_v widths per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.algorithms.manifest import EncoderShape

# Width of a time bucket in log-seconds, as in the authors' code: 64 buckets reach 5.5 years.
_LOG_SECONDS_PER_BUCKET = 0.301


def time_buckets(event_time: Tensor, num_buckets: int) -> Tensor:
    """Bucket of |t_i - t_j| for every pair: event_time (B, L) int64 seconds -> (B, L, L) int64 in [0, num_buckets).

    Logarithms in float64: a bucket's edge is then never close enough to an integer number of seconds for two
    libraries to disagree about it (PyTorch and ONNX Runtime differ by one in the last place in float32).
    """
    return _buckets_between(event_time, event_time, num_buckets)


def _buckets_between(one: Tensor, other: Tensor, num_buckets: int) -> Tensor:
    """Seconds (B, S) and (B, T) -> buckets (B, S, T)."""
    elapsed = (one.unsqueeze(2) - other.unsqueeze(1)).abs().clamp(min=1)
    buckets = (elapsed.to(torch.float64).log() / _LOG_SECONDS_PER_BUCKET).to(torch.int64)
    return buckets.clamp(max=num_buckets - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What is kept of the events before the new ones. Places from `length` on are ignored, whatever they hold.

    Shapes: time (B, C) int64 seconds, length (B,), per block keys (B, H, d_qk, C) and values (B, H, C, d_v).
    """

    time: Tensor
    length: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class HstuBlock(nn.Module):
    """One layer: normalise, project to u, v, q, k, attend, gate, project back, add. (B, L, D) -> (B, L, D)."""

    def __init__(self, shape: EncoderShape, *, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.d_qk, self.d_v = shape.num_heads, shape.d_qk, shape.d_v
        self.max_history, self.dropout = shape.max_history, dropout
        self.split = [shape.num_heads * shape.d_v] * 2 + [shape.num_heads * shape.d_qk] * 2
        self.uvqk = nn.Parameter(torch.empty(shape.width, sum(self.split)).normal_(std=0.02))
        self.output = nn.Linear(shape.num_heads * shape.d_v, shape.width)
        nn.init.xavier_uniform_(self.output.weight)
        self.position_bias = nn.Parameter(torch.empty(shape.max_history).normal_(std=0.02))
        self.time_bias = nn.Parameter(torch.empty(shape.num_time_buckets).normal_(std=0.02))

    def forward(self, x: Tensor, distance: Tensor, buckets: Tensor, causal: Tensor) -> Tensor:
        """Shapes: x (B, L, D), distance (L, L) = max(i - j, 0), buckets (B, L, L), causal (L, L) = (j <= i) / L."""
        u, q, k, v = self._project(x)
        return self._finish(x, u, self._attend(q, k, v, distance, buckets, causal))

    def step(
        self, x: Tensor, past: tuple[Tensor, Tensor], distance: Tensor, buckets: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New events alone: x (B, S, D), past keys and values, distance and buckets (B, S, T), visible (B, S, T) as
        `causal` -> x (B, S, D), their keys (B, H, d_qk, S) and values (B, H, S, d_v)."""
        u, q, k, v = self._project(x)
        keys, values = torch.cat([past[0], k], dim=-1), torch.cat([past[1], v], dim=-2)
        return self._finish(x, u, self._attend(q, keys, values, distance, buckets, visible.unsqueeze(1))), k, v

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (B, L, D) -> u (B, L, H d_v), q (B, H, L, d_qk), k (B, H, d_qk, L), v (B, H, L, d_v)."""
        batch, length, width = x.shape
        projected = functional.silu(functional.layer_norm(x, (width,)) @ self.uvqk)
        u, v, q, k = torch.split(projected, self.split, dim=-1)
        q = q.view(batch, length, self.num_heads, self.d_qk).transpose(1, 2)
        k = k.view(batch, length, self.num_heads, self.d_qk).permute(0, 2, 3, 1)
        v = v.view(batch, length, self.num_heads, self.d_v).transpose(1, 2)
        return u, q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, buckets: Tensor, visible: Tensor) -> Tensor:
        bias = _lookup(self.time_bias, buckets) + self.position_bias[distance]
        weights = functional.silu(q @ k + bias.unsqueeze(1)) * visible
        return weights @ v

    def _finish(self, x: Tensor, u: Tensor, attended: Tensor) -> Tensor:
        attended = attended.transpose(1, 2).flatten(2)
        gated = functional.layer_norm(attended, (attended.shape[-1],)) * u
        gated = functional.dropout(gated, self.dropout, self.training)
        out: Tensor = x + self.output(gated)
        return out


class HstuEncoder(nn.Module):
    """A stack of blocks over embedded items. States at padding positions are meaningless, and touch no other."""

    def __init__(self, shape: EncoderShape, *, dropout: float = 0.0) -> None:
        super().__init__()
        if shape.num_time_buckets < 1:
            raise ValueError(f"num_time_buckets={shape.num_time_buckets}; allowed: 1 or more for HSTU")
        self.num_time_buckets, self.max_history, self.dropout = shape.num_time_buckets, shape.max_history, dropout
        self.input_scale = shape.width**0.5
        self.blocks = nn.ModuleList(HstuBlock(shape, dropout=dropout) for _ in range(shape.num_blocks))

    def forward(self, embedded: Tensor, event_time: Tensor) -> Tensor:
        """Shapes: embedded (B, L, D) with zero rows for padding, event_time (B, L) int64 seconds -> (B, L, D).

        The result has unit root mean square per state: the heads read directions, not lengths.
        """
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        # Clamped at both ends: rows padded beyond L still look up something, and are never read.
        distance = (positions.unsqueeze(1) - positions.unsqueeze(0)).clamp(min=0, max=self.max_history - 1)
        causal = (positions.unsqueeze(0) <= positions.unsqueeze(1)).to(embedded.dtype) / self.max_history
        buckets = time_buckets(event_time, self.num_time_buckets)
        x = functional.dropout(embedded * self.input_scale, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, distance, buckets, causal)
        return self._scaled(x)

    def step(self, embedded: Tensor, event_time: Tensor, past: Past) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Only the new events: embedded (B, S, D), event_time (B, S) -> states (B, S, D) as `forward` has them in
        these places, and per block the new keys and values, to be put behind the past's."""
        places = torch.arange(past.time.shape[1], device=embedded.device)
        new = past.length.unsqueeze(1) + torch.arange(embedded.shape[1], device=embedded.device)
        # A place that holds nothing counts as one in the future, which nobody sees.
        never = torch.full_like(places, 2 * self.max_history)
        before = torch.where(places < past.length.unsqueeze(1), places, never)
        order = torch.cat([before, new], dim=1)
        distance = (new.unsqueeze(2) - order.unsqueeze(1)).clamp(min=0, max=self.max_history - 1)
        visible = (order.unsqueeze(1) <= new.unsqueeze(2)).to(embedded.dtype) / self.max_history
        times = torch.cat([past.time, event_time], dim=1)
        buckets = _buckets_between(event_time, times, self.num_time_buckets)
        x = embedded * self.input_scale
        keys, values = [], []
        blocks: list[HstuBlock] = list(self.blocks)  # type: ignore[arg-type]
        for block, before_keys, before_values in zip(blocks, past.keys, past.values, strict=True):
            x, k, v = block.step(x, (before_keys, before_values), distance, buckets, visible)
            keys.append(k)
            values.append(v)
        return self._scaled(x), keys, values

    def _scaled(self, x: Tensor) -> Tensor:
        unit: Tensor = functional.normalize(x, dim=-1, eps=1e-6)
        scaled: Tensor = unit * self.input_scale
        return scaled


def _lookup(table: Tensor, buckets: Tensor) -> Tensor:
    """table[buckets], with a backward pass that counts instead of scattering (10x on a CPU)."""
    if torch.is_grad_enabled() and table.requires_grad:
        looked_up: Tensor = _CountedLookup.apply(table, buckets)
        return looked_up
    return table[buckets]


class _CountedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, buckets: Tensor) -> Tensor:
        ctx.save_for_backward(buckets)
        ctx.num_buckets = len(table)
        return table[buckets]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (buckets,) = ctx.saved_tensors
        counted = torch.bincount(buckets.flatten(), grads[0].flatten(), minlength=ctx.num_buckets)
        return counted.to(grads[0].dtype), None

"""HSTU: a causal sequence encoder with pointwise SiLU attention, gated by u (arXiv:2402.17152).

Attention weights are SiLU(q k^T + position bias + time bias) / `max_history`, a constant, without a softmax,
so the number of matching events affects the state. Unlike in the authors' code, position i has the time of its own
event, because serving does not know the next one. There are no absolute positions, so appending is exact. `step`
encodes new events from the keys and values of earlier ones.

Letters: B batch, L history length, C cached events, S new events, T = C + S, D model width, H heads, N blocks, d_qk and
d_v widths per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.algorithms.bundles.model_manifest import EncoderShape

# Width of a time bucket in log-seconds, as in the authors' code: 64 buckets reach 5.5 years.
_LOG_SECONDS_PER_BUCKET = 0.301


def time_buckets(event_time: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket of |t_i - t_j| for every pair: event_time (B, L) int64 seconds -> (B, L, L) int64 in [0,
    num_buckets).

    Logarithms are in float64: in float32 PyTorch and ONNX Runtime differ in the last digit, which can change a bucket.
    """
    return elapsed_buckets(event_time.unsqueeze(2) - event_time.unsqueeze(1), num_buckets)


def elapsed_buckets(elapsed: Tensor, num_buckets: int) -> Tensor:
    """Return the buckets of `time_buckets` for time differences (...)."""
    elapsed = elapsed.abs().clamp(min=1)
    buckets = (elapsed.to(torch.float64).log() / _LOG_SECONDS_PER_BUCKET).to(torch.int64)
    return buckets.clamp(max=num_buckets - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """One history's cached events: times, places, keys and values.

    Shapes: time (C,) int64 seconds, place (C,) int64 in the window, each block's keys (H, C, d_qk), values (H, C, d_v).
    A new event attends only to itself and to earlier places. Empty slots have a place after every event's.
    """

    time: Tensor
    place: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class HstuBlock(nn.Module):
    """One layer. (B, L, D) -> (B, L, D)."""

    def __init__(self, shape: EncoderShape, *, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.d_qk, self.d_v = shape.num_heads, shape.d_qk, shape.d_v
        self.max_history, self.dropout, self.norm_epsilon = shape.max_history, dropout, shape.norm_epsilon
        self.split = [shape.num_heads * shape.d_v] * 2 + [shape.num_heads * shape.d_qk] * 2
        self.uvqk = nn.Parameter(torch.empty(shape.width, sum(self.split)).normal_(std=0.02))
        self.output = nn.Linear(shape.num_heads * shape.d_v, shape.width)
        nn.init.xavier_uniform_(self.output.weight)
        self.position_bias = nn.Parameter(torch.empty(shape.max_history).normal_(std=0.02))
        self.time_bias = nn.Parameter(torch.empty(shape.num_time_buckets).normal_(std=0.02))

    def forward(self, x: Tensor, distance: Tensor, buckets: Tensor, causal: Tensor) -> Tensor:
        """Encode x (B, L, D) -> (B, L, D).

        Shapes: distance (L, L) = max(i - j, 0), buckets (B, L, L), causal (L, L) = (j <= i) / max_history.
        """
        batch, length, width = x.shape
        projected = functional.silu(functional.layer_norm(x, (width,), eps=self.norm_epsilon) @ self.uvqk)
        u, v, q, k = torch.split(projected, self.split, dim=-1)
        q = q.view(batch, length, self.num_heads, self.d_qk).transpose(1, 2)
        k = k.view(batch, length, self.num_heads, self.d_qk).permute(0, 2, 3, 1)
        v = v.view(batch, length, self.num_heads, self.d_v).transpose(1, 2)
        # On a CPU plain indexing suffices: all histories share one (L, L) matrix.
        positions = _lookup(self.position_bias, distance) if x.is_cuda else self.position_bias[distance]
        bias = _lookup(self.time_bias, buckets) + positions
        weights = functional.silu(q @ k + bias.unsqueeze(1)) * causal
        return self._finish(x, u, (weights @ v).transpose(1, 2).flatten(2))

    def step(
        self, x: Tensor, past: tuple[Tensor, Tensor], bias: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode new events alone: x (S, D), past keys (H, C, d_qk) and values (H, C, d_v), bias and visible (1, S, T)
        -> x (S, D), their keys (H, S, d_qk) and values (H, S, d_v).

        With one new event the overhead per operation dominates, so the code uses few operations: 240 in the exported
        graph, instead of 310 when written like `forward`.
        """
        of_u, of_v, of_q, of_k = torch.split(self.uvqk, self.split, dim=1)
        normed = functional.layer_norm(x, (x.shape[-1],), eps=self.norm_epsilon)
        u = functional.silu(normed @ of_u)
        if self.d_qk == self.d_v:
            of_qkv = torch.cat([self._by_head(weight) for weight in (of_q, of_k, of_v)])
            q, k, v = torch.split(functional.silu(normed @ of_qkv), self.num_heads)
        else:
            q, k, v = (functional.silu(normed @ self._by_head(weight)) for weight in (of_q, of_k, of_v))
        keys, values = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        weights = functional.silu(q @ keys.transpose(1, 2) + bias) * visible
        attended = (weights @ values).transpose(0, 1).flatten(1)
        return self._finish(x, u, attended), k, v

    def _by_head(self, weight: Tensor) -> Tensor:
        """(D, H d) -> (H, D, d)."""
        return weight.reshape(len(weight), self.num_heads, -1).transpose(0, 1)

    def _finish(self, x: Tensor, u: Tensor, attended: Tensor) -> Tensor:
        gated = functional.layer_norm(attended, (attended.shape[-1],), eps=self.norm_epsilon) * u
        gated = functional.dropout(gated, self.dropout, self.training)
        out: Tensor = x + self.output(gated)
        return out


class HstuEncoder(nn.Module):
    """A stack of blocks over embedded items. States at padding positions are meaningless, and affect no other."""

    def __init__(self, shape: EncoderShape, *, dropout: float = 0.0) -> None:
        super().__init__()
        if shape.num_time_buckets < 1:
            raise ValueError(f"num_time_buckets={shape.num_time_buckets}; allowed: 1 or more for HSTU")
        self.num_time_buckets, self.max_history, self.dropout = shape.num_time_buckets, shape.max_history, dropout
        self.input_scale, self.output_norm = shape.width**0.5, shape.output_norm
        self.blocks = nn.ModuleList(HstuBlock(shape, dropout=dropout) for _ in range(shape.num_blocks))

    def forward(self, embedded: Tensor, event_time: Tensor) -> Tensor:
        """Encode embedded (B, L, D), with zero rows for padding, and event_time (B, L) int64 seconds -> (B, L, D).

        States have unit root mean square: the scoring heads use only their direction.
        """
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        # Distances are clamped at both ends, so that padding beyond `max_history` has a valid index.
        distance = (positions.unsqueeze(1) - positions.unsqueeze(0)).clamp(min=0, max=self.max_history - 1)
        causal = (positions.unsqueeze(0) <= positions.unsqueeze(1)).to(embedded.dtype) / self.max_history
        buckets = self.buckets(event_time)
        x = functional.dropout(embedded * self.input_scale, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, distance, buckets, causal)
        return self._scaled(x)

    def buckets(self, event_time: Tensor) -> Tensor:
        """Return buckets (B, L, L) of the times between positions (B, L)."""
        return time_buckets(event_time, self.num_time_buckets)

    def step(self, embedded: Tensor, event_time: Tensor, place: Tensor, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        """Encode the new events' embedded (S, D), event_time and place (S,) -> states (S, D), equal to those of
        `forward`, and all blocks' new keys (N H, S, d_qk) and values (N H, S, d_v), to be appended to the past's.
        """
        before = place.unsqueeze(1) - torch.cat([past.place, place])
        visible = (before >= 0).to(embedded.dtype) / self.max_history
        elapsed = event_time.unsqueeze(1) - torch.cat([past.time, event_time])
        blocks: list[HstuBlock] = list(self.blocks)  # type: ignore[arg-type]
        # One lookup for all blocks: (N, S, T).
        time_bias, position_bias = (
            torch.stack([getattr(block, name) for block in blocks]) for name in ("time_bias", "position_bias")
        )
        bias = time_bias[:, elapsed_buckets(elapsed, self.num_time_buckets)]
        bias = bias + position_bias[:, before.clamp(min=0, max=self.max_history - 1)]
        per_block = torch.split(bias, 1)
        x = embedded * self.input_scale
        keys, values = [], []
        for number, block in enumerate(blocks):
            x, k, v = block.step(x, (past.keys[number], past.values[number]), per_block[number], visible.unsqueeze(0))
            keys.append(k)
            values.append(v)
        return self._scaled(x), torch.cat(keys), torch.cat(values)

    def _scaled(self, x: Tensor) -> Tensor:
        return normalized_states(x, self.output_norm)


def normalized_states(x: Tensor, output_norm: str) -> Tensor:
    """Scale x (..., D) to unit RMS. output_norm: "length" only scales, "layer" first subtracts the mean."""
    if output_norm == "layer":
        return functional.layer_norm(x, (x.shape[-1],), eps=1e-6)
    return unit_rows(x) * x.shape[-1] ** 0.5  # type: ignore[no-any-return]


def unit_rows(x: Tensor) -> Tensor:
    """Divide x (..., d) by its rows' lengths, at least 1e-6.

    The closed-form backward pass is 3 times as fast as that of `functional.normalize`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        unit: Tensor = _UnitRows.apply(x)
        return unit
    return functional.normalize(x, dim=-1, eps=1e-6)


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-6)
        unit: Tensor = x / length
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Also used for rows shorter than 1e-6, whose exact gradient is grads[0] / 1e-6: the difference is negligible.
        unit, length = ctx.saved_tensors
        along = (unit * grads[0]).sum(-1, keepdim=True)
        return torch.addcmul(grads[0], unit, along, value=-1).div_(length)


def _lookup(table: Tensor, buckets: Tensor) -> Tensor:
    """table[buckets]; the backward pass sums with `bincount` on a CPU (10 times as fast) and scatters by row on a GPU.

    PyTorch's backward pass took half of an ML-1M step (H200), because it added 200 x 200 gradients one by one.
    """
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
        if grads[0].is_cuda:
            rows, of_rows = buckets.flatten(0, -2), grads[0].flatten(0, -2)
            by_row = of_rows.new_zeros(len(rows), ctx.num_buckets).scatter_add_(1, rows, of_rows)
            return by_row.sum(0), None
        counted = torch.bincount(buckets.flatten(), grads[0].flatten(), minlength=ctx.num_buckets)
        return counted.to(grads[0].dtype), None

"""SASRec: a causal Transformer over the items of a history (arXiv:1808.09781), the baseline encoder.

Absolute positions and softmax attention; event times are accepted and not used, so that both encoders have one
signature. Absolute positions count from the start of the window.

Letters: B batch, L history length, D model width, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.algorithms.manifest import EncoderShape


class SasRecBlock(nn.Module):
    """Pre-normalised causal self-attention and a pointwise feed-forward layer. (B, L, D) -> (B, L, D)."""

    def __init__(self, shape: EncoderShape, *, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.d_qk, self.d_v, self.dropout = shape.num_heads, shape.d_qk, shape.d_v, dropout
        self.split = [shape.num_heads * shape.d_qk] * 2 + [shape.num_heads * shape.d_v]
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, sum(self.split))
        self.output = nn.Linear(shape.num_heads * shape.d_v, shape.width)
        self.inner = nn.Linear(shape.width, shape.width)
        self.outer = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """Shapes: x (B, L, D), future (L, L) = true where j > i."""
        batch, length, _ = x.shape
        q, k, v = torch.split(self.qkv(self.attention_norm(x)), self.split, dim=-1)
        q = q.view(batch, length, self.num_heads, self.d_qk).transpose(1, 2)
        k = k.view(batch, length, self.num_heads, self.d_qk).permute(0, 2, 3, 1)
        v = v.view(batch, length, self.num_heads, self.d_v).transpose(1, 2)
        weights = (q @ k * self.d_qk**-0.5).masked_fill(future, float("-inf")).softmax(dim=-1)
        weights = functional.dropout(weights, self.dropout, self.training)
        attended = (weights @ v).transpose(1, 2).reshape(batch, length, self.num_heads * self.d_v)
        x = x + functional.dropout(self.output(attended), self.dropout, self.training)
        hidden = functional.dropout(functional.relu(self.inner(self.feed_forward_norm(x))), self.dropout, self.training)
        return x + functional.dropout(self.outer(hidden), self.dropout, self.training)


class SasRecEncoder(nn.Module):
    """A stack of blocks over embedded items plus learned positions."""

    def __init__(self, shape: EncoderShape, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.input_scale = dropout, shape.width**0.5
        self.positions = nn.Parameter(torch.empty(shape.max_history, shape.width).normal_(std=0.02))
        self.blocks = nn.ModuleList(SasRecBlock(shape, dropout=dropout) for _ in range(shape.num_blocks))

    def forward(self, embedded: Tensor, event_time: Tensor) -> Tensor:
        """Shapes: embedded (B, L, D) with zero rows for padding, event_time (B, L), unused -> (B, L, D), unit RMS."""
        del event_time
        length = embedded.shape[1]
        order = torch.arange(length, device=embedded.device)
        future = order.unsqueeze(0) > order.unsqueeze(1)
        x = embedded * self.input_scale + self.positions[:length]
        x = functional.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, future)
        unit: Tensor = functional.normalize(x, dim=-1, eps=1e-6)
        scaled: Tensor = unit * self.input_scale
        return scaled

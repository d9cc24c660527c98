"""The encoder of BERT models, such as MiniLM, in plain PyTorch.

A caller runs a range of layers, so that training can cache lower layers' outputs and add aggregation tokens before any
layer.

Letters: B texts, L positions, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyShape:
    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    epsilon: float
    max_positions: int


class _Attention(nn.Module):
    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (nn.Linear(shape.width, shape.width) for _ in range(4))

    def forward(self, hidden: Tensor, added: Tensor, wanted: Tensor) -> Tensor:
        """Attend from `wanted`, the first positions of hidden, to all positions of hidden (B, L, D).

        `added` (B, 1, 1, L) is added to the attention logits; it is minus infinity at padding.
        """
        query, key, value = (
            part(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, given in ((self.query, wanted), (self.key, hidden), (self.value, hidden))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=added.to(query.dtype))
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _BertLayer(nn.Module):
    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        self.attention = _Attention(shape)
        self.attention_norm = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.inner = nn.Linear(shape.width, shape.inner)
        self.outer = nn.Linear(shape.inner, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)

    def forward(self, hidden: Tensor, added: Tensor, rows: int | None = None) -> Tensor:
        wanted = hidden if rows is None else hidden[:, :rows]
        hidden = self.attention_norm(wanted + self.attention(hidden, added, wanted))
        out: Tensor = self.norm(hidden + self.outer(functional.gelu(self.inner(hidden))))
        return out


class BertBody(nn.Module):
    """BERT's encoder, with learned positions and a norm after every sum.

    half_precision: layers multiply in bfloat16 (for training on a processor that supports it); outputs are float32.
    """

    half_precision: bool = False

    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.max_positions, shape.width)
        # A single text uses the first of two segment rows.
        self.segment = nn.Parameter(torch.zeros(shape.width))
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.layers = nn.ModuleList(_BertLayer(shape) for _ in range(shape.layers))

    def embed(self, ids: Tensor) -> Tensor:
        """ids (B, L) -> the first layer's input (B, L, D)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        out: Tensor = self.norm(self.words(ids) + self.positions(positions) + self.segment)
        return out

    def run(self, hidden: Tensor, mask: Tensor, first: int, last: int, rows: int | None = None) -> Tensor:
        """Run layers first .. last - 1 over hidden (B, L, D), mask (B, L) true at tokens -> (B, L, D).

        With `rows`, the last layer computes only the first `rows` positions; the result is (B, rows, D).
        """
        if not self.half_precision:
            return self._run(hidden, mask, first, last, rows)
        with torch.autocast(hidden.device.type, torch.bfloat16):
            return self._run(hidden, mask, first, last, rows).float()

    def _run(self, hidden: Tensor, mask: Tensor, first: int, last: int, rows: int | None) -> Tensor:
        added = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))[:, None, None, :]
        for number in range(first, last):
            hidden = self.layers[number](hidden, added, rows if number == last - 1 else None)
        return hidden

    def layers_from(self, first: int) -> list[nn.Parameter]:
        """Parameters of the layers from `first` on, and of the embeddings if `first` is 0."""
        if first == 0:
            return list(self.parameters())
        return [parameter for layer in self.layers[first:] for parameter in layer.parameters()]

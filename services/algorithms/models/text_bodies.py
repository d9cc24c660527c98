"""Transformer encoders over tokens, in plain PyTorch: BERT's (MiniLM is one) and T5's.

Layers are run by range, so that training may keep what the lower ones gave, and so that aggregation tokens may join at
any of them. It knows neither files nor tokenizers (text_model_folder.py) nor what is made of the outputs.

Letters: B texts, L positions, D width, H heads, F inner width, V word pieces.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyShape:
    """What fixes a body's weights. `head_width` is D / H for BERT; T5 says it. `max_positions` is None for T5."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    head_width: int
    inner: int
    activation: str
    epsilon: float
    max_positions: int | None = None
    gated: bool = False
    distance_buckets: int = 0
    max_distance: int = 0


class TextBody(nn.Module):
    """An encoder whose layers can be run by range.

    With `half_precision` layers multiply in bfloat16 (training on a processor made for it); what they give is float32.
    """

    shape: BodyShape
    half_precision: bool = False

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """ids (B, L) -> what the first layer reads (B, L, D)."""

    def run(self, hidden: Tensor, mask: Tensor, first: int, last: int) -> Tensor:
        """Layers first .. last - 1 over hidden (B, L, D), mask (B, L) true at tokens -> (B, L, D).

        The last layer's output is final: a norm behind it, where there is one, is applied.
        """
        if not self.half_precision:
            return self._run(hidden, mask, first, last)
        with torch.autocast(hidden.device.type, torch.bfloat16):
            return self._run(hidden, mask, first, last).float()

    @abstractmethod
    def _run(self, hidden: Tensor, mask: Tensor, first: int, last: int) -> Tensor: ...

    def layers_from(self, first: int) -> list[nn.Parameter]:
        """The parameters that `run(..., first, all)` reads, those of the embedding only where `first` is 0."""
        if first == 0:
            return list(self.parameters())
        assert isinstance(self.layers, nn.ModuleList)
        return [parameter for layer in self.layers[first:] for parameter in layer.parameters()]


class _Attention(nn.Module):
    """Softmax attention; `scale` None is 1 / sqrt(head width). T5 has no biases."""

    def __init__(self, shape: BodyShape, *, bias: bool, scale: float | None) -> None:
        super().__init__()
        inner = shape.heads * shape.head_width
        self.heads, self.scale = shape.heads, scale
        self.query = nn.Linear(shape.width, inner, bias=bias)
        self.key = nn.Linear(shape.width, inner, bias=bias)
        self.value = nn.Linear(shape.width, inner, bias=bias)
        self.out = nn.Linear(inner, shape.width, bias=bias)

    def forward(self, hidden: Tensor, added: Tensor) -> Tensor:
        """added: (B, 1, 1, L) or (B, H, L, L), added to the attention logits (minus infinity where padded)."""
        query, key, value = (
            part(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=added.to(query.dtype), scale=self.scale
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _BertLayer(nn.Module):
    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.attention = _Attention(shape, bias=True, scale=None)
        self.attention_norm = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.inner = nn.Linear(shape.width, shape.inner)
        self.outer = nn.Linear(shape.inner, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)

    def forward(self, hidden: Tensor, added: Tensor) -> Tensor:
        hidden = self.attention_norm(hidden + self.attention(hidden, added))
        out: Tensor = self.norm(hidden + self.outer(self.activation(self.inner(hidden))))
        return out


class BertBody(TextBody):
    """BERT: learned positions, a norm behind every sum."""

    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        assert shape.max_positions is not None
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.max_positions, shape.width)
        # Of the two segment rows a single text has the first.
        self.segment = nn.Parameter(torch.zeros(shape.width))
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.layers = nn.ModuleList(_BertLayer(shape) for _ in range(shape.layers))

    def embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        out: Tensor = self.norm(self.words(ids) + self.positions(positions) + self.segment)
        return out

    def _run(self, hidden: Tensor, mask: Tensor, first: int, last: int) -> Tensor:
        added = _hidden_where_padded(mask)
        for number in range(first, last):
            hidden = self.layers[number](hidden, added)
        return hidden


class _RmsNorm(nn.Module):
    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width))
        self.epsilon = shape.epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        mean_square = hidden.float().square().mean(dim=-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(mean_square + self.epsilon))


class _T5Layer(nn.Module):
    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.attention_norm = _RmsNorm(shape)
        self.attention = _Attention(shape, bias=False, scale=1.0)
        self.norm = _RmsNorm(shape)
        self.inner = nn.Linear(shape.width, shape.inner, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False) if shape.gated else None
        self.outer = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, hidden: Tensor, added: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), added)
        normed = self.norm(hidden)
        inner = self.activation(self.inner(normed))
        if self.gate is not None:
            inner = inner * self.gate(normed)
        out: Tensor = hidden + self.outer(inner)
        return out


class T5Body(TextBody):
    """T5's encoder: distances between positions biased in buckets, one norm before every step and one at the end."""

    def __init__(self, shape: BodyShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.distances = nn.Embedding(shape.distance_buckets, shape.heads)
        self.layers = nn.ModuleList(_T5Layer(shape) for _ in range(shape.layers))
        self.norm = _RmsNorm(shape)

    def embed(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids)
        return out

    def _run(self, hidden: Tensor, mask: Tensor, first: int, last: int) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        buckets = self._buckets(positions[None, :] - positions[:, None])
        added = self.distances(buckets).permute(2, 0, 1)[None] + _hidden_where_padded(mask)
        for number in range(first, last):
            hidden = self.layers[number](hidden, added)
        return self.norm(hidden) if last == len(self.layers) else hidden

    def _buckets(self, distance: Tensor) -> Tensor:
        """Both directions have half the buckets: near distances one each, farther ones by their logarithm."""
        half = self.shape.distance_buckets // 2
        exact = half // 2
        size = distance.abs()
        far = exact + (
            torch.log(size.clamp(min=1).float() / exact) / math.log(self.shape.max_distance / exact) * (half - exact)
        ).long().clamp(max=half - exact - 1)
        return torch.where(size < exact, size, far) + (distance > 0).long() * half


def _hidden_where_padded(mask: Tensor) -> Tensor:
    """mask (B, L), true at tokens -> (B, 1, 1, L) to be added to attention logits."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))[:, None, None, :]

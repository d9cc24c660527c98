"""PIXAR's model: a transformer encoder that predicts a whole identifier in one pass (arXiv:2406.06739, section 4.2).

It has BERT's layers with MiniLM's weights, without a head: the output layer W (V, D) is separate, since serving never
multiplies by all of it. The input is [CLS] pieces [SEP] [PAD] ..., padded to at least 1+s columns. Position 0 ([CLS])
gives x_0, the shortlist embedding; x_1..x_s are the output positions. Padding is never attended to.

Letters: B queries, T input columns, s output positions, D width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

_EPSILON = 1e-12  # of BERT's layer norms


@dataclass(frozen=True, kw_only=True, slots=True)
class PhraseShape:
    """Sizes of the encoder. `positions` is s, `max_tokens` the longest input."""

    positions: int
    max_tokens: int = 64
    width: int = 384
    inner_width: int = 1536
    num_layers: int = 6
    num_heads: int = 12
    num_pieces: int = 30522

    def __post_init__(self) -> None:
        if not 1 <= self.positions < self.max_tokens:
            raise ValueError(f"positions={self.positions}; allowed: 1 to {self.max_tokens - 1} (max_tokens - 1)")
        if self.num_heads < 1 or self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads}; allowed: a divisor of width={self.width}")


class PhraseEncoder(nn.Module):
    """Token ids to x_0 .. x_s. `lower` and `upper` are its two halves, cut below the last `num_upper` layers."""

    def __init__(self, shape: PhraseShape, *, num_upper: int = 2) -> None:
        super().__init__()
        if not 1 <= num_upper <= shape.num_layers:
            raise ValueError(f"num_upper={num_upper}; allowed: 1 to num_layers={shape.num_layers}")
        self.shape, self.num_upper = shape, num_upper
        self.pieces = nn.Embedding(shape.num_pieces, shape.width)
        self.places = nn.Embedding(shape.max_tokens, shape.width)
        self.segment = nn.Parameter(torch.zeros(shape.width))
        self.norm = nn.LayerNorm(shape.width, eps=_EPSILON)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode input_ids, attention_mask (B, T), 0 in both for padding, T at most `max_tokens` -> (B, 1+s, D)."""
        input_ids, attention_mask = self.widened(input_ids, attention_mask)
        return self.upper(self.lower(input_ids, attention_mask), attention_mask)

    def widened(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return both (B, T), padded to 1+s columns. Raises: ValueError if T exceeds `max_tokens`."""
        columns, least = input_ids.shape[1], self.shape.positions + 1
        # During an export the axis has no number: a comparison would make it a constant.
        if not torch.compiler.is_exporting() and columns > self.shape.max_tokens:
            raise ValueError(f"input_ids has {columns} columns; allowed: at most {self.shape.max_tokens} (max_tokens)")
        wanted = torch.sym_max(columns, least)
        return pad(input_ids, (0, least))[:, :wanted], pad(attention_mask, (0, least))[:, :wanted]

    def lower(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run embeddings and first layers on a widened input: (B, T) -> (B, T, D)."""
        hidden = self.pieces(input_ids) + self.places.weight[: input_ids.shape[1]] + self.segment
        hidden = self.norm(hidden)
        for layer in self.layers[: -self.num_upper]:
            hidden = layer(hidden, attention_mask)
        lower: Tensor = hidden
        return lower

    def upper(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the last layers: (B, T, D) -> (B, 1+s, D). The very last one computes only positions that are read."""
        for layer in self.layers[-self.num_upper : -1]:
            hidden = layer(hidden, attention_mask)
        found: Tensor = self.layers[-1](hidden, attention_mask, self.shape.positions + 1)
        return found

    def trained(self, *, all_layers: bool) -> list[nn.Parameter]:
        """Return the trained weights: all, or the upper half's."""
        modules: list[nn.Module] = [self] if all_layers else list(self.layers[-self.num_upper :])
        return [weight for module in modules for weight in module.parameters()]


class _Layer(nn.Module):
    def __init__(self, shape: PhraseShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.query, self.key, self.value, self.mixed = (nn.Linear(shape.width, shape.width) for _ in range(4))
        self.inner = nn.Linear(shape.width, shape.inner_width)
        self.outer = nn.Linear(shape.inner_width, shape.width)
        self.attention_norm = nn.LayerNorm(shape.width, eps=_EPSILON)
        self.output_norm = nn.LayerNorm(shape.width, eps=_EPSILON)

    def forward(self, hidden: Tensor, attention_mask: Tensor, rows: int | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D), or its first `rows` columns alone."""
        wanted = hidden if rows is None else hidden[:, :rows]
        query, key, value = (
            self._heads(self.query(wanted)),
            self._heads(self.key(hidden)),
            self._heads(self.value(hidden)),
        )
        mask = (attention_mask != 0)[:, None, None, :]
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        attended = self.attention_norm(wanted + self.mixed(mixed))
        normalised: Tensor = self.output_norm(attended + self.outer(gelu(self.inner(attended))))
        return normalised

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


def from_minilm(folder: Path, *, positions: int, max_tokens: int = 64) -> PhraseEncoder:
    """Return an encoder with the weights of MiniLM (or another six-layer BERT of its width) from a model folder.

    Raises: ValueError if a weight is missing or has another shape.
    """
    weights = load_file(folder / "model.safetensors")
    encoder = PhraseEncoder(PhraseShape(positions=positions, max_tokens=max_tokens), num_upper=2)
    encoder.load_state_dict(_renamed(weights, encoder.shape, folder))
    return encoder


_PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mixed": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "output_norm": "output.LayerNorm",
}


def _renamed(weights: Mapping[str, Tensor], shape: PhraseShape, folder: Path) -> dict[str, Tensor]:
    def weight(name: str, *wanted: int) -> Tensor:
        if name not in weights or tuple(weights[name].shape) != wanted:
            found = tuple(weights[name].shape) if name in weights else "missing"
            raise ValueError(f"{folder}: {name} is {found}; expected {wanted}")
        return weights[name]

    width, inner = shape.width, shape.inner_width
    places = weights.get("embeddings.position_embeddings.weight", torch.zeros(0, width))
    if len(places) < shape.max_tokens:
        raise ValueError(f"{folder}: max_tokens={shape.max_tokens}; allowed: at most {len(places)}, the model's own")
    named = {
        "pieces.weight": weight("embeddings.word_embeddings.weight", shape.num_pieces, width),
        "places.weight": places[: shape.max_tokens],
        "segment": weight("embeddings.token_type_embeddings.weight", 2, width)[0],
        "norm.weight": weight("embeddings.LayerNorm.weight", width),
        "norm.bias": weight("embeddings.LayerNorm.bias", width),
    }
    outputs = {"inner": inner}
    inputs = {"outer": inner}
    for layer in range(shape.num_layers):
        for ours, theirs in _PARTS.items():
            source, target = f"encoder.layer.{layer}.{theirs}", f"layers.{layer}.{ours}"
            rows = outputs.get(ours, width)
            matrix = () if ours.endswith("norm") else (inputs.get(ours, width),)
            named[f"{target}.weight"] = weight(f"{source}.weight", rows, *matrix)
            named[f"{target}.bias"] = weight(f"{source}.bias", rows)
    return named

"""PIXAR's model: a transformer encoder that predicts a whole identifier in one pass (arXiv:2406.06739, section 4.2).

It has BERT's layers with MiniLM's weights. The output layer W (V, D) is separate, since serving never multiplies by
all of it. The input is [CLS] pieces [SEP] [PAD] ..., padded to at least 1+s columns. Position 0 ([CLS])
gives x_0, the shortlist embedding; x_1..x_s are the output positions. Padding is never attended to.

Letters: B queries, T input columns, s output positions, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from services.algorithms.models.text_bodies import BertBody


@dataclass(frozen=True, kw_only=True, slots=True)
class PhraseShape:
    """Sizes of the encoder. `positions` is s, `max_tokens` the longest input, `width` D."""

    positions: int
    max_tokens: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.positions < self.max_tokens:
            raise ValueError(f"positions={self.positions}; allowed: 1 to {self.max_tokens - 1} (max_tokens - 1)")


class PhraseEncoder(nn.Module):
    """Maps token ids to x_0 .. x_s. `lower` and `upper` are its two halves, cut below the last `num_upper` layers."""

    def __init__(self, body: BertBody, *, positions: int, max_tokens: int = 64, num_upper: int = 2) -> None:
        super().__init__()
        layers, longest = body.shape.layers, body.shape.max_positions
        if not 1 <= num_upper <= layers:
            raise ValueError(f"num_upper={num_upper}; allowed: 1 to num_layers={layers}")
        if max_tokens > longest:
            raise ValueError(f"max_tokens={max_tokens}; allowed: at most {longest}, the body's own")
        self.shape = PhraseShape(positions=positions, max_tokens=max_tokens, width=body.shape.width)
        self.body, self.cut = body, layers - num_upper

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode input_ids, attention_mask (B, T), 0 in both for padding, T at most `max_tokens` -> (B, 1+s, D)."""
        input_ids, attention_mask = self.widened(input_ids, attention_mask)
        return self.upper(self.lower(input_ids, attention_mask), attention_mask)

    def widened(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return both (B, T), padded to 1+s columns. Raises: ValueError if T exceeds `max_tokens`."""
        columns, least = input_ids.shape[1], self.shape.positions + 1
        # During an export, a comparison would make the dynamic axis a constant.
        if not torch.compiler.is_exporting() and columns > self.shape.max_tokens:
            raise ValueError(f"input_ids has {columns} columns; allowed: at most {self.shape.max_tokens} (max_tokens)")
        wanted = torch.sym_max(columns, least)
        return pad(input_ids, (0, least))[:, :wanted], pad(attention_mask, (0, least))[:, :wanted]

    def lower(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run embeddings and first layers on a widened input: (B, T) -> (B, T, D)."""
        return self.body.run(self.body.embed(input_ids), attention_mask != 0, 0, self.cut)

    def upper(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the last layers: (B, T, D) -> (B, 1+s, D). The last layer computes only the positions that are read."""
        rows = self.shape.positions + 1
        return self.body.run(hidden, attention_mask != 0, self.cut, self.body.shape.layers, rows)

    def trained(self, *, all_layers: bool) -> list[nn.Parameter]:
        """Return the trained weights: all of them, or those of the upper half."""
        return self.body.layers_from(0 if all_layers else self.cut)

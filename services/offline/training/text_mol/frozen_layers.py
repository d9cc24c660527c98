"""The frozen lower layers' output for a set of texts, computed once and cached in half precision.

Training the last two of MiniLM's six layers reads each text many times. The four layers below would take two thirds of
each step.

Letters: n texts, B of a batch, L tokens of the longest of them, T tokens of all, D width.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.algorithms.models.text_bodies import BertBody
from services.algorithms.text.word_pieces import WordPieces

_BATCH_TOKENS = 8192
_TEXTS_AT_ONCE = 4096


class FrozenOutputs:
    """Cached inputs of layer `joined`, which is at least 1."""

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: WordPieces,
        body: BertBody,
        *,
        joined: int,
        max_tokens: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Compute all outputs; `progress` gets the number of texts done. Memory: 2 T D bytes."""
        parts, lengths = [], []
        for begin in range(0, len(texts), _TEXTS_AT_ONCE):
            ids, mask = tokenizer.batch(texts[begin : begin + _TEXTS_AT_ONCE], max_tokens=max_tokens)
            parts.append(ids[mask > 0])
            lengths.append(mask.sum(axis=1))
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        self.lengths: npt.NDArray[np.int64] = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
        self._offsets = np.append(0, np.cumsum(self.lengths))
        self._hidden = self._computed(ids, body, joined, progress or (lambda done: None))

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs of layer `joined` (B, L, D), float32, of rows (B,), and which positions are tokens (B, L)."""
        flat, real = self._positions(rows)
        return torch.from_numpy(self._hidden[flat].astype(np.float32)), torch.from_numpy(real)

    def by_length(self, batch_tokens: int = _BATCH_TOKENS) -> list[npt.NDArray[np.int64]]:
        """Return all rows in groups of similar length, each of at most `batch_tokens` padded tokens."""
        order = np.argsort(self.lengths, kind="stable")
        groups, start = [], 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * self.lengths[order[stop]] <= batch_tokens:
                stop += 1
            groups.append(order[start:stop])
            start = stop
        return groups

    def _positions(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        steps = np.arange(int(self.lengths[rows].max()))
        real = steps[None, :] < self.lengths[rows][:, None]
        return np.where(real, self._offsets[rows][:, None] + steps, 0), real

    @torch.no_grad()
    def _computed(
        self, tokens: npt.NDArray[np.int64], body: BertBody, joined: int, progress: Callable[[int], None]
    ) -> npt.NDArray[np.float16]:
        hidden = np.empty((len(tokens), body.shape.width), dtype=np.float16)
        done = 0
        for rows in self.by_length():
            flat, real = self._positions(rows)
            ids, mask = torch.from_numpy(tokens[flat] * real), torch.from_numpy(real)
            lower = body.run(body.embed(ids), mask, 0, joined).float()
            hidden[flat[real]] = lower.numpy()[real]
            done += len(rows)
            progress(done)
        return hidden

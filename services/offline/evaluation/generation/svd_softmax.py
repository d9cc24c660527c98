"""SVD-softmax (NeurIPS 2018): scan the leading directions of a rotated output layer, and score the best phrases.

It chooses at every position; PIXAR's shortlist chooses once per query.

Letters: V vocabulary size, D width, s positions, N tokens taken per position, U union.
"""

import numpy as np
import numpy.typing as npt

from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.ops.token_scores import CodedRows, code_rows, token_scores

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]

_CHUNK = 1 << 16
_SAMPLED = 1 << 15


class SvdSoftmax:
    """Chooses about N tokens per position, by the largest products over the `window` leading directions."""

    def __init__(self, layer: OutputLayer, *, window: int, taken: int) -> None:
        """Take the directions from the rows' second-moment matrix. Projected rows are int8. Cost: V D (D + window)."""
        if not 1 <= window <= layer.width:
            raise ValueError(f"window={window} allowed: 1 to {layer.width}")
        moments = np.zeros((layer.width, layer.width))
        for begin in range(0, len(layer), _CHUNK):
            part = layer.decoded(slice(begin, begin + _CHUNK))
            moments += part.T @ part
        self._directions = np.linalg.eigh(moments)[1][:, ::-1][:, :window].astype(np.float32)
        previews = np.empty((len(layer), window), dtype=np.uint8)
        scales = np.empty(len(layer), dtype=np.float32)
        for begin in range(0, len(layer), _CHUNK):
            coded = code_rows(layer.decoded(slice(begin, begin + _CHUNK)) @ self._directions)
            previews[begin : begin + _CHUNK], scales[begin : begin + _CHUNK] = coded.weights, coded.scales
        self._previews, self._taken = CodedRows(previews, scales), taken

    @property
    def nbytes(self) -> int:
        return self._previews.nbytes + self._directions.nbytes

    def tokens(self, x: Floats) -> Tokens:
        """Return the chosen tokens for a query x (1 + s, D), ascending, with [PAD]."""
        return best_of_each(token_scores(self._previews, x[1:] @ self._directions, None), self._taken)


def best_of_each(scores: Floats, taken: int) -> Tokens:
    """Return the union (U,) of [PAD] and about the `taken` best tokens of each position.

    scores (s, V): a view of a (V, s) array. For a large V the threshold comes from a sample of at least 32,768 tokens,
    because exact selection would cost more than the scores.
    """
    by_token = scores.T
    step = max(1, len(by_token) // _SAMPLED)
    sample = by_token[::step]
    rank = max(0, len(sample) - max(1, round(taken / step)))
    thresholds = np.partition(sample, rank, axis=0)[rank]
    chosen = (by_token >= thresholds).any(axis=1)
    chosen[0] = True
    return np.flatnonzero(chosen).astype(np.int32)

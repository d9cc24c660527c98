"""Methods that choose the phrases to score with one output layer.

SVD-softmax (NeurIPS 2018) scans the leading directions of a rotated layer and chooses the best phrases. Clustered
weights choose the phrases of the nearest k-means cells. Both choose at every position; PIXAR's shortlist chooses once
per query.

Letters: V vocabulary size, D width, s positions, N tokens taken per position, C cells, U union.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist
from services.algorithms.ops.token_scores import CodedRows, code_rows, products, token_scores, union

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


class TokenSource(Protocol):
    """Tokens worth scoring for a query x (1 + s, D): ascending, including [PAD]."""

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the output layer's."""
        ...

    def tokens(self, x: Floats) -> Tokens: ...


class WholeVocabulary:
    """Every token: the full softmax."""

    nbytes = 0

    def __init__(self, layer: OutputLayer) -> None:
        self._tokens = np.arange(len(layer), dtype=np.int32)

    def tokens(self, x: Floats) -> Tokens:
        return self._tokens


class ShortlistTokens:
    """The union of the k nearest sets of x_0."""

    def __init__(self, shortlist: Shortlist, sets: int) -> None:
        self._shortlist, self._sets = shortlist, sets

    @property
    def nbytes(self) -> int:
        return self._shortlist.nbytes

    def tokens(self, x: Floats) -> Tokens:
        return self._shortlist.tokens(x[0], self._sets)


class LowRank:
    """SVD-softmax: about the N tokens per position with the largest products over the `window` leading directions."""

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
        return best_of_each(token_scores(self._previews, x[1:] @ self._directions, None), self._taken)


class Clustered:
    """All tokens of the `probes` cells with the largest <x_t, centre>, at each position."""

    def __init__(self, layer: OutputLayer, centres: Floats, owners: npt.NDArray[np.int64], *, probes: int) -> None:
        """Shapes: centres (C, D); owners (V,), each token's cell."""
        self._centres, self._probes, self._num_tokens = np.ascontiguousarray(centres), probes, len(layer)
        self._members = np.argsort(owners, kind="stable").astype(np.int32)
        self._bounds = np.append(0, np.cumsum(np.bincount(owners, minlength=len(centres))))

    @property
    def nbytes(self) -> int:
        return self._centres.nbytes + self._members.nbytes + self._bounds.nbytes

    def tokens(self, x: Floats) -> Tokens:
        near = [np.argsort(-products(self._centres, row), kind="stable")[: self._probes] for row in x[1:]]
        cells = np.unique(np.concatenate(near))
        found = np.concatenate([self._members[self._bounds[cell] : self._bounds[cell + 1]] for cell in cells.tolist()])
        return union(found[None], np.zeros(1, dtype=np.int64), self._num_tokens)


_CHUNK = 1 << 16
_SAMPLED = 1 << 15


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

"""States of items without interactions, predicted from their texts by ridge regression on known items.

The prediction gives the direction from the catalogue's mean; the mean distance of known items gives the length. In the
fit, an item's weight is its number of training interactions. To choose the ridge, each known item is predicted by the
fit without it. If no ridge predicts directions better than chance, new items get the mean (decision 053).

Letters: X known items, B new items, D content width, P_x item components, P pairs, d component width, R = P_x * d, M
items of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.contribution import mean_gate
from services.algorithms.scoring.states import FloatArray, ItemStates

_Exact = npt.NDArray[np.float64]

# Ridges, in units of the contents' mean eigenvalue.
_RIDGES = (1e-3, 1e-2, 1e-1, 0.3, 1.0, 3.0, 1e1, 1e2)
# Standard errors by which directions must beat chance.
_BEYOND_CHANCE = 3.0
_BLOCK = 4096
_SMALLEST_EIGENVALUE = 1e-10  # relative to the largest; directions below it are rounding errors


class TextEncoder(Protocol):
    def encode(self, texts: Sequence[str]) -> FloatArray: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentMap:
    """A fitted map for new items.

    Shapes: content_mean (D,), weight (D, P_x, d), mean (P_x, d), distance (P_x,): mean distance of known components
    from their mean, 0 if content predicts nothing; gate (P,): the catalogue's mean gate, or None. ridge: in units of
    the contents' mean eigenvalue. left_out_cosine, with its standard_error: see `_Decomposition.left_out_cosine`.
    """

    content_mean: FloatArray
    weight: FloatArray
    mean: FloatArray
    distance: FloatArray
    gate: FloatArray | None
    ridge: float
    left_out_cosine: float
    standard_error: float

    def states(self, contents: FloatArray) -> ItemStates:
        """B items' states from content vectors (B, D): components of length 1, the catalogue's mean gate.

        Raises: ValueError for another width or non-finite values.
        """
        if contents.ndim != 2 or contents.shape[1] != len(self.weight):
            raise ValueError(f"contents has shape {contents.shape}; expected (B, {len(self.weight)})")
        towards = _unit(np.einsum("bc,cpd->bpd", contents - self.content_mean, self.weight).astype(np.float64))
        components = _unit(self.mean + towards * self.distance[None, :, None])
        gate = None if self.gate is None else np.repeat(self.gate[None], len(contents), axis=0)
        return ItemStates(components=components.astype(np.float32), gate=gate)


def fit_content_map(contents: FloatArray, items: ItemStates, counts: npt.NDArray[np.integer]) -> ContentMap:
    """Fit on X known items: contents (X, D), states, and training counts (X,).

    With w the counts (at least 1), C and G the centred contents and components, each row times the root of its w, C = U
    S V^T: W = V (S^2 + r)^-1 S U^T G. The prediction for item i by the fit without it is g_i - (g_i - W^T c_i) / (1 -
    h_i), h_i = w_i / sum w + sum_j U_ij^2 S_j^2 / (S_j^2 + r), an identity of weighted least squares. Cost: O(X D (D +
    R)) per fit and per ridge, O(D^3) per fit; in blocks of 4,096 items.

    Raises: ValueError if numbers of rows differ, for fewer than 3 items, or for non-finite contents.
    """
    num_items, num_components, width = items.components.shape
    if contents.ndim != 2 or len(contents) != num_items:
        raise ValueError(f"contents has shape {contents.shape}; expected ({num_items}, D) to fit items")
    if counts.shape != (num_items,):
        raise ValueError(f"counts has shape {counts.shape}; expected ({num_items},), one per item")
    if num_items < 3:
        raise ValueError(f"num_items={num_items}; allowed: at least 3, each is predicted from the others")
    if not np.isfinite(contents).all():
        raise ValueError("contents holds NaN or infinite values; every value must be finite")
    targets = items.components.reshape(num_items, -1)
    fit = _Decomposition(contents, targets, counts)
    judged = {ridge: fit.left_out_cosine(ridge, num_components) for ridge in _RIDGES}
    ridge = max(judged, key=lambda tried: judged[tried][0])
    cosine, error = judged[ridge]
    distance = fit.distance(num_components) if cosine > _BEYOND_CHANCE * error else np.zeros(num_components)
    return ContentMap(
        content_mean=fit.content_mean.astype(np.float32),
        weight=fit.weight(ridge).reshape(-1, num_components, width).astype(np.float32),
        mean=fit.target_mean.reshape(num_components, width).astype(np.float32),
        distance=distance.astype(np.float32),
        gate=mean_gate(items),
        ridge=ridge,
        left_out_cosine=cosine,
        standard_error=error,
    )


class TextStates:
    """New items' states from titles and categories, fitted on the training catalogue."""

    def __init__(
        self,
        encoder: TextEncoder,
        *,
        titles: Sequence[str],
        categories: Sequence[Sequence[str]],
        items: ItemStates,
        counts: npt.NDArray[np.integer],
    ) -> None:
        """Encode X known items' texts (about 500 a second with MiniLM on two cores) and fit. Raises: ValueError as
        `fit_content_map`.
        """
        self._encoder = encoder
        self.map = fit_content_map(encoder.encode(_texts(titles, categories)), items, counts)

    def of(self, titles: Sequence[str], categories: Sequence[Sequence[str]]) -> ItemStates:
        """B new items' states. Cost: one encoding per text (10 ms if single) and D P_x d multiply-adds."""
        return self.map.states(self._encoder.encode(_texts(titles, categories)))


def _texts(titles: Sequence[str], categories: Sequence[Sequence[str]]) -> list[str]:
    """For example "Toy Story (1995). Animation, Comedy"."""
    return [f"{title}. {', '.join(names)}" if names else title for title, names in zip(titles, categories, strict=True)]


class _Decomposition:
    """Centred contents (X, D) in their principal directions, and targets (X, R) along them, weighted by `counts`."""

    def __init__(self, contents: FloatArray, targets: FloatArray, counts: npt.NDArray[np.integer]) -> None:
        self._contents, self._targets = contents, targets
        weights = np.maximum(counts, 1).astype(np.float64)
        self._shares: _Exact = weights / weights.sum()
        self.content_mean: _Exact = self._shares @ contents
        self.target_mean: _Exact = self._shares @ targets
        gram = np.zeros((contents.shape[1], contents.shape[1]))
        cross = np.zeros((contents.shape[1], targets.shape[1]))
        for share, content, target in self._blocks():
            gram += (share[:, None] * content).T @ content
            cross += (share[:, None] * content).T @ target
        eigenvalues, directions = np.linalg.eigh(gram)
        kept = eigenvalues > _SMALLEST_EIGENVALUE * max(eigenvalues[-1], np.finfo(np.float64).tiny)
        self._eigenvalues, self._directions = eigenvalues[kept], directions[:, kept]
        self._along = self._directions.T @ cross
        # If all contents are equal, every ridge predicts the mean.
        self._unit = float(self._eigenvalues.mean()) if kept.any() else 1.0

    def weight(self, ridge: float) -> _Exact:
        return np.asarray(self._directions @ (self._along / (self._eigenvalues + ridge * self._unit)[:, None]))

    def distance(self, num_components: int) -> _Exact:
        total = np.zeros(num_components)
        for share, _, target in self._blocks():
            total += share @ np.linalg.norm(target.reshape(len(target), num_components, -1), axis=-1)
        return total

    def left_out_cosine(self, ridge: float, num_components: int) -> tuple[float, float]:
        """The mean, over interactions and components, of the cosine between a state's deviation from the mean and its
        prediction, both computed without the item; and its standard error.
        """
        weight = self.weight(ridge)
        shrunk = 1.0 / (self._eigenvalues + ridge * self._unit)
        cosines = np.empty(len(self._contents))
        start = 0
        for share, content, target in self._blocks():
            leverage = share * (1.0 + np.square(content @ self._directions) @ shrunk)
            # Without a ridge, an item that alone spans a direction has leverage 1: no other predicts it.
            remaining = np.maximum(1.0 - leverage, 1e-9)[:, None]
            mean_without = -(share / np.maximum(1.0 - share, 1e-9))[:, None] * target
            left_out = target - (target - content @ weight) / remaining - mean_without
            shape = (len(target), num_components, -1)
            actual, predicted = _unit(target.reshape(shape)), _unit(left_out.reshape(shape))
            cosines[start : start + len(target)] = np.einsum("mpd,mpd->mp", actual, predicted).mean(axis=1)
            start += len(target)
        mean = float(self._shares @ cosines)
        return mean, float(np.sqrt(np.square(self._shares) @ np.square(cosines - mean)))

    def _blocks(self) -> Iterator[tuple[_Exact, _Exact, _Exact]]:
        for start in range(0, len(self._contents), _BLOCK):
            rows = slice(start, start + _BLOCK)
            yield self._shares[rows], self._contents[rows] - self.content_mean, self._targets[rows] - self.target_mean


def _unit(vectors: _Exact) -> _Exact:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1.0))

"""States of items that nobody touched yet, from what their text says: a ridge regression onto known items' states.

The content vector of an item (a sentence encoder's, of its title) is mapped linearly to its components. The fit is in
closed form, and so is its judgement: each known item is predicted by the fit without it, from the same decomposition,
and the ridge with the best mean cosine wins. A very large ridge predicts the catalogue's mean state, so content that
says nothing does no harm. `TextStates` is all of it for titles and categories; who encodes them is its caller's choice.

Letters: X known items, B new items, D content width, P_x item components, P pairs, d component width, R = P_x * d,
M items of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.contribution import mean_gate
from services.algorithms.states import FloatArray, ItemStates

_Exact = npt.NDArray[np.float64]

# In units of the contents' mean eigenvalue; the last one leaves the mean state.
_RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e9)
_BLOCK = 4096
_SMALLEST_EIGENVALUE = 1e-10  # relative to the largest; below it a direction is rounding


class TextEncoder(Protocol):
    """Texts to vectors, as models/sentence_encoder.py's MiniLM does."""

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Vectors (B, D) of B texts, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentMap:
    """A fitted map, ready for new items.

    Shapes: weight (D, P_x, d), intercept (P_x, d), gate (P,) the catalogue's mean, or None for plain dot products.
    `ridge` is the chosen one, in units of the contents' mean eigenvalue. `left_out_cosine` is the mean cosine between
    known items' components and their prediction by the fit without them; `mean_state_cosine` the same for the mean
    state, which needs no content at all.
    """

    weight: FloatArray
    intercept: FloatArray
    gate: FloatArray | None
    ridge: float
    left_out_cosine: float
    mean_state_cosine: float

    def states(self, contents: FloatArray) -> ItemStates:
        """States of B items from their content vectors (B, D): components of length 1, the catalogue's mean gate.

        Raises: ValueError if `contents` has another width, or values that are not finite.
        """
        if contents.ndim != 2 or contents.shape[1] != len(self.weight):
            raise ValueError(f"contents has shape {contents.shape}; expected (B, {len(self.weight)})")
        predicted = np.einsum("bc,cpd->bpd", contents, self.weight) + self.intercept
        gate = None if self.gate is None else np.repeat(self.gate[None], len(contents), axis=0)
        return ItemStates(components=_unit(predicted.astype(np.float64)).astype(np.float32), gate=gate)


def fit_content_map(contents: FloatArray, items: ItemStates) -> ContentMap:
    """Fit on X known items: contents (X, D), their states in the same order.

    With C and G the centred contents and components, C = U S V^T: W = V (S^2 + r)^-1 S U^T G, and item i left out is
    g_i - (g_i - W^T c_i) / (1 - h_i), h_i = 1/X + sum_j U_ij^2 S_j^2 / (S_j^2 + r), the known identity of linear least
    squares. Cost: O(X D (D + R)) and O(D^3) per fit, O(X D R) per ridge tried; blocks of 4,096 items at a time.

    Raises: ValueError if the rows disagree, for fewer than 3 items, or for contents that are not finite.
    """
    num_items, num_components, width = items.components.shape
    if contents.ndim != 2 or len(contents) != num_items:
        raise ValueError(f"contents has shape {contents.shape}; expected ({num_items}, D) to fit items")
    if num_items < 3:
        raise ValueError(f"num_items={num_items}; allowed: at least 3, each is predicted from the others")
    if not np.isfinite(contents).all():
        raise ValueError("contents holds NaN or infinite values; every value must be finite")
    targets = items.components.reshape(num_items, -1)
    fit = _Decomposition(contents, targets)
    cosines = {ridge: fit.left_out_cosine(ridge, num_components) for ridge in _RIDGES}
    ridge = max(cosines, key=lambda tried: cosines[tried])
    weight = fit.weight(ridge)
    return ContentMap(
        weight=weight.reshape(-1, num_components, width).astype(np.float32),
        intercept=(fit.target_mean - fit.content_mean @ weight).reshape(num_components, width).astype(np.float32),
        gate=mean_gate(items),
        ridge=ridge,
        left_out_cosine=cosines[ridge],
        mean_state_cosine=cosines[_RIDGES[-1]],
    )


class TextStates:
    """States of new items from their titles and categories, fitted on the catalogue that a model was trained with."""

    def __init__(
        self,
        encoder: TextEncoder,
        *,
        titles: Sequence[str],
        categories: Sequence[Sequence[str]],
        items: ItemStates,
    ) -> None:
        """Encode X known items' texts and fit: about 500 texts a second with MiniLM on two cores.

        Raises: ValueError as `fit_content_map` does.
        """
        self._encoder = encoder
        self.map = fit_content_map(encoder.encode(_texts(titles, categories)), items)

    def of(self, titles: Sequence[str], categories: Sequence[Sequence[str]]) -> ItemStates:
        """States of B new items. Cost: one encoding of each text (10 ms alone) and D P_x d multiply-adds."""
        return self.map.states(self._encoder.encode(_texts(titles, categories)))


def _texts(titles: Sequence[str], categories: Sequence[Sequence[str]]) -> list[str]:
    """What is encoded of an item: "Toy Story (1995). Animation, Comedy"."""
    return [f"{title}. {', '.join(names)}" if names else title for title, names in zip(titles, categories, strict=True)]


class _Decomposition:
    """Centred contents (X, D) in their principal directions, and targets (X, R) along them; everything in float64."""

    def __init__(self, contents: FloatArray, targets: FloatArray) -> None:
        self._contents, self._targets = contents, targets
        self.content_mean: _Exact = contents.mean(axis=0, dtype=np.float64)
        self.target_mean: _Exact = targets.mean(axis=0, dtype=np.float64)
        gram = np.zeros((contents.shape[1], contents.shape[1]))
        cross = np.zeros((contents.shape[1], targets.shape[1]))
        for content, target in self._blocks():
            gram += content.T @ content
            cross += content.T @ target
        eigenvalues, directions = np.linalg.eigh(gram)
        kept = eigenvalues > _SMALLEST_EIGENVALUE * max(eigenvalues[-1], np.finfo(np.float64).tiny)
        self._eigenvalues, self._directions = eigenvalues[kept], directions[:, kept]
        self._along = self._directions.T @ cross
        # Equal contents everywhere have no direction at all: then every ridge gives the mean.
        self._unit = float(self._eigenvalues.mean()) if kept.any() else 1.0

    def weight(self, ridge: float) -> _Exact:
        """(D, R)."""
        return np.asarray(self._directions @ (self._along / (self._eigenvalues + ridge * self._unit)[:, None]))

    def left_out_cosine(self, ridge: float, num_components: int) -> float:
        """Mean over items and components of the cosine between a state and its prediction without it."""
        weight = self.weight(ridge)
        shrunk = 1.0 / (self._eigenvalues + ridge * self._unit)
        num_items, total = len(self._contents), 0.0
        for content, target in self._blocks():
            leverage = 1.0 / num_items + np.square(content @ self._directions) @ shrunk
            # An item that alone spans a direction has leverage 1 without a ridge: nothing else can predict it.
            remaining = np.maximum(1.0 - leverage, 1e-9)[:, None]
            left_out = self.target_mean + target - (target - content @ weight) / remaining
            shape = (len(target), num_components, -1)
            actual = _unit((self.target_mean + target).reshape(shape))
            total += float(np.einsum("mpd,mpd->mp", actual, _unit(left_out.reshape(shape))).mean(axis=1).sum())
        return total / num_items

    def _blocks(self) -> Iterator[tuple[_Exact, _Exact]]:
        """Centred contents (M, D) and targets (M, R)."""
        for start in range(0, len(self._contents), _BLOCK):
            rows = slice(start, start + _BLOCK)
            yield self._contents[rows] - self.content_mean, self._targets[rows] - self.target_mean


def _unit(vectors: _Exact) -> _Exact:
    """Each of the last axis at length 1; zero stays zero."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1.0))

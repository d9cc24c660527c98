"""Explain one item's score for one query: component pairs, gate weights, the model's share.

s = sum_p pi_p c_p. A refreshed component is lambda * g + (1 - lambda) * Pi, with g the bundle's component and Pi the
interactions' direction. So each cosine has a part of the model and a part of the interactions. Gate weights are those
of the refreshed state.

Letters: P component pairs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates, check_shapes, silu

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreParts:
    """Gate weights, cosines, and the model's part of weight * cosine, (P,) each."""

    weights: Doubles
    cosines: Doubles
    from_model: Doubles
    num_item_components: int

    @property
    def contributions(self) -> Doubles:
        return self.weights * self.cosines

    def largest(self, count: int) -> list[int]:
        """Pairs of the `count` contributions of largest magnitude, largest first; 0 means all pairs."""
        order: list[int] = np.argsort(-np.abs(self.contributions), kind="stable").tolist()
        return order[:count] if count else order


def score_parts(
    query: QueryStates, item: ItemStates, pair_gate: PairGate | None, *, base: ItemStates | None, model_share: float
) -> ScoreParts:
    """Split one query's score of one item, in float64.

    base: the item's bundle state, if any; model_share: its lambda. Raises: ValueError if shapes disagree or
    `model_share` is outside [0, 1].
    """
    check_shapes(query, item, pair_gate)
    if not 0 <= model_share <= 1:
        raise ValueError(f"model_share={model_share} allowed: 0-1")
    cosines = _cosines(query, item)
    gate = np.zeros(len(cosines))
    if query.gate is not None and item.gate is not None:
        gate += query.gate[0].astype(np.float64) * item.gate[0]
    if pair_gate is not None:
        hidden = pair_gate.hidden_weight.astype(np.float64) @ cosines + pair_gate.hidden_bias
        gate += pair_gate.out_weight.astype(np.float64) @ silu(hidden) + pair_gate.out_bias
    logits = silu(gate)
    powers = np.exp(logits - logits.max())
    weights = powers / powers.sum()
    return ScoreParts(
        weights=weights,
        cosines=cosines,
        from_model=weights * _own(query, item, base, model_share),
        num_item_components=item.components.shape[1],
    )


def _own(query: QueryStates, item: ItemStates, base: ItemStates | None, model_share: float) -> Doubles:
    """The model's part of each cosine (P,): the whole cosine if the component equals the bundle's."""
    if base is None:
        return np.zeros(query.components.shape[1] * item.components.shape[1])
    untouched = (item.components[0] == base.components[0]).all(axis=1)
    shares = np.where(untouched, 1.0, model_share)
    return np.asarray(_cosines(query, base) * np.tile(shares, query.components.shape[1]))


def _cosines(query: QueryStates, item: ItemStates) -> Doubles:
    return np.asarray((query.components[0].astype(np.float64) @ item.components[0].astype(np.float64).T).reshape(-1))

"""What interactions add to their items' sums: weights by feedback, gates, contributions.

Letters: n rows, P_x item components, d component width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import QueryStates
from services.refresher.domain.records import Interaction
from services.refresher.domain.rules import Rules

# Rows computed together: a few megabytes of float64 at 8 x 4 x 64.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ContributionRows:
    """n interactions with nonzero weights. Shapes: weights (n,), contributions (n, P_x, d), seconds (n,)."""

    interactions: Sequence[Interaction]
    item_ids: list[str]
    weights: npt.NDArray[np.float64]
    contributions: npt.NDArray[np.int64]


def weights_of(rules: Rules, interactions: Sequence[Interaction]) -> list[float]:
    """Each interaction's weight (n,); 0: no feedback."""
    weight = rules.feedback.weight
    return [weight(interaction.type, interaction.value) for interaction in interactions]


def contributions_of(
    rules: Rules, interactions: Sequence[Interaction], weights: Sequence[float]
) -> list[ContributionRows]:
    pairs = [(one, weight) for one, weight in zip(interactions, weights, strict=True) if weight]
    return [_rows_of(rules, pairs[start : start + _ROWS]) for start in range(0, len(pairs), _ROWS)]


def _rows_of(rules: Rules, pairs: Sequence[tuple[Interaction, float]]) -> ContributionRows:
    items = rules.items
    interactions = [interaction for interaction, _ in pairs]
    item_ids = [interaction.item_id for interaction in interactions]
    weights = np.array([weight for _, weight in pairs], np.float64)
    components = _halves([interaction.query.components for interaction in interactions])
    gates = None
    if items.states.gate is not None:
        gates = _halves([interaction.query.gate for interaction in interactions]).reshape(len(pairs), -1)
    queries = QueryStates(
        components=components.reshape(len(pairs), items.num_query_components, items.width), gate=gates
    )
    contributions = items.contributions(queries, weights, items.rows(item_ids))
    return ContributionRows(interactions, item_ids, weights, contributions)


def _halves(pieces: Sequence[bytes]) -> npt.NDArray[np.float32]:
    return np.frombuffer(b"".join(pieces), "<f2").astype(np.float32)

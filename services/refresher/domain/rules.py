"""Defines the rules of folding, which are the model's items, the feedback's weights and the contributions to sums.

Equal rules and records give equal states, so a checkpoint with other rules is rejected.

Letters: X items, n rows asked for, P_x item components, P pairs, d component width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.ids import ItemIds
from services.algorithms.pefa.contribution import Contributions, cold_start_items, mean_gate
from services.algorithms.pefa.policy import FeedbackPolicy
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate, QueryStates
from services.refresher.domain.records import Interaction

_ROWS_KEPT = 65_536  # some 10 MB, whatever the catalogue's size


@dataclass(frozen=True, kw_only=True)
class ModelItems:
    """The X items of one model.

    `index` maps ids to rows. `counts` (X,) are the items' interactions in training, if known. `leave_out` is the query
    component that identifies the user, if any.
    """

    model_version: str
    num_query_components: int
    states: ItemStates
    index: ItemIds
    pair_gate: PairGate | None
    leave_out: int | None = None
    counts: npt.NDArray[np.int64] | None = None

    @cached_property
    def row(self) -> Callable[[str], int]:
        """Returns an id's row, or -1. Of a record's up to eight lookups the first takes 5 us, the others 0.2 us."""
        return lru_cache(_ROWS_KEPT)(lambda item_id: int(self.index.get(item_id, -1)))

    def is_new(self, item_id: str) -> bool:
        row = self.row(item_id)
        return row < 0 or (self.counts is not None and not self.counts[row])

    @property
    def num_components(self) -> int:
        """P_x."""
        return int(self.states.components.shape[1])

    @property
    def width(self) -> int:
        """d."""
        return int(self.states.components.shape[2])

    @cached_property
    def mean_gate(self) -> FloatArray | None:
        """The gate of a new item, (P,)."""
        return mean_gate(self.states)

    @cached_property
    def contributions(self) -> Contributions:
        return Contributions(self.pair_gate, leave_out=self.leave_out)

    def rows(self, item_ids: Sequence[str]) -> ItemStates:
        """Return these items' states (n,) in the bundle, or of `cold_start_items` for unknown items."""
        rows = np.fromiter(map(self.row, item_ids), np.int64, len(item_ids))
        known = rows >= 0
        if known.all():
            gate = None if self.states.gate is None else self.states.gate[rows]
            return ItemStates(components=self.states.components[rows], gate=gate)
        found = cold_start_items(
            len(item_ids), num_components=self.num_components, width=self.width, mean_gate=self.mean_gate
        )
        found.components[known] = self.states.components[rows[known]]
        if found.gate is not None and self.states.gate is not None:
            found.gate[known] = self.states.gate[rows[known]]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules of folding. `max_remembered` and `max_pending` are limits of each partition of `attributions`."""

    items: ModelItems
    feedback: FeedbackPolicy
    max_remembered: int
    max_pending: int

    @property
    def text(self) -> str:
        return (
            f"model={self.items.model_version} feedback={self.feedback.text} "
            f"remembered={self.max_remembered} parked={self.max_pending}"
        )


# Rows computed together: a few megabytes of float64 at 8 x 4 x 64.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ContributionRows:
    """n interactions with nonzero weights. Shapes: weights (n,), contributions (n, P_x, d).

    P_x: item components of width d.
    """

    interactions: Sequence[Interaction]
    item_ids: list[str]
    weights: npt.NDArray[np.float64]
    contributions: npt.NDArray[np.int64]


def weights_of(rules: Rules, interactions: Sequence[Interaction]) -> list[float]:
    """Return each interaction's weight (n,). The weight 0 means no feedback."""
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

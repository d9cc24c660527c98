"""What a retrieval benchmark runs on: items, queries, the pair gate that scores them, and labels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.states import ItemStates, PairGate, QueryStates
from services.offline.evaluation.catalogues.shapes import Shape

IntArray = npt.NDArray[np.int64]
# What rows and pages call a catalogue that `generator` made; any other is named after the bundle that it is of.
SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """X items and B queries; label_draws (B, D): rows of items that each query's answer should contain.

    D = 0 where there are no labels, as in a generated scene.
    """

    name: str
    items: ItemStates
    queries: QueryStates
    pair_gate: PairGate | None
    label_draws: IntArray

    @property
    def shape(self) -> Shape:
        """The sizes that the scene really has."""
        _, num_item_components, width = self.items.components.shape
        return Shape(
            name=self.name,
            num_items=len(self.items),
            num_query_components=self.queries.components.shape[1],
            num_item_components=num_item_components,
            component_width=width,
            gate_hidden=0 if self.pair_gate is None else len(self.pair_gate.hidden_bias),
            gated=self.items.gate is not None,
        )

    @property
    def labels(self) -> IntArray:
        """The first label of each query: (B,). Raises: IndexError without labels."""
        return self.label_draws[:, 0]

"""What a retrieval benchmark runs on: items, queries, the pair gate that scores them, and labels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.states import ItemStates, PairGate, QueryStates

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
    def labels(self) -> IntArray:
        """The first label of each query: (B,). Raises: IndexError without labels."""
        return self.label_draws[:, 0]

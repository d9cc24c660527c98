"""Data of a retrieval benchmark: items, queries, the pair gate that scores them, and labels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One workload. `gated`: queries and items have gate parts; otherwise the gate depends on cosines alone."""

    name: str
    num_items: int
    num_query_components: int
    num_item_components: int
    component_width: int
    gate_hidden: int = 128
    gated: bool = True

    @property
    def num_pairs(self) -> int:
        """P = P_q * P_x."""
        return self.num_query_components * self.num_item_components


# Name, X, P_q, P_x, d, gated. The paper's Table 2 lists 3,649 films for ml-1m; the data have 3,706.
SHAPES = {
    name: Shape(
        name=name,
        num_items=num_items,
        num_query_components=num_query_components,
        num_item_components=num_item_components,
        component_width=width,
        gated=gated,
    )
    for name, num_items, num_query_components, num_item_components, width, gated in (
        ("ml-1m", 3_706, 8, 4, 64, True),
        ("ml-20m", 24_186, 8, 4, 128, True),
        ("books", 674_044, 8, 8, 32, True),
        ("nq320k", 109_739, 4, 4, 768, False),
    )
}


def shape_named(name: str) -> Shape:
    """Return a shape of the table. Raises: ValueError naming the known ones."""
    if name not in SHAPES:
        raise ValueError(f"shape={name!r}; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]


IntArray = npt.NDArray[np.int64]
# The name for `generator`'s catalogues, instead of a bundle's.
SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """X items and B queries.

    label_draws (B, D): rows of the items that each answer should contain; D is 0 if they are unknown.
    """

    name: str
    items: ItemStates
    queries: QueryStates
    pair_gate: PairGate | None
    label_draws: IntArray

    @property
    def shape(self) -> Shape:
        """The actual sizes."""
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

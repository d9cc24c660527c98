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
    tau: float = 0.05

    @property
    def num_pairs(self) -> int:
        """P = P_q * P_x."""
        return self.num_query_components * self.num_item_components


SHAPES = {
    shape.name: shape
    for shape in (
        # The paper's Table 2 lists 3,649 films; the data have 3,706.
        Shape(
            name="ml-1m",
            num_items=3_706,
            num_query_components=8,
            num_item_components=4,
            component_width=64,
        ),
        Shape(
            name="ml-20m",
            num_items=24_186,
            num_query_components=8,
            num_item_components=4,
            component_width=128,
        ),
        Shape(
            name="books",
            num_items=674_044,
            num_query_components=8,
            num_item_components=8,
            component_width=32,
        ),
        Shape(
            name="nq320k",
            num_items=109_739,
            num_query_components=4,
            num_item_components=4,
            component_width=768,
            gated=False,
        ),
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
    """X items and B queries; label_draws (B, D): rows of the items that each answer should contain; D = 0: unknown."""

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

    @property
    def labels(self) -> IntArray:
        """The first label of each query: (B,). Raises: IndexError without labels."""
        return self.label_draws[:, 0]

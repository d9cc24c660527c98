"""The sizes that retrieval is measured at: the papers' four workloads (arXiv:2407.15462, Tables 2 and 5).

One shared table, so that every benchmark, plot and roofline speaks of the same sizes.

Letters: X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One workload. `gated`: queries and items have gate parts; without, the pair's cosines alone make the gate."""

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
        # The paper's Table 2 lists 3,649 films; the data has 3,706, and so has a model trained on it.
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
    """A shape of the table. Raises: ValueError naming the known ones."""
    if name not in SHAPES:
        raise ValueError(f"shape={name!r}; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]

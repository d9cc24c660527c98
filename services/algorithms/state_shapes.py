"""Which query states, item states and pair gates can be scored together, and the message when they cannot.

One place for the rules, so that the reference, the fast paths and the services refuse the same inputs in the same
words. P = 1 is a plain dot product: a softmax over one pair is 1 whatever the gates say.
"""

from dataclasses import dataclass

from services.algorithms.states import ItemStates, PairGate, QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemShape:
    """What every item of one model looks like: P_x, d, P, and whether items bring a gate of their own."""

    num_components: int
    width: int
    num_pairs: int
    gated: bool

    @property
    def num_query_components(self) -> int:
        return self.num_pairs // self.num_components

    @property
    def bytes_per_item(self) -> int:
        """Bytes of one item's float32 states."""
        return 4 * (self.num_components * self.width + (self.num_pairs if self.gated else 0))

    def check_items(self, states: ItemStates) -> None:
        """Raise ValueError, naming both values, unless these states fit the index."""
        _, num_components, width = states.components.shape
        if (num_components, width) != (self.num_components, self.width):
            raise ValueError(
                f"items have {num_components} components of width {width}; "
                f"the index holds {self.num_components} of width {self.width}"
            )
        if (states.gate is not None) != self.gated:
            raise ValueError(
                f"items.gate is {_presence(states.gate is not None)} but the index's items have "
                f"{'one' if self.gated else 'none'}"
            )
        if states.gate is not None and states.gate.shape[1] != self.num_pairs:
            raise ValueError(f"items.gate has {states.gate.shape[1]} pairs; the index holds {self.num_pairs}")

    def check_queries(self, queries: QueryStates) -> None:
        """Raise ValueError, naming the field and both values, if these queries cannot be scored with such items."""
        _, num_query_components, width = queries.components.shape
        if width != self.width:
            raise ValueError(f"query components have width {width} but item components have width {self.width}")
        if num_query_components * self.num_components != self.num_pairs:
            raise ValueError(
                f"{num_query_components} query components x {self.num_components} item components make "
                f"{num_query_components * self.num_components} pairs; the gate has {self.num_pairs}"
            )
        if (queries.gate is not None) != self.gated and self.num_pairs > 1:
            raise ValueError(
                f"query gate is {_presence(queries.gate is not None)} but the items' gate is "
                f"{_presence(self.gated)}; their product needs both or neither"
            )
        if queries.gate is not None and queries.gate.shape[1] != self.num_pairs:
            raise ValueError(f"query gate has {queries.gate.shape[1]} pairs; expected {self.num_pairs}")


def shape_of(items: ItemStates, pair_gate: PairGate | None) -> ItemShape:
    """The shape that item states and the pair gate imply, zero items included.

    Raises: ValueError naming both values when pair counts disagree, when P is not a multiple of P_x, or when more
    than one pair comes without any gate.
    """
    _, num_components, width = items.components.shape
    if items.gate is not None and pair_gate is not None and items.gate.shape[1] != pair_gate.num_pairs:
        raise ValueError(f"items.gate has {items.gate.shape[1]} pairs but pair_gate has {pair_gate.num_pairs}")
    if items.gate is not None:
        num_pairs = items.gate.shape[1]
    elif pair_gate is not None:
        num_pairs = pair_gate.num_pairs
    elif num_components == 1:
        num_pairs = 1
    else:
        raise ValueError(
            f"items have {num_components} components but neither items.gate nor pair_gate is given; "
            "only a plain dot product (one component) goes without a gate"
        )
    if num_components < 1 or num_pairs < 1 or num_pairs % num_components:
        raise ValueError(f"{num_pairs} pairs are not a multiple of the items' {num_components} components")
    return ItemShape(num_components=num_components, width=width, num_pairs=num_pairs, gated=items.gate is not None)


def check_shapes(queries: QueryStates, items: ItemStates, pair_gate: PairGate | None) -> None:
    """Raise ValueError as the checks above do unless all three fit together."""
    shape_of(items, pair_gate).check_queries(queries)


def _presence(there: bool) -> str:
    return "present" if there else "absent"

"""Which query states, item states and pair gates can be scored together, and the message when they cannot.

One place for the rules, so that the reference, the fast paths and the services refuse the same inputs in the same
words. P = 1 is a plain dot product: a softmax over one pair is 1 whatever the gates say.
"""

from services.algorithms.states import ItemStates, PairGate, QueryStates


def check_items(items: ItemStates, pair_gate: PairGate | None) -> int:
    """Check item states against the pair gate and return P, the number of pairs.

    Raises: ValueError naming both values when pair counts disagree, when P is not a multiple of P_x, or when more
    than one pair comes without any gate.
    """
    num_item_components = items.components.shape[1]
    if items.gate is not None and pair_gate is not None and items.gate.shape[1] != pair_gate.num_pairs:
        raise ValueError(f"items.gate has {items.gate.shape[1]} pairs but pair_gate has {pair_gate.num_pairs}")
    if items.gate is not None:
        num_pairs = int(items.gate.shape[1])
    elif pair_gate is not None:
        num_pairs = pair_gate.num_pairs
    elif num_item_components == 1:
        num_pairs = 1
    else:
        raise ValueError(
            f"items have {num_item_components} components but neither items.gate nor pair_gate is given; "
            "only a plain dot product (one component) goes without a gate"
        )
    if num_item_components < 1 or num_pairs < 1 or num_pairs % num_item_components:
        raise ValueError(f"{num_pairs} pairs are not a multiple of the items' {num_item_components} components")
    return num_pairs


def check_queries(queries: QueryStates, *, num_pairs: int, num_item_components: int, width: int, gated: bool) -> None:
    """Check query states against items of P_x components of width d and P pairs, gated by an item part or not.

    Raises: ValueError naming the field and both values.
    """
    _, num_query_components, query_width = queries.components.shape
    if query_width != width:
        raise ValueError(f"query components have width {query_width} but item components have width {width}")
    if num_query_components * num_item_components != num_pairs:
        raise ValueError(
            f"{num_query_components} query components x {num_item_components} item components make "
            f"{num_query_components * num_item_components} pairs; the gate has {num_pairs}"
        )
    if (queries.gate is not None) != gated and num_pairs > 1:
        raise ValueError(
            f"query gate is {'present' if queries.gate is not None else 'absent'} but the items' gate is "
            f"{'present' if gated else 'absent'}; their product needs both or neither"
        )
    if queries.gate is not None and queries.gate.shape[1] != num_pairs:
        raise ValueError(f"query gate has {queries.gate.shape[1]} pairs; expected {num_pairs}")


def check_shapes(queries: QueryStates, items: ItemStates, pair_gate: PairGate | None) -> int:
    """Check that all three fit together and return P. Raises ValueError as the two checks above do."""
    num_pairs = check_items(items, pair_gate)
    _, num_item_components, width = items.components.shape
    check_queries(
        queries,
        num_pairs=num_pairs,
        num_item_components=num_item_components,
        width=width,
        gated=items.gate is not None,
    )
    return num_pairs

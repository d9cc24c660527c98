"""Attribute filters in every algorithm: against a loop over all items in float64, through changes and a merge."""

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.by_name import known_algorithms, make_indexes, parse_algorithm
from services.algorithms.indexes.mutable.index import MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.attributes import Comparison, Condition, Kind, Value
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import ItemStates
from services.offline.training.codebooks.inverted_file import catalogue_codebooks

X = 300
KINDS = {"price": Kind.NUMBER, "released": Kind.TIME, "language": Kind.TAG}
SIZES = {"N": "20", "C": "7", "N1": "5", "N2": "20"}
ALGORITHMS = [
    f"{name}({','.join(SIZES[size] for size in form.rstrip(')').split(','))})" if form else name
    for name, _, form in (text.partition("(") for text in known_algorithms())
]
FILTERS = {
    "cheap": [Condition("price", Comparison.AT_MOST, (20.0,))],
    "rare": [Condition("price", Comparison.AT_MOST, (20.0,)), Condition("language", Comparison.ONE_OF, ("fr",))],
    "new": [Condition("released", Comparison.AT_LEAST, (10**12,)), Condition("price", Comparison.PRESENT)],
    "not": [Condition("language", Comparison.NONE_OF, ("en", "unknown")), Condition("price", Comparison.ABSENT)],
    "nothing": [Condition("price", Comparison.ABOVE, (1e9,))],
}


def some_values(rng: np.random.Generator) -> dict[str, Value]:
    values: dict[str, Value] = {
        "price": float(rng.integers(100)),
        "released": int(rng.integers(2)) * 10**12,
        "language": rng.choice(["en", "de", "en", "en", "fr"]).item(),
    }
    return {name: value for name, value in values.items() if rng.random() < 0.8}


@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_answer_is_that_of_a_loop_over_all_items(algorithm: str, filtered: str) -> None:
    rng = np.random.default_rng(7)
    p_q, p_x = (1, 1) if algorithm.startswith("quantized(") else (2, 2)
    items, queries = make_items(rng, 2 * X, p_q, p_x, 8, spread=0.5), make_queries(rng, 3, p_q, p_x, 8)
    gate = make_pair_gate(rng, p_q * p_x, 6) if p_q * p_x > 1 else None
    ids = [f"i{number:03d}" for number in range(X)]
    exact = mol_scores_reference(queries, items, gate).numpy()
    held: dict[str, tuple[int, dict[str, Value]]] = {}

    def batch(numbers: np.ndarray, states: np.ndarray) -> ItemBatch:
        values = [some_values(rng) for _ in numbers]
        held.update((ids[number], (state, one)) for number, state, one in zip(numbers, states, values, strict=True))
        of = ItemStates(components=items.components[states], gate=None if items.gate is None else items.gate[states])
        attributes = AttributeTable.of(KINDS, values)
        return ItemBatch(item_ids=[ids[number] for number in numbers], states=of, attributes=attributes)

    first = np.arange(X - 60)
    codebooks = catalogue_codebooks(items, gate)
    index = MutableIndex(
        batch(first, first),
        gate,
        model_version="m",
        build=lambda scorer, _: make_indexes(
            [parse_algorithm(algorithm)], scorer, np.arange(scorer.num_items), codebooks=codebooks
        ),
    )
    for turn in range(3):
        numbers = rng.choice(X, 50, replace=False)
        index.apply(upserts=batch(numbers, X + numbers))
        where = FILTERS[filtered]
        passing = [item_id for item_id, (_, one) in held.items() if all(c.holds(one.get(c.name)) for c in where)]
        answer = index.search(queries, 10, ItemFilter(where=where))
        for query, (found, certificate) in enumerate(zip(answer.item_ids, answer.certificates, strict=True)):
            scores = {item_id: exact[query, held[item_id][0]] for item_id in passing}
            assert set(found) <= scores.keys()
            best = sorted(scores, key=lambda item_id: (-scores[item_id], item_id))[:10]
            if certificate.gap is not None:
                assert len(found) == len(best)
                assert not best or scores[best[-1]] <= scores[found[-1]] + certificate.gap + 1e-9
            if certificate.kind == "exact":
                assert list(found) == best
        if turn == 1:
            index.merge()

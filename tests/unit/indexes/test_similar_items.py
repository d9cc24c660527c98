"""Items like an item: what a loop in float64 over every living item would say."""

import numpy as np
import pytest
from mutable_scene import CATEGORIES, MODEL, States

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable.index import MutableIndex, only
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.lookup import SimilarItems, components_of, similar_items
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.rules.attributes import Comparison, Condition, Kind
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import ItemStates

EVERYTHING = ItemFilter()
KINDS = {"number": Kind.NUMBER}
Catalogue = dict[str, tuple[np.ndarray, tuple[str, ...]]]


def naive(catalogue: Catalogue, item_id: str, k: int, allowed: set[str]) -> list[tuple[str, float]]:
    def directions(components: np.ndarray) -> np.ndarray:
        lengths = np.linalg.norm(components.astype(np.float64), axis=-1, keepdims=True)
        return components / np.where(lengths > 0, lengths, 1)

    wanted = directions(catalogue[item_id][0])
    scores = {
        one: float((directions(components) * wanted).sum() / len(wanted))
        for one, (components, _) in catalogue.items()
        if one != item_id and one in allowed
    }
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:k]


@pytest.fixture(params=[(4, 2, 8), (1, 1, 6)], ids=["mixture", "dot product"])
def changed(request: pytest.FixtureRequest) -> tuple[MutableIndex, Catalogue]:
    """An index after updates, removals, new items and a merge; and what it holds."""
    p_q, p_x, d = request.param
    rng = np.random.default_rng(0)
    states = States(rng, p_q=p_q, p_x=p_x, d=d, count=400)
    catalogue: Catalogue = {}

    def batch(ids: list[str], numbers: list[int], scale: float = 1.0) -> ItemBatch:
        of = states.of(numbers)
        of = ItemStates(components=of.components * np.float32(scale), gate=of.gate)
        categories = [(CATEGORIES[number % 5],) for number in numbers]
        for row, one in enumerate(ids):
            catalogue[one] = (of.components[row], categories[row])
        attributes = AttributeTable.of(KINDS, [{"number": float(int(one[1:]))} for one in ids])
        return ItemBatch(item_ids=ids, states=of, categories=categories, attributes=attributes)

    first = batch([f"i{n:03d}" for n in range(300)], list(range(300)))
    index = MutableIndex(first, states.pair_gate, model_version=MODEL, build=only(BruteForce))
    for turn in range(6):
        ids = [f"i{n:03d}" for n in rng.choice(330, 40, replace=False)]
        gone = [one for one in ids[30:] if one in catalogue]
        index.apply(upserts=batch(ids[:30], rng.integers(300, 400, 30).tolist(), 0.5), removals=gone)
        for one in gone:
            del catalogue[one]
        if turn == 3:
            index.merge()
    return index, catalogue


def similar(index: MutableIndex, item_id: str, k: int, wanted: ItemFilter) -> SimilarItems:
    components = components_of(index.version, item_id)
    assert components is not None
    return similar_items(index.version, item_id, components, k, wanted)


def test_the_answer_is_the_naive_one(changed: tuple[MutableIndex, Catalogue]) -> None:
    index, catalogue = changed
    for k in (1, 10, 1_000):
        for item_id in sorted(catalogue)[::17]:
            found = similar(index, item_id, k, EVERYTHING)
            wanted = naive(catalogue, item_id, k, set(catalogue))
            np.testing.assert_allclose(found.similarities, [score for _, score in wanted], atol=1e-12)
            assert found.item_ids == [one for one, _ in wanted] or np.diff(found.similarities).max() > -1e-12
            assert item_id not in found.item_ids


def test_filters_act_before_the_choice(changed: tuple[MutableIndex, Catalogue]) -> None:
    index, catalogue = changed
    some = sorted(catalogue)[:5]
    by_category = {one for one, (_, categories) in catalogue.items() if categories == ("b",)}
    item_id = sorted(catalogue)[50]
    for wanted, allowed in (
        (ItemFilter(allow_categories=("b",)), by_category),
        (ItemFilter(where=(Condition("number", Comparison.BELOW, (90.0,)),)), {f"i{n:03d}" for n in range(90)}),
        (ItemFilter(allow_item_ids=tuple(some)), set(some)),
        (ItemFilter(deny_item_ids=tuple(some)), set(catalogue) - set(some)),
        (ItemFilter(exclude_seen=True, seen_item_ids=tuple(some)), set(catalogue) - set(some)),
    ):
        found = similar(index, item_id, 20, wanted)
        expected = naive(catalogue, item_id, 20, allowed)
        np.testing.assert_allclose(found.similarities, [score for _, score in expected], atol=1e-12)
        assert set(found.item_ids) <= allowed


def test_an_item_that_is_not_served_has_none(changed: tuple[MutableIndex, Catalogue]) -> None:
    index, catalogue = changed
    gone = next(f"i{n:03d}" for n in range(330) if f"i{n:03d}" not in catalogue)
    assert components_of(index.version, gone) is None
    assert components_of(index.version, "nowhere") is None

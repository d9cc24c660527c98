"""The popular fallback obeys the same filters as everything else."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import pytest
from between_lines import read_between_lines
from gateway_scene import ATTRIBUTES, CATEGORIES, COUNTS, ITEMS, Scene
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.rules.attributes import Comparison, Condition, Kind, Values
from services.algorithms.rules.filters import ItemFilter, ListedItems, passing
from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import Degradation, RecommendQuery
from services.gateway.recommend.popular import TRAINING_COUNTS, PopularItems


def put(
    catalogue: PopularItems, item_id: str, categories: Sequence[str] = (), attributes: Values | None = None, **more: Any
) -> None:
    item = CatalogueItem(item_id=item_id, categories=tuple(categories), attributes=attributes or {}, **more)
    catalogue.describe([item])


async def test_popular_items_say_so_until_what_is_withdrawn_is_known(scene: Scene) -> None:
    scene.popular.knows_withdrawn = False
    unknown = await scene.recommend(RecommendQuery(user_id="nobody", k=2))
    personal = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    scene.popular.caught_up()
    known = await scene.recommend(RecommendQuery(user_id="nobody", k=2))
    assert list(unknown.degradations) == [Degradation.POPULAR_FALLBACK, Degradation.PARTIAL_CATALOGUE]
    # Candidates and reranker know what is withdrawn, or do not answer.
    assert list(personal.degradations) == []
    assert list(known.degradations) == [Degradation.POPULAR_FALLBACK]


@pytest.mark.parametrize("is_served", [True, False])
def test_a_reader_finds_a_new_item_whole_or_not_at_all(is_served: bool) -> None:
    catalogue = PopularItems(ITEMS, COUNTS, CATEGORIES, ATTRIBUTES)
    answers: list[list[list[str]]] = []

    def read() -> None:
        wanted = [ItemFilter(), ItemFilter(deny_categories=("x",)), ItemFilter(allow_categories=("x",))]
        found = [[item.item_id for item in catalogue.top(10, one, [], 0)] for one in wanted]
        answers.append([*found, catalogue.newest(0, 10)])

    def write() -> None:
        put(catalogue, "n", ("x",), {"price": 1.0}, withdrawn=not is_served, written_ms=1)

    read()
    read_between_lines(write, read, file=".py")
    read()
    for number, (before, after) in enumerate(zip(answers[0], answers[-1], strict=True)):
        assert all(answer[number] in (before, after) for answer in answers)
    assert answers[-1][3] == (["n"] if is_served else [])


@pytest.mark.parametrize("title", ["Same again", "Another"])
def test_a_reader_finds_an_item_by_title_while_its_title_is_replaced(title: str) -> None:
    catalogue = PopularItems(["a"], np.ones(1, dtype=np.int64), [()], titles=["Same again"])
    put(catalogue, "a", title="First change")
    found: list[bool] = []

    def read() -> None:
        by = [bool(catalogue.rows.starting(np.array([0]), one)[0]) for one in (b"first", title[:4].lower().encode())]
        found.append(any(by))

    read_between_lines(lambda: put(catalogue, "a", title=title), read, file=".py")
    assert all(found)


NAMES = [f"item-{number}" for number in range(12)]
NEW = [f"new-{number}" for number in range(4)]
_SOME = st.lists(st.sampled_from(["x", "y", "z"]), unique=True, max_size=3)
_CHANGES = st.one_of(
    st.dictionaries(st.sampled_from([*NAMES, *NEW, "unheard of"]), st.floats(0.001, 20), max_size=8),
    st.tuples(st.sampled_from([*NAMES, *NEW]), _SOME, st.booleans()),
)
_FILTERS = st.builds(
    ItemFilter,
    allow_categories=_SOME.map(tuple),
    deny_categories=_SOME.map(tuple),
    allow_item_ids=st.lists(st.sampled_from([*NAMES, *NEW]), max_size=5).map(tuple),
    deny_item_ids=st.lists(st.sampled_from([*NAMES, *NEW]), max_size=5).map(tuple),
)


@given(
    counts=st.lists(st.integers(0, 3) | st.integers(0, 2_000), min_size=12, max_size=12),
    categories=st.lists(_SOME, min_size=12, max_size=12),
    changes=st.lists(_CHANGES, max_size=12),
    wanted=_FILTERS,
    max_per_category=st.integers(0, 3),
    shuffled=st.permutations(NAMES),
)
def test_columns_answer_as_lists_do_whatever_changed(
    counts: list[int],
    categories: list[list[str]],
    changes: list[dict[str, float] | tuple[str, list[str], bool]],
    wanted: ItemFilter,
    max_per_category: int,
    shuffled: list[str],
) -> None:
    catalogue = PopularItems(shuffled, np.array(counts), categories)
    now: dict[str, float] = {}
    of = {item_id: tuple(names) for item_id, names in zip(shuffled, categories, strict=True)}
    trained = {item_id: TRAINING_COUNTS * count for item_id, count in zip(shuffled, counts, strict=True)}
    order = sorted(shuffled, key=lambda item_id: (-trained[item_id], item_id))
    hidden = set()
    for change in changes:
        if isinstance(change, dict):
            now = {item_id: count for item_id, count in change.items() if item_id in of}
            catalogue.take(change)
        else:
            item_id, names, is_served = change
            of[item_id] = tuple(names)
            put(catalogue, item_id, names, withdrawn=not is_served, written_ms=len(order))
            (hidden.discard if is_served else hidden.add)(item_id)
            if item_id not in order:
                order.append(item_id)
    catalogue.take(now)
    total = {item_id: trained.get(item_id, 0.0) + now.get(item_id, 0.0) for item_id in order}
    expected: list[str] = []
    for item_id in sorted(order, key=lambda one: -total[one]):
        taken = [name for one in expected for name in of[one]]
        if (
            item_id not in hidden
            and item_id not in wanted.deny_item_ids
            and (not wanted.allow_item_ids or item_id in wanted.allow_item_ids)
            and (not wanted.allow_categories or set(wanted.allow_categories) & set(of[item_id]))
            and not set(wanted.deny_categories) & set(of[item_id])
            and not (max_per_category and any(taken.count(name) >= max_per_category for name in of[item_id]))
        ):
            expected.append(item_id)
    found = catalogue.top(20, wanted, [], max_per_category)
    assert [item.item_id for item in found] == expected
    shares = [total[item_id] / (sum(total.values()) or 1) for item_id in expected]
    assert [item.score for item in found] == pytest.approx(shares)
    asked = [*order, "unheard of", *NEW]
    assert catalogue.categories_of(asked) == [of.get(item_id, ()) for item_id in asked]
    by_id, by_name = ItemFilter(allow_item_ids=("item-3", "new-1")), ItemFilter(allow_categories=("x", "z"))
    assert [mask.tolist() for mask in catalogue.named(asked, [by_id, by_name])] == [
        [item_id in ("item-3", "new-1") for item_id in asked],
        [bool({"x", "z"} & set(of.get(item_id, ()))) for item_id in asked],
    ]
    assert catalogue.newest(0, 20) == [one for one in reversed(order) if one in NEW and one not in hidden]
    assert {one for one, is_out in zip(asked, catalogue.are_withdrawn(asked), strict=True) if is_out} == hidden


def test_many_items_answer_as_lists_do() -> None:
    draw = np.random.default_rng(5)
    size, names, makers = 1_500, [f"c{number}" for number in range(9)], ["x", "y", "z"]
    ids = [f"i{number}" for number in draw.permutation(size + 100).tolist()]
    counts = draw.integers(0, 200, size)

    def drawn() -> tuple[tuple[str, ...], Values]:
        price = {"price": float(draw.integers(0, 100))} if draw.random() < 0.9 else {}
        chosen = draw.choice(9, draw.integers(0, 3), replace=False, p=np.arange(1, 10) / 45)
        return tuple(names[number] for number in chosen.tolist()), price | {"maker": str(draw.choice(makers))}

    of = {item_id: drawn() for item_id in ids[:size]}
    kinds = {"price": Kind.NUMBER, "maker": Kind.TAG}
    catalogue = PopularItems(
        ids[:size], counts, [one for one, _ in of.values()], AttributeTable.of(kinds, [one for _, one in of.values()])
    )
    trained = dict(zip(ids, [*(TRAINING_COUNTS * counts).tolist(), *[0.0] * 100], strict=True))
    order = sorted(ids[:size], key=lambda item_id: (-trained[item_id], item_id))
    now: dict[str, float] = {}
    for answered in range(150):
        if answered % 30 == 7:
            now = dict(
                zip(draw.choice(ids, 400, replace=False).tolist(), draw.exponential(3, 400).tolist(), strict=True)
            )
            catalogue.take(now)
            now = {item_id: count for item_id, count in now.items() if item_id in of}
        for item_id in draw.choice(ids, 2 * (answered % 3)).tolist():
            order += [] if item_id in of else [item_id]
            of[item_id] = drawn() if draw.random() < 0.7 else of.get(item_id, ((), {}))
            put(catalogue, item_id, *of[item_id], withdrawn=bool(draw.random() >= 0.8))
        wanted = ItemFilter(
            allow_item_ids=draw.choice(ids, draw.choice([0, 0, 0, 700])).tolist(),
            deny_item_ids=draw.choice(ids, draw.choice([0, 300])).tolist(),
            allow_categories=draw.choice(names, draw.choice([0, 0, 1, 3])).tolist(),
            deny_categories=draw.choice(names, draw.choice([0, 0, 3, 8])).tolist(),
            where=[
                Condition("price", Comparison.BELOW, (float(draw.integers(0, 100)),)),
                Condition("maker", Comparison.NONE_OF, ("x",)),
            ][: draw.choice([0, 0, 1, 2])],
        )
        k, limit = int(draw.choice([1, 10, 100, 1_000])), int(draw.choice([0, 0, 1, 20]))
        total = {item_id: trained[item_id] + now.get(item_id, 0.0) for item_id in order}
        expected: list[str] = []
        taken = Counter[str]()
        by_count = sorted(order, key=lambda one: -total[one])
        listed = ListedItems(by_count, [of[one][0] for one in by_count], [of[one][1] for one in by_count])
        is_allowed = passing(wanted, listed)
        for item_id in compress(by_count, is_allowed & ~np.array(catalogue.are_withdrawn(by_count))):
            if not (limit and any(taken[name] >= limit for name in of[item_id][0])):
                expected.append(item_id)
                taken.update(of[item_id][0])
        found = catalogue.top(k, wanted, [], limit)
        assert [item.item_id for item in found] == expected[:k]
        shares = [total[item_id] / sum(total.values()) for item_id in expected[:k]]
        assert [item.score for item in found] == pytest.approx(shares)


@given(
    bundled=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["", "A", "B"])),
    puts=st.lists(st.tuples(st.sampled_from([*NAMES, *NEW]), st.sampled_from(["A", "B", "C"]))),
)
def test_titles_are_those_of_a_dictionary(bundled: dict[str, str], puts: list[tuple[str, str]]) -> None:
    counts, expected = np.ones(len(bundled), dtype=np.int64), dict(bundled)
    titles = Strings.of(bundled.values())
    catalogue = PopularItems(ItemIds.of(bundled), counts, [()] * len(bundled), titles=titles)
    for item_id, title in puts:
        put(catalogue, item_id, title=title)
        expected[item_id] = title
    for asked in ([*NAMES, *NEW, *NAMES], NEW, NAMES[:2], []):
        assert catalogue.titles_of(asked) == [expected.get(item_id, "") for item_id in asked]


@pytest.mark.parametrize(("item_id", "categories"), [("new", ("x",)), ("i0", ()), ("i0", ("y",)), ("i1", ("x", "y"))])
def test_a_record_does_not_cost_memory_for_each_item_of_its_category(item_id: str, categories: tuple[str, ...]) -> None:
    item_ids = [f"i{number}" for number in range(20_000)]
    catalogue = PopularItems(item_ids, np.ones(20_000, dtype=np.int64), [("x",)] * 20_000)
    # Lists grow by an eighth at a time.
    put(catalogue, "the first new one", ("x",))
    tracemalloc.start()
    put(catalogue, item_id, categories)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A copy of the category would be 160 kB.
    assert peak_bytes < 20_000
    wanted = ItemFilter(allow_categories=("x",), allow_item_ids=(item_id,))
    assert [item.item_id for item in catalogue.top(1, wanted, [], 0)] == ([item_id] if "x" in categories else [])


def test_neither_a_record_nor_an_answer_costs_memory_for_each_hidden_item() -> None:
    item_ids = [f"i{number}" for number in range(20_000)]
    catalogue = PopularItems(item_ids, np.ones(20_000, dtype=np.int64), [()] * 20_000)
    for item_id in item_ids[:-5]:
        put(catalogue, item_id, withdrawn=True)
    tracemalloc.start()
    put(catalogue, item_ids[-1], withdrawn=True)
    put(catalogue, item_ids[0])
    answered = [item.item_id for item in catalogue.top(10, ItemFilter(), [], 0)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(answered) == sorted([item_ids[0], *item_ids[-5:-1]])
    # A copy of the hidden set would be a megabyte.
    assert peak_bytes < 400_000

"""What a filter means in every process: 4,000 random ones against a loop over plain values, items changed or not."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from services.algorithms.indexes.mutable.index import MutableIndex
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.rules.attributes import Comparison, Condition, Kind, Value
from services.algorithms.rules.filters import ItemFilter, ListedItems, passing
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates
from services.contracts.topics.items import CatalogueItem
from services.gateway.recommend.popular import PopularItems
from services.generator.domain.items import ItemTable

FILTERS = 4_000
IDS = [f"i{row}" for row in range(24)]
NEW = ["new-1", "new-2"]
NAMES = ["a", "b", "c", "d", "é"]
KINDS = {"price": Kind.NUMBER, "released": Kind.TIME, "language": Kind.TAG, "maker": Kind.TAG}
VALUES: dict[str, list[Value]] = {
    "price": [-7.0, 0.0, 0.1 + 0.2, 0.3, 20.0],
    "released": [-1, 0, 10**12, 10**12 + 1],
    "language": ["en", "de", "a", "7"],
    "maker": ["x", "en", "7"],
}
ORDERED = [Comparison.AT_MOST, Comparison.AT_LEAST, Comparison.BELOW, Comparison.ABOVE]


@dataclass
class Item:
    categories: tuple[str, ...]
    attributes: dict[str, Value]
    is_served: bool = True


def drawn(draw: random.Random) -> Item:
    return Item(
        categories=tuple(draw.sample(NAMES, draw.randrange(3))),
        attributes={name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.7},
    )


def a_condition(draw: random.Random) -> Condition:
    name = draw.choice(list(KINDS))
    kinds = [Comparison.ONE_OF, Comparison.NONE_OF, Comparison.PRESENT, Comparison.ABSENT]
    comparison = draw.choice(kinds + ([] if KINDS[name] is Kind.TAG else ORDERED))
    values: list[Value] = [*VALUES[name], {Kind.NUMBER: 5.5, Kind.TIME: 77, Kind.TAG: "unknown"}[KINDS[name]]]
    if comparison in (Comparison.PRESENT, Comparison.ABSENT):
        return Condition(name, comparison)
    count = 1 if comparison in ORDERED else draw.randint(1, 3)
    return Condition(name, comparison, tuple(draw.sample(values, count)))


def a_filter(draw: random.Random) -> ItemFilter:
    ids, names = [*IDS, *NEW, "unknown"], [*NAMES, "unknown"]

    def some(texts: list[str], most: int) -> list[str]:
        return draw.choices(texts, k=draw.randint(1, most)) if draw.random() < 0.4 else []

    return ItemFilter(
        allow_item_ids=some(ids, 20),
        deny_item_ids=some(ids, 6),
        allow_categories=some(names, 3),
        deny_categories=some(names, 2),
        where=[a_condition(draw) for _ in range(draw.choice([0, 1, 1, 2, 3]))],
        exclude_seen=draw.random() < 0.7,
        seen_item_ids=some(ids, 6),
    )


def meets(value: Value | None, condition: Condition) -> bool:
    wanted = condition.values
    match condition.comparison:
        case Comparison.PRESENT:
            return value is not None
        case Comparison.ABSENT:
            return value is None
        case Comparison.ONE_OF:
            return value in wanted
        case Comparison.NONE_OF:
            return value not in wanted
    if value is None:
        return False
    one = wanted[0]
    assert not isinstance(value, str)
    assert not isinstance(one, str)
    match condition.comparison:
        case Comparison.AT_MOST:
            return value <= one
        case Comparison.AT_LEAST:
            return value >= one
        case Comparison.BELOW:
            return value < one
    return value > one


def passes(item_id: str, item: Item, wanted: ItemFilter) -> bool:
    if wanted.allow_item_ids and item_id not in wanted.allow_item_ids:
        return False
    if item_id in wanted.deny_item_ids or (wanted.exclude_seen and item_id in wanted.seen_item_ids):
        return False
    if wanted.allow_categories and not any(name in wanted.allow_categories for name in item.categories):
        return False
    if any(name in wanted.deny_categories for name in item.categories):
        return False
    return all(meets(item.attributes.get(one.name), one) for one in wanted.where)


@dataclass(frozen=True, kw_only=True)
class Change:
    item_id: str
    components: FloatArray
    gate: None = None
    model_share: float = 0.0
    num_interactions: int = 1
    dropped: bool = False


class Processes:
    """The gateway's popular items, the generator's table, and an index with its pool, over the same items."""

    def __init__(self, items: dict[str, Item]) -> None:
        self.items = items
        states = ItemStates(components=np.ones((len(IDS), 1, 2), np.float32) / 2)
        columns = [items[item_id].categories for item_id in IDS]
        table = AttributeTable.of(KINDS, [items[item_id].attributes for item_id in IDS])
        self.popular = PopularItems(IDS, np.arange(len(IDS)), columns, table)
        # Half of the items have a document; one document is of no item.
        self.table = ItemTable(IDS, IDS, columns, ["text", *IDS[::2]], ["text"] * (1 + len(IDS[::2])), table)
        base = Catalogue(
            model_version="m", item_ids=IDS, titles=IDS, categories=columns, states=states, pair_gate=None,
            attributes=table,
        )  # fmt: skip
        self.live = LiveCatalogue(base, build=lambda items: {})

    def describe(self, item_id: str, item: Item) -> None:
        self.items[item_id] = item
        one = CatalogueItem(
            item_id=item_id, title=item_id, categories=item.categories, attributes=item.attributes,
            available=item.is_served,
        )  # fmt: skip
        self.popular.describe([one])
        self.table.describe([one])
        self.live.describe([one])

    def answers(self, wanted: ItemFilter) -> dict[str, set[str]]:
        items = list(self.items)
        rows = np.flatnonzero(self.table.allowed(wanted))
        in_generator = set(self.table.ids(rows.tolist())) - {"text"}
        seen = set(wanted.seen_item_ids) if wanted.exclude_seen else set()
        pool = self.live.passing(wanted, items)
        return {
            "popular": {item.item_id for item in self.popular.top(100, wanted, wanted.seen_item_ids, 0)},
            "generator": in_generator - seen,
            "pool": {item_id for item_id, is_in in zip(items, pool.tolist(), strict=True) if is_in},
            "index": in_index(self.live.index, wanted),
        }


def in_index(index: MutableIndex, wanted: ItemFilter) -> set[str]:
    (found,) = index.version.search(QueryStates(components=np.ones((1, 1, 2), np.float32) / 2), 100, wanted).item_ids
    return set(found)


@pytest.mark.parametrize("is_changed", [False, True])
def test_every_process_answers_as_a_loop_over_plain_values(is_changed: bool) -> None:
    draw = random.Random(7)
    processes = Processes({item_id: drawn(draw) for item_id in IDS})
    states = QueryStates(components=np.ones((1, 1, 2), np.float32) / 2)
    for asked in range(FILTERS // 2):
        if is_changed and asked % 10 == 0:
            item_id = draw.choice([*IDS, *NEW])
            processes.describe(item_id, replace(drawn(draw), is_served=draw.random() < 0.8))
            if item_id in NEW:
                change = Change(item_id=item_id, components=states.components[0])
                processes.live.apply(asked, [change])
        wanted = a_filter(draw)
        named = {item_id for item_id, item in processes.items.items() if passes(item_id, item, wanted)}
        served = {item_id for item_id in named if processes.items[item_id].is_served}
        expected = {"popular": served, "generator": served, "index": served, "pool": named}
        assert processes.answers(wanted) == expected, (asked, wanted)


def test_an_open_filter_is_open() -> None:
    assert ItemFilter(seen_item_ids=["i0"], exclude_seen=False).is_open


def test_unknown_ids_match_nothing_and_an_allow_list_of_them_allows_nothing() -> None:
    assert not passing(ItemFilter(allow_item_ids=["unknown"]), ListedItems(IDS, [()] * len(IDS))).any()


def test_lists_beyond_the_limit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"len\(seen_item_ids\)=20001 allowed: 0-20000"):
        ItemFilter(seen_item_ids=["x"] * 20_001).check(KINDS)
    with pytest.raises(ValueError, match=r"len\(deny_categories\)=1001 allowed: 0-1000"):
        ItemFilter(deny_categories=["x"] * 1_001).check(KINDS)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (("colour", Comparison.PRESENT), r"where\[0\]: name='colour' allowed: price \(number\), released \(time\)"),
        (("price", Comparison.ONE_OF, ("cheap",)), r"'price' one of 'cheap': a tag; allowed: a number"),
        (("price", Comparison.AT_MOST, (20,)), "'price' at most 20: a time; allowed: a number"),
        (("language", Comparison.AT_MOST, ("en",)), "'language' at most 'en': a tag; allowed: one of, none of"),
        (("price", Comparison.AT_MOST, (float("nan"),)), "nan allowed: a finite number"),
        (("price", Comparison.AT_MOST, ()), "'price' at most: 0 values; allowed: 1"),
        (("price", Comparison.ABSENT, (1.0,)), "'price' absent: 1 values; allowed: none"),
        (("price", Comparison.ONE_OF, (1.0, "x")), "values are number and tag; allowed: one kind"),
    ],
)
def test_a_condition_that_makes_no_sense_is_refused_by_name(condition: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ItemFilter(where=[Condition(*condition)]).check(KINDS)

"""Filters inside a scan and over a pool: the same verdict twice, by two routes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.indexes.mutable.segment import Segment, SegmentItems, rows_of
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.categories import CategoryLists
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.rules.attributes import Comparison, Condition, Kind
from services.algorithms.rules.filters import ItemFilter, ListedItems, passing
from services.algorithms.scoring.states import ItemStates

IDS = [f"i{row}" for row in range(12)]
CATEGORIES = [("a",), ("a", "b"), ("b",), (), ("c",), ("a", "c"), ("b", "b"), ("c",), ("a",), (), ("b",), ("d",)]
CODES = {"a": 0, "b": 1, "c": 2, "d": 3}
TAG_CODES: dict[str, dict[str, int]] = {"language": {"unused": 0}}
KINDS = {"price": Kind.NUMBER, "released": Kind.TIME, "language": Kind.TAG}
PRICES, TIMES, TAGS = [1.0, 2.0, 0.1 + 0.2, None], [0, 10**12, 10**12 + 1, None], ["en", "de", "a", None]
ATTRIBUTES = [
    {
        name: value
        for name, value in zip(KINDS, (PRICES[row % 4], TIMES[row // 4], TAGS[row % 3 + row // 6 % 2]), strict=True)
        if value is not None
    }
    for row in range(12)
]
# In order of ids, as a segment keeps its rows.
ORDER = sorted(range(12), key=IDS.__getitem__)
SEGMENT = Segment(
    rows_of(
        ItemIds.of(IDS),
        ItemStates(components=np.ones((12, 1, 2), dtype=np.float32)),
        CategoryLists.of([tuple({CODES[name] for name in names}) for names in CATEGORIES]),
        AttributeTable.of(KINDS, ATTRIBUTES).recoded(TAG_CODES),
    ),
    None,
)

some_ids = st.lists(st.sampled_from([*IDS, "unknown"]), max_size=5)
ordered = [Comparison.AT_MOST, Comparison.AT_LEAST, Comparison.BELOW, Comparison.ABOVE]
many, none = [Comparison.ONE_OF, Comparison.NONE_OF], [Comparison.PRESENT, Comparison.ABSENT]
some_conditions = st.lists(
    st.one_of(
        st.builds(Condition, st.sampled_from(sorted(KINDS)), st.sampled_from(none)),
        *(
            st.builds(
                Condition,
                st.just(name),
                st.sampled_from(ordered + many),
                st.tuples(st.sampled_from(values)),
            )
            for name, values in (("price", [1.0, 0.3, 0.1 + 0.2, -7.0]), ("released", [0, 10**12 + 1, 5]))
        ),
        st.builds(
            Condition,
            st.just("language"),
            st.sampled_from(many),
            st.lists(st.sampled_from(["en", "de", "a", "unknown"]), min_size=1, max_size=3).map(tuple),
        ),
    ),
    max_size=3,
)
some_categories = st.lists(st.sampled_from(["a", "b", "c", "d", "unknown"]), max_size=3)


def meets(value: float | int | str | None, condition: Condition) -> bool:
    comparison, values = condition.comparison, condition.values
    if comparison in (Comparison.PRESENT, Comparison.ABSENT):
        return (value is None) == (comparison is Comparison.ABSENT)
    if comparison in many:
        return (value in values) == (comparison is Comparison.ONE_OF)
    order = {
        Comparison.AT_MOST: lambda a, b: a <= b,
        Comparison.AT_LEAST: lambda a, b: a >= b,
        Comparison.BELOW: lambda a, b: a < b,
        Comparison.ABOVE: lambda a, b: a > b,
    }
    return value is not None and order[comparison](value, values[0])


def passes(row: int, wanted: ItemFilter) -> bool:
    names = set(CATEGORIES[row])
    return (
        (not wanted.allow_item_ids or IDS[row] in wanted.allow_item_ids)
        and IDS[row] not in wanted.deny_item_ids
        and (not wanted.allow_categories or not names.isdisjoint(wanted.allow_categories))
        and names.isdisjoint(wanted.deny_categories)
        and all(meets(ATTRIBUTES[row].get(one.name), one) for one in wanted.where)
        and not (wanted.exclude_seen and IDS[row] in wanted.seen_item_ids)
    )


@given(
    allow_item_ids=some_ids,
    deny_item_ids=some_ids,
    allow_categories=some_categories,
    deny_categories=some_categories,
    where=some_conditions,
    seen_item_ids=some_ids,
    exclude_seen=st.booleans(),
)
def test_scan_and_pool_follow_the_rules(**rules: object) -> None:
    wanted = ItemFilter(**rules)  # type: ignore[arg-type]
    expected = [passes(row, wanted) for row in range(12)]
    in_scan = passing(wanted, SegmentItems(SEGMENT, CODES, TAG_CODES)).tolist()
    assert in_scan == [expected[row] for row in ORDER]
    pool = [11, 3, 3, 0, 7]
    listed = ListedItems(
        [IDS[row] for row in pool], [CATEGORIES[row] for row in pool], [ATTRIBUTES[row] for row in pool]
    )
    verdict = passing(wanted, listed)
    assert verdict.tolist() == [expected[row] for row in pool]


def test_an_open_filter_is_open() -> None:
    assert ItemFilter(seen_item_ids=["i0"], exclude_seen=False).is_open


def test_unknown_ids_match_nothing_and_an_allow_list_of_them_allows_nothing() -> None:
    assert not passing(ItemFilter(allow_item_ids=["unknown"]), ListedItems(IDS, CATEGORIES)).any()


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

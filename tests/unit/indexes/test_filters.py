"""Filters inside a scan and over a pool: the same verdict twice, by two routes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.filters import ItemFilter, passing
from services.algorithms.indexes.mutable.segment import HashedFilter, Segment, hash_ids, rows_of
from services.algorithms.states import ItemStates

IDS = [f"i{row}" for row in range(12)]
CATEGORIES = [("a",), ("a", "b"), ("b",), (), ("c",), ("a", "c"), ("b", "b"), ("c",), ("a",), (), ("b",), ("d",)]
CODES = {"a": 0, "b": 1, "c": 2, "d": 3}
# In order of ids, as a segment keeps its rows.
ORDER = sorted(range(12), key=IDS.__getitem__)
SEGMENT = Segment(
    rows_of(
        IDS,
        hash_ids(IDS),
        ItemStates(components=np.ones((12, 1, 2), dtype=np.float32)),
        [tuple({CODES[name] for name in names}) for names in CATEGORIES],
    ),
    None,
)

some_ids = st.lists(st.sampled_from([*IDS, "unknown"]), max_size=5)
some_categories = st.lists(st.sampled_from(["a", "b", "c", "d", "unknown"]), max_size=3)


def passes(row: int, wanted: ItemFilter) -> bool:
    names = set(CATEGORIES[row])
    return (
        (not wanted.allow_item_ids or IDS[row] in wanted.allow_item_ids)
        and IDS[row] not in wanted.deny_item_ids
        and (not wanted.allow_categories or not names.isdisjoint(wanted.allow_categories))
        and names.isdisjoint(wanted.deny_categories)
        and not (wanted.exclude_seen and IDS[row] in wanted.seen_item_ids)
    )


@given(
    allow_item_ids=some_ids,
    deny_item_ids=some_ids,
    allow_categories=some_categories,
    deny_categories=some_categories,
    seen_item_ids=some_ids,
    exclude_seen=st.booleans(),
)
def test_scan_and_pool_follow_the_rules(**rules: object) -> None:
    wanted = ItemFilter(**rules)  # type: ignore[arg-type]
    expected = [passes(row, wanted) for row in range(12)]
    hashed = HashedFilter.of(wanted, CODES)
    in_scan = [True] * 12 if hashed is None else SEGMENT.passing(hashed).tolist()
    assert in_scan == [expected[row] for row in ORDER]
    pool = [11, 3, 3, 0, 7]
    verdict = passing(wanted, [IDS[row] for row in pool], [CATEGORIES[row] for row in pool])
    assert verdict.tolist() == [expected[row] for row in pool]


def test_an_open_filter_costs_no_mask() -> None:
    assert HashedFilter.of(ItemFilter(seen_item_ids=["i0"]), CODES) is None


def test_unknown_ids_match_nothing_and_an_allow_list_of_them_allows_nothing() -> None:
    assert not passing(ItemFilter(allow_item_ids=["unknown"]), IDS, CATEGORIES).any()


def test_lists_beyond_the_limit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"len\(seen_item_ids\)=20001 allowed: 0-20000"):
        ItemFilter(seen_item_ids=["x"] * 20_001)
    with pytest.raises(ValueError, match=r"len\(deny_categories\)=1001 allowed: 0-1000"):
        ItemFilter(deny_categories=["x"] * 1_001)

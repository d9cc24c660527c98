"""Filters as masks over a catalogue and over a pool: the same verdict twice, by two routes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.filters import CatalogueRules, ItemFilter

IDS = [f"i{row}" for row in range(12)]
CATEGORIES = [("a",), ("a", "b"), ("b",), (), ("c",), ("a", "c"), ("b", "b"), ("c",), ("a",), (), ("b",), ("d",)]
RULES = CatalogueRules({item_id: row for row, item_id in enumerate(IDS)}, CATEGORIES)

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
def test_mask_and_pool_mask_follow_the_rules(**rules: object) -> None:
    wanted = ItemFilter(**rules)  # type: ignore[arg-type]
    expected = [passes(row, wanted) for row in range(12)]
    mask = RULES.mask(wanted)
    assert (expected if mask is None else mask.tolist()) == expected
    pool = np.array([11, 3, 3, 0, 7])
    assert RULES.mask_pool(wanted, pool).tolist() == [expected[row] for row in pool]


def test_an_open_filter_costs_no_mask() -> None:
    assert RULES.mask(ItemFilter(seen_item_ids=["i0"])) is None


def test_unknown_ids_match_nothing_and_an_allow_list_of_them_allows_nothing() -> None:
    mask = RULES.mask(ItemFilter(allow_item_ids=["unknown"]))
    assert mask is not None
    assert not mask.any()


def test_lists_beyond_the_limit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"len\(seen_item_ids\)=20001 allowed: 0-20000"):
        ItemFilter(seen_item_ids=["x"] * 20_001)
    with pytest.raises(ValueError, match=r"len\(deny_categories\)=1001 allowed: 0-1000"):
        ItemFilter(deny_categories=["x"] * 1_001)


def test_a_repeated_item_id_is_refused() -> None:
    with pytest.raises(ValueError, match="1 distinct item ids but categories of 2"):
        CatalogueRules({"a": 0}, [(), ()])

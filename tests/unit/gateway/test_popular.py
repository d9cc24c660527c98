"""The popular fallback obeys the same filters as everything else."""

import pytest
from gateway_scene import CATEGORIES, COUNTS, ITEMS, POPULAR

from services.gateway.domain import Filter
from services.gateway.popular import PopularItems

CATALOGUE = PopularItems(ITEMS, COUNTS, CATEGORIES)


@pytest.mark.parametrize(
    ("wanted", "seen", "max_per_category", "expected"),
    [
        (Filter(), [], 0, POPULAR),
        (Filter(), ["b", "nowhere"], 0, ["d", "c", "e", "f", "a"]),
        (Filter(exclude_seen=False), ["b"], 0, POPULAR),
        (Filter(allow_item_ids=("a", "c", "nowhere")), [], 0, ["c", "a"]),
        (Filter(allow_item_ids=("a", "c"), allow_categories=("y",)), [], 0, ["c"]),
        (Filter(deny_item_ids=("b", "d")), [], 0, ["c", "e", "f", "a"]),
        (Filter(allow_categories=("x", "y", "x")), [], 0, ["b", "d", "c", "a"]),
        (Filter(allow_categories=("nothing",)), [], 0, []),
        (Filter(deny_categories=("x",)), [], 0, ["c", "e", "f"]),
        (Filter(), [], 1, ["b", "c", "e", "f"]),
    ],
)
def test_popular_items_follow_the_filter(
    wanted: Filter, seen: list[str], max_per_category: int, expected: list[str]
) -> None:
    assert [item.item_id for item in CATALOGUE.top(10, wanted, seen, max_per_category)] == expected


def test_scores_are_shares_of_training() -> None:
    assert [item.score for item in CATALOGUE.top(2, Filter(), [], 0)] == [0.3, 0.3]


def test_an_untrained_catalogue_still_answers() -> None:
    catalogue = PopularItems(["b", "a"], COUNTS[:2] * 0, [(), ()])
    assert [(item.item_id, item.score) for item in catalogue.top(5, Filter(), [], 0)] == [("a", 0.0), ("b", 0.0)]

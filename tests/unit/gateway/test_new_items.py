"""Positions reserved for new items: whose, how many, with which chances on the log, and what is never among them."""

from collections import Counter

import pytest
from gateway_scene import Scene

from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import RecommendQuery
from services.gateway.stages import Preferences
from services.user_state.values import now_ms

HOUR_MS = 3600 * 1000


def scene(share: float = 0.4, *, new: int = 3, hours_ago: float = 1.0) -> Scene:
    made = Scene(preferences=Preferences(new_item_share=share))
    written_ms = now_ms() - round(hours_ago * HOUR_MS)
    listed = [CatalogueItem(item_id=f"new-{row}", written_ms=written_ms) for row in range(new)]
    made.popular.describe(listed)
    # Behind the known items in everybody's order: the catalogue's best are its last.
    made.candidates.item_ids = [*(f"new-{row}" for row in range(new)), *made.candidates.item_ids]
    return made


async def ask(made: Scene, times: int = 1, **fields: object) -> list[list[tuple[str, str]]]:
    answers = [await made.recommend(RecommendQuery(user_id="ann", k=5, **fields)) for _ in range(times)]
    return [[(item.item_id, item.source) for item in answer.items] for answer in answers]


async def test_the_share_of_positions_has_new_items_and_the_log_says_how_likely() -> None:
    made = scene()
    answers = await ask(made, 600)
    found = Counter(item for answer in answers for item, source in answer if source == "new")
    assert sum(found.values()) == 600 * 2  # .4 of five
    assert set(found) == {"new-0", "new-1", "new-2"}
    for answer in answers:
        known = [item for item, source in answer if source != "new"]
        assert known == ["f", "e", "d", "c", "b"][: len(known)]
        assert len(answer) == 5
    (_, exposure) = made.exposures.written[0]
    for item, source, chance in zip(exposure.item_ids, exposure.sources, exposure.propensities, strict=True):
        assert (source == "new") is item.startswith("new")
        if source == "new":
            assert chance == pytest.approx(2 / (5 * 3))
    # Weighed by their chances, new items were shown at each position as often as all of them were asked for.
    weight = sum(
        1 / chance
        for _, one in made.exposures.written
        for item, chance in zip(one.item_ids, one.propensities, strict=True)
        if item == "new-1"
    )
    assert weight / 600 == pytest.approx(5, rel=0.2)


@pytest.mark.parametrize(
    "without",
    [
        {"hours_ago": 25.0},
        {"new": 0},
        {"filter": ItemFilter(deny_item_ids=("new-0", "new-1", "new-2"))},
        {"filter": ItemFilter(allow_item_ids=tuple("bcdef"))},
        {"withdrawn": True},
    ],
)
async def test_what_is_not_new_or_not_allowed_takes_no_position(without: dict[str, object]) -> None:
    withdrawn, wanted = without.pop("withdrawn", False), without.pop("filter", ItemFilter())
    made = scene(0.5, **without)  # type: ignore[arg-type]
    if withdrawn:
        for row in range(3):
            made.popular.describe([CatalogueItem(item_id=f"new-{row}", withdrawn=True)])
    assert await ask(made, filter=wanted) == [[(item, "mol") for item in "fedcb"]]


async def test_pages_keep_what_was_drawn() -> None:
    made = scene(0.4)
    first = await made.recommend(RecommendQuery(user_id="ann", k=3, page_depth=5))
    rest = await made.recommend(RecommendQuery(user_id="ann", k=3, page_token=first.next_page_token))
    assert sum(item.source == "new" for item in (*first.items, *rest.items)) == 2
    assert all(item.propensity < 1 for item in rest.items)

"""A category that no item has matches nothing, in every kind of answer alike, and the answer says what is near."""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
from gateway_scene import Scene
from google.protobuf import json_format

from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import RecommendQuery, SearchQuery, SimilarQuery
from services.gateway.messages import answer_message, found_message, similar_message
from services.gateway.recommend.popular import PopularItems, near_names

NAMES = ["Comedy", "War", "Science Fiction", "Horror"]
WRONG = ItemFilter(allow_categories=("Comdy", "War"), deny_categories=("horror", "Unheard of"), exclude_seen=False)
WARNINGS = [
    "filter.allow_categories[0]='Comdy': no item has it; near: Comedy",
    "filter.deny_categories[0]='horror': no item has it; near: Horror",
    "filter.deny_categories[1]='Unheard of': no item has it; near: none",
]


def popular() -> PopularItems:
    return PopularItems(list("abcd"), np.arange(4), [(name,) for name in NAMES])


async def recommended(scene: Scene, wanted: ItemFilter) -> Sequence[str]:
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, filter=wanted))
    assert list(answer_message(answer).warnings) == list(answer.warnings)
    return answer.warnings


async def fallen_back(scene: Scene, wanted: ItemFilter) -> Sequence[str]:
    answer = await scene.recommend(RecommendQuery(user_id="nobody", k=2, filter=wanted))
    assert [item.source for item in answer.items] == ["popular"] * len(answer.items)
    return answer.warnings


async def searched(scene: Scene, wanted: ItemFilter) -> Sequence[str]:
    message = found_message(await scene.search(SearchQuery(query="space", k=2, filter=wanted)))
    return list(message.warnings)


async def alike(scene: Scene, wanted: ItemFilter) -> Sequence[str]:
    message = similar_message(await scene.handlers.similar(SimilarQuery(item_id="c", k=2, filter=wanted)))
    return json_format.MessageToDict(message).get("warnings", [])


@pytest.mark.parametrize("ask", [recommended, fallen_back, searched, alike])
async def test_every_answer_says_which_category_no_item_has(
    ask: Callable[[Scene, ItemFilter], Awaitable[Sequence[str]]],
) -> None:
    scene = Scene(popular=popular())
    assert list(await ask(scene, WRONG)) == WARNINGS
    right = ItemFilter(allow_categories=("Comedy", "War"), deny_categories=("Horror",), exclude_seen=False)
    assert list(await ask(scene, right)) == []


def test_a_category_is_known_while_an_item_has_it() -> None:
    items = popular()
    wanted = ItemFilter(allow_categories=("Western",))
    assert items.warnings(wanted) == []  # until the topic was read to its end, an item may have it
    items.caught_up()
    assert items.warnings(wanted) == ["filter.allow_categories[0]='Western': no item has it; near: none"]
    items.describe([CatalogueItem(item_id="new", categories=("Western",))])
    assert items.warnings(wanted) == []
    items.describe([CatalogueItem(item_id="new", categories=("Westerns",), withdrawn=True)])
    assert items.warnings(wanted) == ["filter.allow_categories[0]='Western': no item has it; near: Westerns"]
    items.describe([CatalogueItem(item_id="a", categories=())])
    gone = ItemFilter(deny_categories=("Comedy",))
    assert items.warnings(gone) == ["filter.deny_categories[0]='Comedy': no item has it; near: none"]


def test_the_first_three_are_named() -> None:
    wanted = ItemFilter(allow_categories=[f"unknown {number}" for number in range(9)])
    items = popular()
    items.caught_up()
    assert [one.partition("=")[0] for one in items.warnings(wanted)] == [
        f"filter.allow_categories[{number}]" for number in range(3)
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [("comedy", ["Comedy"]), ("WAR", ["War"]), ("Sience Fiction", ["Science Fiction"]), ("x", []), ("", [])],
)
def test_what_is_near_differs_by_a_few_characters_or_case(name: str, near: list[str]) -> None:
    assert near_names(name, NAMES) == near

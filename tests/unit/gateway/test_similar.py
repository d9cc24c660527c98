"""Similar on in-memory ports: what is left out, what is marked, and what is an error."""

import pytest
from gateway_scene import Scene

from services.algorithms.rules.filters import ItemFilter
from services.gateway.domain import Degradation, SimilarQuery
from services.platform.errors import DependencyUnavailable, InvalidRequest

DOWN = DependencyUnavailable("away")


async def test_what_the_user_has_seen_is_left_out_unless_asked_for(scene: Scene) -> None:
    answer = await scene.handlers.similar(SimilarQuery(item_id="c", user_id="ann", k=3))
    assert [item.item_id for item in answer.found.items] == ["b", "d", "e"]
    assert list(answer.titles) == ["B", "D", "E"]
    assert (answer.model_version, answer.found.index_version, answer.degradations) == ("m1", "index-1", [])
    kept = SimilarQuery(item_id="c", user_id="ann", k=3, filter=ItemFilter(exclude_seen=False))
    assert [item.item_id for item in (await scene.handlers.similar(kept)).found.items] == ["a", "b", "d"]
    assert [item.item_id for item in (await scene.handlers.similar(SimilarQuery(item_id="c", k=3))).found.items] == [
        "a",
        "b",
        "d",
    ]


async def test_without_the_state_store_it_answers_and_says_so(scene: Scene) -> None:
    scene.states.failure = DOWN
    answer = await scene.handlers.similar(SimilarQuery(item_id="c", user_id="ann", k=2))
    assert [item.item_id for item in answer.found.items] == ["a", "b"]
    assert answer.degradations == [Degradation.STATE_STORE_DOWN]
    assert (await scene.handlers.similar(SimilarQuery(item_id="c", k=2))).degradations == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (SimilarQuery(item_id="", k=1), "item_id="),
        (SimilarQuery(item_id="c", k=0), "k=0 allowed: 1-1000"),
        (SimilarQuery(item_id="c", k=1001), "k=1001 allowed: 1-1000"),
        (SimilarQuery(item_id="c", k=1, user_id="x" * 129), "user_id="),
        (SimilarQuery(item_id="c", k=1, filter=ItemFilter(deny_item_ids=("",))), "filter.deny_item_ids"),
    ],
)
async def test_a_bad_request_is_refused_by_name(query: SimilarQuery, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await Scene().handlers.similar(query)

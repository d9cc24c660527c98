"""Page after page of one list: all of it once, in its order, for its user alone, and not for ever."""

from dataclasses import replace

import pytest
from gateway_scene import ITEMS, Scene
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.indexes.protocol import Certificate
from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import (
    Degradation,
    FreshnessToken,
    HistoryEvent,
    NotAgain,
    Ranking,
    Recommendation,
    RecommendQuery,
    ScoredItem,
)
from services.gateway.recommend.pages import LIST_TTL_S, MAX_LISTS, PagePosition, ServedList, find_list, packed_list
from services.platform.errors import DependencyUnavailable, InvalidRequest, PermissionDenied, PreconditionFailed
from services.user_state.layout import PAGES

# Seen items are not answered: five of six are.
ANN = RecommendQuery(user_id="ann", k=2, page_depth=10)
LIST = ["f", "e", "d", "c", "b"]


def ids(answer: Recommendation) -> list[str]:
    return [item.item_id for item in answer.items]


async def page(scene: Scene, token: str, k: int = 2, user_id: str = "ann") -> Recommendation:
    return await scene.recommend(RecommendQuery(user_id=user_id, k=k, page_token=token))


async def test_pages_are_the_list_and_their_exposures_say_where_they_stood(scene: Scene) -> None:
    first = await scene.recommend(ANN)
    # What answers now is another index in another order.
    scene.candidates.item_ids = ["new", *reversed(ITEMS)]
    second = await page(scene, first.next_page_token)
    third = await page(scene, second.next_page_token)
    assert [ids(first), ids(second), ids(third)] == [LIST[:2], LIST[2:4], LIST[4:]]
    assert third.next_page_token == ""
    assert [one.state_source for one in (first, second, third)] == ["stored", "page", "page"]
    assert (second.index_version, second.model_version, second.certificate) == ("index-1", "m1", first.certificate)
    assert [item.score for item in (*first.items, *second.items)] == sorted(
        (item.score for item in (*first.items, *second.items)), reverse=True
    )
    shown = [exposure for _, exposure in scene.exposures.written]
    assert [(one.first_position, list(one.item_ids)) for one in shown] == [(1, LIST[:2]), (3, LIST[2:4]), (5, LIST[4:])]
    assert len({one.exposure_id for one in shown}) == 3


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=5, max_size=5), st.integers(1, 5))
async def test_pages_of_any_sizes_are_the_list_once(sizes: list[int], first: int) -> None:
    scene = Scene()
    answer = await scene.recommend(replace(ANN, k=first))
    found = ids(answer)
    for size in sizes:
        if not answer.next_page_token:
            break
        answer = await page(scene, answer.next_page_token, k=size)
        found += ids(answer)
    assert found == LIST


async def test_a_page_has_the_marks_of_the_answer_that_it_continues(scene: Scene) -> None:
    scene.reranker.failure = DependencyUnavailable("away")
    scene.stream.encoder_serving = False
    token = FreshnessToken("gone", 3, 9)
    first = await scene.recommend(replace(ANN, max_per_category=5, token=token))
    marks = [Degradation.TOKEN_NOT_HONOURED, Degradation.STALE_STATE, Degradation.FIRST_STAGE_ORDER]
    assert (list(first.degradations), first.token_honoured) == (marks, False)
    second = await page(scene, first.next_page_token)
    third = await page(scene, second.next_page_token)
    assert [(list(one.degradations), one.token_honoured) for one in (second, third)] == [(marks, False)] * 2


def test_a_kept_list_says_rules_and_the_share_that_was_searched() -> None:
    items = [ScoredItem("a", 0.5, "mol", rules=("promo", "é")), ScoredItem("b", 0.25, "new", 0.5)]
    ranking = Ranking(items=items, certificate=Certificate(0.125), searched_share=0.75)
    served = ServedList(ranking=ranking, model_version="m1", degradations=[Degradation.PARTIAL_CATALOGUE])
    place = PagePosition(b"12345", 1_000, 1)
    assert find_list([packed_list(place, served)], place) == served


async def test_what_was_withdrawn_since_is_on_no_page(scene: Scene) -> None:
    first = await scene.recommend(ANN)
    scene.popular.describe([CatalogueItem(item_id="d", withdrawn=True)])
    second = await page(scene, first.next_page_token)
    assert ids(second) == ["c", "b"]
    assert second.next_page_token == ""


async def test_without_room_for_a_list_the_first_page_says_so_and_other_lists_go_on(scene: Scene) -> None:
    token = (await scene.recommend(ANN)).next_page_token
    scene.sessions.full = PreconditionFailed("no room")
    for _ in range(9):
        answer = await scene.recommend(replace(ANN, not_again=NotAgain(answers=1)))
        assert (len(answer.items), answer.next_page_token) == (2, "")
        assert list(answer.degradations) == [Degradation.STATE_STORE_DOWN]
    assert ids(await page(scene, token)) == LIST[2:4]


async def test_a_token_is_one_users(scene: Scene) -> None:
    token = (await scene.recommend(ANN)).next_page_token
    with pytest.raises(PermissionDenied, match=r"^page_token: of another user's list"):
        await page(scene, token, user_id="bob")
    nobody = RecommendQuery(history=(HistoryEvent("a"),), k=2, page_token=token)
    with pytest.raises(InvalidRequest, match=r"^page_token='set' allowed: only together with user_id"):
        await scene.recommend(nobody)


async def test_an_altered_token_is_refused(scene: Scene) -> None:
    answer = await scene.recommend(ANN)
    token = answer.next_page_token
    for at in range(len(token)):
        for other in "Ab-_":
            if other != token[at]:
                with pytest.raises(
                    InvalidRequest, match=r"^page_token='text of \d+ characters' allowed: next_page_token"
                ):
                    await page(scene, token[:at] + other + token[at + 1 :])
    for other in (token[:-1], token + "A", "é", answer.exposure_id):
        with pytest.raises(InvalidRequest, match=r"^page_token="):
            await page(scene, other)


async def test_a_list_ends() -> None:
    scene = Scene(now_ms=1_000_000)
    token = (await scene.recommend(ANN)).next_page_token
    assert scene.sessions.ttls == {(PAGES, "ann"): LIST_TTL_S}
    scene.now_ms += LIST_TTL_S * 1000
    assert ids(await page(scene, token)) == LIST[2:4]
    scene.now_ms += 1
    with pytest.raises(PreconditionFailed, match=r"^page_token: its list is gone; allowed: within 15 minutes"):
        await page(scene, token)


async def test_only_a_users_newest_lists_are_kept(scene: Scene) -> None:
    tokens = [(await scene.recommend(ANN)).next_page_token for _ in range(MAX_LISTS + 1)]
    with pytest.raises(PreconditionFailed, match=r"^page_token: its list is gone"):
        await page(scene, tokens[0])
    assert ids(await page(scene, tokens[1])) == LIST[2:4]


async def test_without_the_store_the_first_page_says_so_and_the_next_one_can_be_asked_again(scene: Scene) -> None:
    token = (await scene.recommend(ANN)).next_page_token
    scene.sessions.failure = DependencyUnavailable("Redis is away")
    with pytest.raises(DependencyUnavailable, match="the state store, which keeps the list, did not answer") as caught:
        await page(scene, token)
    assert caught.value.retry_after_ms
    scene = Scene()
    scene.sessions.failure = DependencyUnavailable("Redis is away")
    answer = await scene.recommend(ANN)
    assert (ids(answer), answer.next_page_token) == (LIST[:2], "")
    assert Degradation.STATE_STORE_DOWN in answer.degradations

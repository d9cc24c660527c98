"""Explain on in-memory ports: the state that Recommend uses, parts that add up, no user but the one who asks."""

import time
from dataclasses import replace

import pytest
from gateway_scene import ITEMS, Scene

from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import ExplainQuery, HistoryEvent, RecommendQuery
from services.gateway.recommend.explain import Explanation
from services.platform.errors import DependencyUnavailable, InvalidRequest

DOWN = DependencyUnavailable("away")
NOW_MS = time.time_ns() // 1_000_000


async def test_a_stored_user_is_explained_from_the_very_state_that_recommend_uses(scene: Scene) -> None:
    await scene.recommend(RecommendQuery(user_id="ann", k=2))
    answer = await scene.explain(ExplainQuery(user_id="ann", item_id="b"))
    assert answer.state_source == "stored"
    assert scene.candidates.query_states[0] == scene.candidates.query_states[1]
    assert answer.similarity is not None
    assert (answer.similarity.title, answer.model_version) == ("B", "m1")


async def test_what_was_turned_down_votes_for_nothing(scene: Scene) -> None:
    history = (HistoryEvent("c", 1, "dislike"), HistoryEvent("d", 2, "click"), HistoryEvent("d", 3, "dislike"))
    scene.states.histories["ann"] = list(history)
    await scene.explain(ExplainQuery(user_id="ann", item_id="b"))
    await scene.explain(ExplainQuery(user_id="ann", item_id="b", history=history))
    assert [sorted(found) for found in scene.candidates.turned_down] == [["c", "d"]] * 2


@pytest.mark.parametrize("history", [(), (HistoryEvent("nobody-knows", 5),)])
async def test_without_a_state_there_is_no_score_and_no_error(history: tuple[HistoryEvent, ...]) -> None:
    answer = await Scene().explain(ExplainQuery(user_id="new", item_id="b", history=history))
    assert (answer.state_source, answer.similarity, answer.votes) == ("none", None, None)
    assert (answer.score, answer.shares) == (0.0, (0.0, 0.0, 0.0))


async def test_score_and_shares_are_of_model_refreshed_state_and_votes(scene: Scene) -> None:
    scene.candidates.model_share = 0.5
    answer = await scene.explain(ExplainQuery(user_id="ann", item_id="b"))
    # s = 0.6 + 0.2, vote 0.5, lambda 0.5.
    assert answer.score == pytest.approx(0.5 * 0.8 + 0.5 * 0.5)
    assert answer.shares == pytest.approx((0.3 / 0.65, 0.1 / 0.65, 0.25 / 0.65))
    assert answer.votes is not None
    assert [(voters.type, voters.count) for voters in answer.votes.voters] == [("rating", 2)]


async def test_parts_of_both_signs_share_by_their_size() -> None:
    found = await Scene().explain(ExplainQuery(user_id="ann", item_id="b"))
    assert found.similarity is not None
    similarity = replace(found.similarity, score=0.2, from_model=0.4, from_interactions=-0.2)
    answer = Explanation(model_version="m1", state_source="stored", similarity=similarity)
    assert answer.score == pytest.approx(0.2)
    assert answer.shares == pytest.approx((2 / 3, 1 / 3, 0.0))


async def test_the_ten_newest_of_the_history_come_with_titles_and_ages(scene: Scene) -> None:
    events = [HistoryEvent(ITEMS[place % 6], NOW_MS - 60_000 * (20 - place)) for place in range(19)]
    scene.states.histories["ann"] = [*events, HistoryEvent("new", NOW_MS - 60_000), HistoryEvent("gone", NOW_MS)]
    scene.popular.describe([CatalogueItem(item_id="new", title="New")])
    answer = await scene.explain(ExplainQuery(user_id="ann", item_id="b"))
    assert len(answer.history) == 10
    # One that came after the bundle has the title that its record says; one that nobody described has none.
    assert [(past.item_id, past.title) for past in answer.history[:3]] == [("gone", ""), ("new", "New"), ("a", "A")]
    ages = [past.age_seconds for past in answer.history]
    assert ages == sorted(ages)
    # Of this run's making, however long it took to get here.
    assert ages[1] - ages[0] == pytest.approx(60)


@pytest.mark.parametrize("part", ["states", "candidates", "reranker"])
async def test_a_part_that_is_away_is_an_error_not_a_zero(part: str, scene: Scene) -> None:
    getattr(scene, part).failure = DOWN
    with pytest.raises(DependencyUnavailable):
        await scene.explain(ExplainQuery(user_id="ann", item_id="b"))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (ExplainQuery(user_id="ann", item_id=""), "item_id="),
        (ExplainQuery(item_id="b"), "user_id="),
        (ExplainQuery(user_id="x" * 200, item_id="b"), "user_id="),
        (ExplainQuery(user_id="ann", item_id="b", history=(HistoryEvent("a"),) * 1001), "history='1001 events'"),
    ],
)
async def test_a_bad_question_is_refused_by_its_field(query: ExplainQuery, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await Scene().explain(query)

"""Not again, and scores that impressions lower: whose, how long, and that the order is that of all items."""

import math

import pytest
from gateway_scene import Scene
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DependencyUnavailable
from services.common.state_layout import ANSWERS, IMPRESSIONS
from services.gateway.domain import Degradation, Filter, Impression, NotAgain, Ranking, RecommendQuery, ScoredItem
from services.gateway.shown_before import discounted, discounts_of, not_again, packed_items
from services.gateway.stages import Limits

LAST = NotAgain(answers=1)
DAY_MS = 24 * 3600 * 1000


async def ids(scene: Scene, k: int = 2, **fields: object) -> list[str]:
    answer = await scene.recommend(RecommendQuery(user_id=fields.pop("user_id", "ann"), k=k, **fields))
    return [item.item_id for item in answer.items]


async def test_the_last_answers_items_do_not_come_again() -> None:
    scene = Scene()
    assert await ids(scene, not_again=LAST) == ["f", "e"]
    assert await ids(scene, not_again=LAST) == ["d", "c"]
    # Only the last answer counts here; then the last two.
    assert await ids(scene, not_again=LAST) == ["f", "e"]
    assert await ids(scene, not_again=NotAgain(answers=2)) == ["b"]
    assert await ids(scene, not_again=LAST, user_id="bob") == ["b", "d"]


async def test_who_does_not_ask_is_answered_all_and_remembered_nothing() -> None:
    scene = Scene()
    assert await ids(scene) == ["f", "e"]
    assert await ids(scene, not_again=LAST) == ["f", "e"]
    assert await ids(scene) == ["f", "e"]
    assert len(scene.sessions.lists[ANSWERS, "ann"]) == 1


async def test_pages_count_as_answers() -> None:
    scene = Scene()
    first = await scene.recommend(RecommendQuery(user_id="ann", k=2, page_depth=10, not_again=LAST))
    await scene.recommend(RecommendQuery(user_id="ann", k=2, page_token=first.next_page_token, not_again=LAST))
    assert await ids(scene, k=5, not_again=NotAgain(answers=2)) == ["b"]


async def test_the_requests_own_filter_stays_beside() -> None:
    scene = Scene()
    assert await ids(scene, not_again=LAST) == ["f", "e"]
    assert await ids(scene, not_again=LAST, filter=Filter(deny_item_ids=("d",))) == ["c", "b"]
    assert await ids(scene, k=5, not_again=NotAgain(minutes=5), filter=Filter(exclude_seen=False)) == ["d", "a"]


async def test_a_store_that_is_away_is_said() -> None:
    scene = Scene()
    scene.sessions.failure = DependencyUnavailable("Redis is away")
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, not_again=LAST))
    assert [item.item_id for item in answer.items] == ["f", "e"]
    assert Degradation.STATE_STORE_DOWN in answer.degradations


def test_answers_and_minutes_are_two_reasons() -> None:
    entries = [packed_items(now - 1, [name]) for now, name in ((900_000, "a"), (840_000, "b"), (300_000, "ü/c"))]
    assert not_again(entries, NotAgain(answers=1), 900_000) == ["a"]
    assert not_again(entries, NotAgain(minutes=1), 900_000) == ["a"]
    assert not_again(entries, NotAgain(minutes=2), 900_000) == ["a", "b"]
    assert not_again(entries, NotAgain(answers=1, minutes=11), 900_000) == ["a", "b", "ü/c"]


def test_an_impression_halves_with_its_age_and_counts_once() -> None:
    entries = [packed_items(2 * DAY_MS, ["a"]), packed_items(DAY_MS, ["a", "b"]), packed_items(DAY_MS, ["a", "b"])]
    found = discounts_of(entries, 3 * DAY_MS, discount=0.5, half_life_s=DAY_MS / 1000)
    assert found == {"a": pytest.approx(0.25 + 0.125), "b": pytest.approx(0.125)}


scores = st.lists(st.integers(0, 40), min_size=1, max_size=40)


@given(scores, st.dictionaries(st.integers(0, 39), st.integers(1, 30), max_size=8), st.integers(1, 10))
def test_the_best_of_a_longer_list_are_the_best_of_all(values: list[int], lowered: dict[int, int], k: int) -> None:
    items = [ScoredItem(str(row), value + row / 100, "mol") for row, value in enumerate(values)]
    discounts = {str(row): float(by) for row, by in lowered.items()}
    best = sorted(items, key=lambda item: -item.score)
    found = discounted(Ranking(items=best[: k + len(discounts)]), discounts, k)
    whole = sorted((item.score - discounts.get(item.item_id, 0.0) for item in items), reverse=True)
    assert [item.score for item in found.items] == whole[:k]


def discounting() -> Scene:
    return Scene(limits=Limits(breaker_s=0.05, impression_discount=2.5, impression_half_life_s=3600))


async def test_what_was_seen_scores_less_for_that_person_alone() -> None:
    scene = discounting()
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=3))
    top = answer.items[0]
    await scene.record_impressions("ann", answer.exposure_id, [Impression(1, top.item_id)])
    assert len(scene.sessions.lists[IMPRESSIONS, "ann"]) == 1
    after = await scene.recommend(RecommendQuery(user_id="ann", k=5))
    lowered = {item.item_id: item.score for item in after.items}
    assert math.isclose(lowered[top.item_id], top.score - 2.5, abs_tol=0.01)
    assert [item.score for item in after.items] == sorted(lowered.values(), reverse=True)
    # Counts for nothing else: neither seen, nor anybody else's.
    assert len(after.items) == 5
    assert await ids(scene, k=1, user_id="bob") == ["b"]


async def test_rules_and_diversity_choose_by_the_lowered_score() -> None:
    scene = discounting()
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=3))
    await scene.record_impressions("ann", answer.exposure_id, [Impression(1, "f")])
    await ids(scene, diversity=0.5)
    assert scene.reranker.discounts[-1] == {"f": pytest.approx(2.5, abs=0.01)}


async def test_without_the_setting_impressions_are_not_kept() -> None:
    scene = Scene()
    exposure_id = (await scene.recommend(RecommendQuery(user_id="ann", k=3))).exposure_id
    await scene.record_impressions("ann", exposure_id, [Impression(1, "f")])
    assert scene.sessions.calls == 0


async def test_a_store_that_is_away_loses_a_discount_and_no_impression() -> None:
    scene = discounting()
    exposure_id = (await scene.recommend(RecommendQuery(user_id="ann", k=3))).exposure_id
    scene.sessions.failure = DependencyUnavailable("Redis is away")
    assert len(await scene.record_impressions("ann", exposure_id, [Impression(1, "f")])) == 1

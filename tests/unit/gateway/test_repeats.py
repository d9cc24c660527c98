"""Not again, and scores that impressions lower: whose, how long, and that the order is that of all items."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.gateway import MemoryCandidates
from gateway_scene import ITEMS, Scene
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.topics.interactions import Interaction
from services.contracts.wire import PackedQueryState
from services.gateway.domain import Degradation, Impression, NotAgain, Ranking, RecommendQuery, ScoredItem
from services.gateway.recommend.repeats import discounted, discounts_of, not_again, packed_items
from services.gateway.stages import Preferences
from services.platform.errors import DependencyUnavailable, InvalidRequest
from services.user_state.layout import IMPRESSIONS
from services.user_state.values import now_ms

LAST = NotAgain(answers=1)
DAY_MS = 24 * 3600 * 1000


async def ids(scene: Scene, k: int = 2, **fields: object) -> list[str]:
    answer = await scene.recommend(RecommendQuery(user_id=fields.pop("user_id", "ann"), k=k, **fields))
    return [item.item_id for item in answer.items]


async def test_the_last_answers_items_do_not_come_again(scene: Scene) -> None:
    assert await ids(scene, not_again=LAST) == ["f", "e"]
    assert await ids(scene, not_again=LAST) == ["d", "c"]
    # Only the last answer counts here; then the last two.
    assert await ids(scene, not_again=LAST) == ["f", "e"]
    assert await ids(scene, not_again=NotAgain(answers=2)) == ["b"]
    assert await ids(scene, not_again=LAST, user_id="bob") == ["b", "d"]


async def test_pages_count_as_answers(scene: Scene) -> None:
    first = await scene.recommend(RecommendQuery(user_id="ann", k=2, page_depth=10, not_again=LAST))
    await scene.recommend(RecommendQuery(user_id="ann", k=2, page_token=first.next_page_token, not_again=LAST))
    assert await ids(scene, k=5, not_again=NotAgain(answers=2)) == ["b"]


async def test_a_store_that_is_away_is_said(scene: Scene) -> None:
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
    # Nothing applies what is recorded here: no answer is late for it.
    preferences = Preferences(impression_discount=2.5, impression_half_life_s=3600)
    return Scene(preferences=preferences, lag_grace_s=3600)


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


def impressions(names: list[str], user: str = "ann") -> list[Interaction]:
    return [Interaction(user_id=user, item_id=name, type="impression", event_time_ms=now_ms()) for name in names]


async def streamed(interactions: list[Interaction]) -> AsyncIterator[Interaction]:
    for one in interactions:
        yield one


class LimitedCandidates(MemoryCandidates):
    """As the process: no more than 10,000 at a time."""

    async def search(self, query_state: PackedQueryState, *, k: int, **rest: Any) -> Ranking:
        if k > 10_000:
            raise InvalidRequest.of("k", k, "1-10000")
        return await super().search(query_state, k=k, **rest)


async def test_however_many_impressions_there_are_the_latest_lower_scores_and_the_model_answers() -> None:
    scene = discounting()
    object.__setattr__(scene.ports, "candidates", LimitedCandidates(item_ids=list(ITEMS)))
    for call in range(10):
        await scene.record(impressions([*(f"item-{call}-{row}" for row in range(999)), "f"]))
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=10))
    assert (list(answer.degradations), answer.state_source) == ([], "stored")
    scores = {item.item_id: item.score for item in answer.items}
    assert scores["e"] - scores["f"] > 2.4


async def test_what_a_stream_wrote_before_it_was_refused_counts() -> None:
    scene = discounting()
    with pytest.raises(InvalidRequest, match="1 earlier messages were written"):
        await scene.record.stream(streamed([*impressions(["f"]), *impressions([""])]))
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=5))
    assert answer.items[-1].item_id == "f"


async def test_a_store_that_is_away_loses_a_discount_and_no_impression() -> None:
    scene = discounting()
    exposure_id = (await scene.recommend(RecommendQuery(user_id="ann", k=3))).exposure_id
    scene.sessions.failure = DependencyUnavailable("Redis is away")
    assert len(await scene.record_impressions("ann", exposure_id, [Impression(1, "f")])) == 1

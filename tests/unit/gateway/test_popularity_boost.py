"""Popular items for people of whom little is known: every boosted score against a loop, and who is boosted."""

import math
from dataclasses import replace

import numpy as np
import pytest
from gateway_scene import Scene
from hypothesis import given
from hypothesis import strategies as st
from test_rules import Real, X, real

from services.algorithms.indexes.protocol import ESTIMATE, EXACT, Certificate
from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import HistoryEvent, Ranking, RecommendQuery, ScoredItem
from services.gateway.recommend.rankings import BOOST_WEIGHT, boosts, with_boosts
from services.gateway.stages import Limits, Preferences

__all__ = ["real"]  # the fixture

SEEN = ["item-7", "item-8"]


def scene_of(real: Real, *, cold_items: int, counts: dict[str, float]) -> Scene:
    """The same candidates and the same person, who has seen two items."""
    scene = Scene(
        candidates=real.scene.candidates,
        reranker=real.scene.reranker,
        limits=Limits(stage_timeout_s=10),
        preferences=Preferences(cold_items=cold_items),
    )
    scene.states.states["ann"] = real.scene.states.states["ann"]
    scene.states.seen["ann"] = SEEN
    for row in range(X):
        scene.popular.describe([CatalogueItem(item_id=f"item-{row}")])
    # What the bundle of other tests knows is not there.
    for item_id in "abcdef":
        scene.popular.describe([CatalogueItem(item_id=item_id, withdrawn=True)])
    scene.popular.take(counts)
    return scene


@pytest.mark.parametrize("seed", range(20))
async def test_an_answer_is_the_best_by_boosted_scores_and_proven(real: Real, seed: int) -> None:
    rng = np.random.default_rng(seed)
    taken = rng.choice(X, 20, replace=False).tolist()
    counts = {f"item-{row}": float(count) for row, count in zip(taken, rng.integers(1, 5, 20), strict=True)}
    denied = tuple(f"item-{row}" for row in rng.choice(X, 5, replace=False).tolist())
    scene = scene_of(real, cold_items=3, counts=counts)
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=8, filter=ItemFilter(deny_item_ids=denied)))
    allowed = [row for row in range(X) if f"item-{row}" not in (*denied, *SEEN)]
    least = min(counts.values())
    final = {
        row: float(real.exact[row]) + BOOST_WEIGHT * math.log(max(1.0, counts.get(f"item-{row}", 0.0) / least))
        for row in allowed
    }
    best = sorted(final, key=lambda row: -final[row])[:8]
    assert [item.item_id for item in answer.items] == [f"item-{row}" for row in best]
    assert [item.score for item in answer.items] == pytest.approx([final[row] for row in best], abs=1e-6)
    assert answer.certificate == EXACT
    own = [f"item-{row}" for row in sorted(allowed, key=lambda row: -real.exact[row])[:8]]
    assert [item.source for item in answer.items] == [
        "mol" if item.item_id in own else "popular" for item in answer.items
    ]
    assert list(answer.degradations) == []


@pytest.mark.parametrize("cold_items", [0, 2])
async def test_who_has_had_enough_items_is_answered_by_the_model_alone(real: Real, cold_items: int) -> None:
    scene = scene_of(real, cold_items=cold_items, counts={"item-3": 1000.0, "item-4": 1.0})
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=5))
    rows = [row for row in np.argsort(-real.exact).tolist() if f"item-{row}" not in SEEN][:5]
    assert [item.item_id for item in answer.items] == [f"item-{row}" for row in rows]


async def test_a_history_in_the_request_says_how_many_items_the_person_has_had(real: Real) -> None:
    scene = scene_of(real, cold_items=3, counts={"item-3": 1000.0, "item-4": 1.0})
    scene.encoder.query_state = scene.states.states["ann"].query_state
    scene.encoder.known_items = {f"item-{row}" for row in range(X)}
    for length, is_boosted in ((2, True), (3, False)):
        history = tuple(HistoryEvent(f"item-{20 + row}") for row in range(length))
        answer = await scene.recommend(RecommendQuery(user_id="ann", k=5, history=history))
        assert answer.state_source == "request"
        assert (answer.items[0].item_id == "item-3") == is_boosted


async def test_where_nothing_was_ever_taken_nothing_is_boosted(real: Real) -> None:
    scene = scene_of(real, cold_items=3, counts={})
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=5))
    assert {item.source for item in answer.items} == {"mol"}


_SCORES = st.lists(st.floats(-1, 1), min_size=12, max_size=12)
# From the least that is left open to the most.
_PROOFS = [EXACT, Certificate(0.1), ESTIMATE]


@given(
    _SCORES,
    st.dictionaries(st.integers(0, 11), st.floats(0, 2), max_size=6),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_the_best_by_both_are_found_and_no_more_is_claimed_than_both_prove(
    scores: list[float], boost: dict[int, float], k: int, proof: int, other: int
) -> None:
    def ranked(rows: list[int], proof: int) -> Ranking:
        items = [ScoredItem(str(row), scores[row], "mol") for row in sorted(rows, key=lambda row: -scores[row])]
        return Ranking(items=items, certificate=_PROOFS[proof], index_version="v1")

    found, among = ranked(list(range(12)), proof), ranked(list(boost), other)
    by_id = {str(row): more for row, more in boost.items()}
    answer = with_boosts(replace(found, items=found.items[:k]), among, by_id, k)
    final = sorted((scores[row] + boost.get(row, 0.0) for row in range(12)), reverse=True)[:k]
    assert [item.score for item in answer.items] == pytest.approx(final)
    assert answer.certificate == _PROOFS[max(proof, other)]
    changed = with_boosts(found, replace(among, index_version="v2"), by_id, k)
    assert changed.certificate == ESTIMATE


def test_a_favour_is_how_much_more_popular_an_item_is_than_the_last() -> None:
    popular = [ScoredItem("a", 0.4, "popular"), ScoredItem("b", 0.1, "popular"), ScoredItem("c", 0.0, "popular")]
    assert boosts(popular, tau=0.05) == pytest.approx({"a": 2 * 0.05 * math.log(4), "b": 0.0})
    assert boosts(popular[2:], tau=0.05) == {}

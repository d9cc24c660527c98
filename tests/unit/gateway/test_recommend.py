"""Recommend on in-memory ports: the good way, and each degraded way of the design's table."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from fakes.gateway import MemoryCandidates
from gateway_scene import ITEMS, POPULAR, STORED, Scene

from services.algorithms.indexes.protocol import ESTIMATE, EXACT, Certificate
from services.algorithms.rules.filters import ItemFilter
from services.gateway.domain import (
    Degradation,
    ExplainQuery,
    FreshnessToken,
    HistoryEvent,
    Ranking,
    Recommendation,
    RecommendQuery,
    SearchQuery,
    SimilarQuery,
)
from services.gateway.stages import COMPONENTS, Limits
from services.platform import request_context
from services.platform.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    Overloaded,
    PreconditionFailed,
)
from services.platform.rpc import admission
from services.platform.rpc.admission import Admission
from services.platform.stream.records import Position

DOWN = DependencyUnavailable("away")


def ids(answer: Recommendation) -> list[str]:
    return [item.item_id for item in answer.items]


def sources(answer: Recommendation) -> set[str]:
    return {item.source for item in answer.items}


async def with_deadline(scene: Scene, query: RecommendQuery, seconds: float) -> Recommendation:
    async def call() -> Recommendation:
        request_context.deadline.set(time.monotonic() + seconds)
        return await scene.recommend(query)

    return await asyncio.create_task(call())


async def test_a_known_user_gets_the_models_items_with_full_provenance(scene: Scene) -> None:
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert ids(answer) == ["f", "e"]
    assert sources(answer) == {"mol"}
    assert answer.state is STORED
    assert (answer.state_source, answer.model_version, answer.index_version) == ("stored", "m1", "index-1")
    assert (answer.token_honoured, list(answer.degradations)) == (True, [])
    assert answer.certificate == EXACT
    assert scene.states.calls == 1


class Unproven(MemoryCandidates):
    """Proves a gap of 0.02, and only where it is asked for one."""

    async def search(self, *args: Any, max_gap: float | None = None, **others: Any) -> Ranking:
        found = await super().search(*args, **others)
        return replace(found, certificate=ESTIMATE if max_gap is None else Certificate(0.02), items_touched=70)


@pytest.mark.parametrize(("max_gap", "marks"), [(None, []), (0.02, []), (0.0, [Degradation.GAP_NOT_PROVEN])])
async def test_an_answer_says_where_its_gap_was_not_proven(max_gap: float | None, marks: list[Degradation]) -> None:
    scene = Scene(candidates=Unproven(item_ids=list(ITEMS)))
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, max_gap=max_gap))
    assert ids(answer) == ["f", "e"]
    assert list(answer.degradations) == marks
    assert answer.certificate == (ESTIMATE if max_gap is None else Certificate(0.02))
    assert (answer.max_gap, answer.items_touched) == (max_gap, 70)


async def test_popular_items_prove_no_gap_and_a_short_deadline_is_no_error() -> None:
    scene = Scene(limits=Limits(answer_reserve_s=0.5))
    scene.candidates.delay_s = 5.0
    answer = await with_deadline(scene, RecommendQuery(user_id="ann", k=2, max_gap=0.5), 0.7)
    assert sources(answer) == {"popular"}
    assert list(answer.degradations) == [Degradation.POPULAR_FALLBACK, Degradation.GAP_NOT_PROVEN]


async def test_a_gap_may_take_the_whole_deadline() -> None:
    scene = Scene(limits=Limits(stage_timeout_s=0.05))
    scene.candidates.delay_s = 0.3
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, max_gap=0.0))
    assert (ids(answer), list(answer.degradations)) == (["f", "e"], [])
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert sources(answer) == {"popular"}


@pytest.mark.parametrize("query", [{}, {"diversity": 0.3}], ids=["search", "pool"])
async def test_what_a_user_turned_down_votes_for_nothing(query: dict[str, float], scene: Scene) -> None:
    scene.states.seen["ann"], scene.states.turned_down["ann"] = ["a", "b", "c"], ["a", "b"]
    await scene.recommend(RecommendQuery(user_id="ann", k=2, **query))  # type: ignore[arg-type]
    # Only the request's own history votes: its newest event of an item decides, and what is stored is left out alone.
    events = [("b", "click", 0.0), ("d", "", 0.0), ("d", "hide", 0.0), ("e", "rating", 2.0), ("e", "rating", 5.0)]
    history = tuple(HistoryEvent(item, time, kind, value) for time, (item, kind, value) in enumerate(events))
    await scene.recommend(RecommendQuery(user_id="ann", k=2, history=history, **query))  # type: ignore[arg-type]
    assert [sorted(found) for found in scene.candidates.turned_down] == [["a", "b"], ["a", "c", "d"]]
    assert list(scene.candidates.seen[1]) == ["e", "e", "d", "d", "b", "a", "b", "c"]


async def test_stage_times_add_up_to_the_total(scene: Scene) -> None:
    scene.reranker.delay_s = 0.03
    times = (await scene.recommend(RecommendQuery(user_id="ann", k=2, diversity=0.3))).stage_times
    parts = times.queue_ms + times.encode_ms + times.first_stage_ms + times.rerank_ms + times.transport_ms
    assert parts == pytest.approx(times.total_ms)
    assert (times.queue_ms, times.first_stage_ms, times.rerank_ms) == (2.0, 3.0, 4.0)


async def test_what_the_user_had_goes_to_candidates_newest_first_whatever_is_left_out() -> None:
    for exclude_seen in (True, False):
        scene, wanted = Scene(), ItemFilter(exclude_seen=exclude_seen)
        await scene.recommend(RecommendQuery(user_id="ann", k=2, filter=wanted))
        history = (HistoryEvent("c", 1), HistoryEvent("d", 2))
        await scene.recommend(RecommendQuery(user_id="ann", k=2, filter=wanted, history=history))
        await scene.explain(ExplainQuery(user_id="ann", item_id="b", history=history))
        assert scene.candidates.seen == [["a"], ["d", "c", "a"], ["d", "c"]]


async def test_a_history_in_the_request_replaces_the_stored_one(scene: Scene) -> None:
    answer = await scene.recommend(
        RecommendQuery(user_id="ann", k=6, history=(HistoryEvent("c"), HistoryEvent("d", 5000)))
    )
    assert answer.state_source == "request"
    assert answer.state is None
    assert scene.candidates.query_states[0].components == b"request"
    # Neither what the request names nor what the store has seen.
    assert set(ids(answer)) == set(ITEMS) - {"a", "c", "d"}
    ((user_id, history),) = scene.encoder.histories
    assert user_id == "ann"
    assert [event.event_time_ms for event in history] == [5000, 5000]


async def test_a_history_of_unknown_items_gets_popular_items_marked() -> None:
    answer = await Scene().recommend(RecommendQuery(k=3, history=(HistoryEvent("nobody-knows"),)))
    assert ids(answer) == POPULAR[:3]
    assert list(answer.degradations) == [Degradation.POPULAR_FALLBACK]


async def test_a_user_of_another_model_is_encoded_from_the_stored_history(scene: Scene) -> None:
    scene.states.histories["bob"] = [HistoryEvent("b", 1), HistoryEvent("c", 2)]
    answer = await scene.recommend(RecommendQuery(user_id="bob", k=2))
    assert (answer.state_source, answer.state, list(answer.degradations)) == ("stored_history", None, [])
    assert scene.encoder.histories[0][1] == scene.states.histories["bob"]


def a_model_that_came_back() -> Scene:
    """Ann's state of this model ends at offset 7; another model applied offset 9 since."""
    scene = Scene()
    scene.states.behind, scene.states.watermarks = {"ann"}, {3: 9}
    scene.states.histories["ann"] = [HistoryEvent("b", 1), HistoryEvent("c", 2)]
    return scene


def token(offset: int) -> FreshnessToken:
    return FreshnessToken("epoch-1", 3, offset)


async def test_a_state_that_does_not_reflect_the_history_is_made_again_for_the_answer() -> None:
    scene = a_model_that_came_back()
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, token=token(9)))
    assert (answer.state_source, answer.state, answer.token_honoured) == ("stored_history", None, True)
    assert list(answer.degradations) == []
    assert scene.candidates.query_states[0].components == b"request"


@pytest.mark.parametrize(("offset", "honoured"), [(7, True), (8, False)])
async def test_a_state_that_is_behind_and_cannot_be_made_again_is_stale_and_honours_what_it_reflects(
    offset: int, honoured: bool
) -> None:
    scene = a_model_that_came_back()
    scene.encoder.failure = DOWN
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, token=token(offset)))
    assert (answer.state_source, answer.state) == ("stored", STORED)
    assert answer.token_honoured is honoured
    marks = [Degradation.STALE_STATE] if honoured else [Degradation.STALE_STATE, Degradation.TOKEN_NOT_HONOURED]
    assert list(answer.degradations) == marks


async def test_beside_a_history_in_the_request_a_state_that_is_behind_honours_no_later_token() -> None:
    scene = a_model_that_came_back()
    scene.encoder.failure = DOWN
    query = RecommendQuery(user_id="ann", k=2, token=token(9), history=(HistoryEvent("c"),))
    answer = await scene.recommend(query)
    assert list(answer.degradations) == [Degradation.STALE_STATE, Degradation.TOKEN_NOT_HONOURED]


async def test_a_state_whose_history_is_gone_is_answered_from_and_marked(scene: Scene) -> None:
    scene.states.lost = {"ann"}
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert (answer.state_source, list(answer.degradations)) == ("stored", [Degradation.STALE_STATE])
    assert scene.encoder.calls == 0


async def test_a_state_of_a_history_that_was_taken_back_since_is_not_used() -> None:
    scene = a_model_that_came_back()
    del scene.states.histories["ann"]
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, token=token(9)))
    assert (answer.state_source, answer.token_honoured) == ("none", True)
    assert list(answer.degradations) == [Degradation.POPULAR_FALLBACK]


async def test_a_state_made_while_the_stream_stands_still_is_marked_stale() -> None:
    scene = a_model_that_came_back()
    scene.stream.encoder_serving = False
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert (answer.state_source, list(answer.degradations)) == ("stored_history", [Degradation.STALE_STATE])


async def test_the_pool_is_at_least_twice_k() -> None:
    scene = Scene(limits=Limits(pool_size=200))
    for k in (10, 150, 1000):
        await scene.recommend(RecommendQuery(user_id="ann", k=k, query="words"))
    assert scene.candidates.pool_sizes == [200, 300, 2000]


# --- degraded ways -------------------------------------------------------------------------------------------------


async def test_encoder_process_down_marks_the_stored_state_stale(scene: Scene) -> None:
    scene.stream.encoder_serving = False
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert sources(answer) == {"mol"}
    assert list(answer.degradations) == [Degradation.STALE_STATE]


async def test_encoder_down_with_a_request_history_falls_back_to_the_stored_state(scene: Scene) -> None:
    scene.encoder.failure = DOWN
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, history=(HistoryEvent("c"),)))
    assert answer.state_source == "stored"
    assert list(answer.degradations) == [Degradation.STALE_STATE]
    assert "c" not in ids(answer)


async def test_encoder_down_for_a_new_user_gives_popular_items_without_the_request_history(scene: Scene) -> None:
    scene.encoder.failure = DOWN
    answer = await scene.recommend(RecommendQuery(user_id="new", k=2, history=(HistoryEvent("b"),)))
    assert ids(answer) == ["d", "c"]
    assert list(answer.degradations) == [Degradation.POPULAR_FALLBACK]


async def test_redis_down_gives_popular_items_marked(scene: Scene) -> None:
    scene.states.failure = DOWN
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=3))
    assert ids(answer) == POPULAR[:3]
    assert list(answer.degradations) == [Degradation.STATE_STORE_DOWN, Degradation.POPULAR_FALLBACK]


async def test_who_came_beyond_the_limit_gets_popular_items_and_nobody_is_asked(scene: Scene) -> None:
    of_one = Admission("recommendations", smallest=1, largest=1, surplus=1)
    of_one.enter("ann")
    admission.current.set(of_one.enter("ann"))
    query = RecommendQuery(user_id="ann", k=3, history=(HistoryEvent("c"),), token=token(0))
    answer = await scene.recommend(query)
    assert (ids(answer), answer.state_source, answer.token_honoured) == (POPULAR[:3], "none", False)
    assert list(answer.degradations) == [
        Degradation.BUSY,
        Degradation.TOKEN_NOT_HONOURED,
        Degradation.POPULAR_FALLBACK,
    ]
    assert (scene.states.calls, scene.encoder.calls) == (0, 0)


async def test_redis_down_with_a_request_history_still_personalises(scene: Scene) -> None:
    scene.states.failure = DOWN
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, history=(HistoryEvent("c"),)))
    assert (answer.state_source, sources(answer)) == ("request", {"mol"})
    assert list(answer.degradations) == [Degradation.STATE_STORE_DOWN]


async def test_reranker_down_gives_the_first_stage_order_within_the_category_limit(scene: Scene) -> None:
    scene.reranker.failure = DOWN
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=3, max_per_category=1))
    # b is of x, c of y, d of both, e of z.
    assert ids(answer) == ["b", "c", "e"]
    assert sources(answer) == {"first_stage"}
    assert list(answer.degradations) == [Degradation.FIRST_STAGE_ORDER]
    assert answer.certificate == ESTIMATE


@pytest.mark.parametrize("failure", [DOWN, Overloaded("full"), PreconditionFailed("another d"), InvalidRequest("k")])
async def test_candidates_failing_gives_popular_items_marked(failure: Exception, scene: Scene) -> None:
    scene.candidates.failure = failure  # type: ignore[assignment]
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=3))
    assert ids(answer) == POPULAR[:3]
    assert list(answer.degradations) == [Degradation.POPULAR_FALLBACK]
    assert (answer.state_source, answer.state) == ("none", None)


async def test_popular_items_for_want_of_candidates_are_told_from_those_for_a_new_user(scene: Scene) -> None:

    def failures(component: str) -> float | None:
        labels = {"component": component}
        return scene.registry.get_sample_value("freshet_gateway_component_failures_total", labels)

    assert ids(await scene.recommend(RecommendQuery(user_id="nobody", k=3))) == POPULAR[:3]
    assert {failures(name) for name in COMPONENTS} == {0}
    scene.candidates.failure = DOWN
    for _ in range(3):
        await scene.recommend(RecommendQuery(user_id="ann", k=3))
    # Where the breaker lets no call through, the answer did without candidates all the same.
    assert {name: failures(name) for name in COMPONENTS} == dict.fromkeys(COMPONENTS, 0) | {"candidates": 3}


async def test_kafka_down_is_served_as_before_and_marked(scene: Scene) -> None:
    scene.stream.log_reachable = False
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert ids(answer) == ["f", "e"]
    assert list(answer.degradations) == [Degradation.NOT_FRESH]


async def test_an_event_acknowledged_long_ago_and_not_applied_marks_the_answer() -> None:
    scene = Scene(lag_grace_s=0.0)
    scene.lag.acknowledged(Position(3, 9))
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert list(answer.degradations) == [Degradation.NOT_FRESH]
    scene.states.watermarks[3] = 9
    assert list((await scene.recommend(RecommendQuery(user_id="ann", k=2))).degradations) == []


async def test_everything_down_still_answers(scene: Scene) -> None:
    for port in (scene.states, scene.encoder, scene.candidates, scene.reranker):
        port.failure = DOWN
    scene.stream.log_reachable = scene.stream.encoder_serving = False
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=6))
    assert ids(answer) == POPULAR
    assert Degradation.POPULAR_FALLBACK in answer.degradations


async def test_a_short_deadline_of_a_caller_is_not_held_against_a_dependency() -> None:
    # Wide times: a busy machine wakes a coroutine tens of milliseconds late.
    scene = Scene(limits=Limits(answer_reserve_s=0.5, stage_timeout_s=5, breaker_s=30))
    scene.reranker.delay_s = 3.0
    for _ in range(5):
        answer = await with_deadline(scene, RecommendQuery(user_id="ann", k=2, diversity=0.3), 1.0)
        assert list(answer.degradations) == [Degradation.FIRST_STAGE_ORDER]
    scene.reranker.delay_s = 0.0
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, diversity=0.3))
    assert list(answer.degradations) == []


@pytest.mark.parametrize("slow", ["states", "sessions"])
async def test_a_store_has_a_time_limit_of_its_own(slow: str) -> None:
    scene = Scene(limits=Limits(budget_s=60, state_timeout_s=0.05, stage_timeout_s=60))
    getattr(scene, slow).delay_s = 30.0
    async with asyncio.timeout(10):
        answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, page_depth=4))
    assert Degradation.STATE_STORE_DOWN in answer.degradations


@pytest.mark.parametrize("surface", ["recommend", "search", "similar"])
async def test_an_answer_of_a_user_whose_data_was_lost_says_so(surface: str, scene: Scene) -> None:
    queries = {"search": SearchQuery(query="space", user_id="ann"), "similar": SimilarQuery(item_id="c", user_id="ann")}
    ask, query = getattr(scene.handlers, surface), queries.get(surface, RecommendQuery(user_id="ann", k=2))
    assert Degradation.HISTORY_INCOMPLETE not in (await ask(query)).degradations
    scene.states.incomplete = {"ann"}
    assert Degradation.HISTORY_INCOMPLETE in (await ask(query)).degradations


async def test_a_spent_deadline_is_an_error_not_a_popular_answer(scene: Scene) -> None:
    with pytest.raises(DeadlineExceeded):
        await with_deadline(scene, RecommendQuery(user_id="ann", k=2), -0.001)
    assert scene.states.calls == scene.candidates.calls == 0


# --- freshness tokens ----------------------------------------------------------------------------------------------


async def test_a_token_is_waited_for_and_the_newer_state_and_seen_items_are_used(scene: Scene) -> None:

    def apply(reads: int) -> None:
        if reads == 4:
            scene.states.watermarks[3] = 8
            scene.states.seen["ann"] = ["a", "f"]

    scene.states.on_read = apply
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, token=FreshnessToken("epoch-1", 3, 8)))
    assert (answer.token_honoured, list(answer.degradations)) == (True, [])
    assert ids(answer) == ["e", "d"]
    assert answer.stage_times.queue_ms > 3 * scene.limits.token_poll_s * 1000 * 0.9


async def test_all_who_wait_for_a_partition_share_one_reading(scene: Scene) -> None:
    until_reached = asyncio.Event()

    def apply(reads: int) -> None:
        if until_reached.is_set():
            scene.states.watermarks[3] = 8

    scene.states.on_read = apply
    query = RecommendQuery(user_id="ann", k=2, token=FreshnessToken("epoch-1", 3, 8))
    calls = [asyncio.create_task(scene.recommend(query)) for _ in range(50)]
    began = time.monotonic()
    await asyncio.sleep(0.1)
    # Each has read once; since then one reading every `token_poll_s` tells all.
    assert scene.states.calls <= 50 + (time.monotonic() - began) / scene.limits.token_poll_s + 1
    until_reached.set()
    answers = await asyncio.gather(*calls)
    assert all(answer.token_honoured for answer in answers)


async def test_a_token_not_reached_within_the_deadline_is_said() -> None:
    # Half a second is kept for what follows the wait: an answer after the deadline is an error.
    scene = Scene(limits=Limits(token_reserve_s=0.5))
    token = FreshnessToken("epoch-1", 3, 99)
    answer = await with_deadline(scene, RecommendQuery(user_id="ann", k=2, token=token), 0.6)
    assert not answer.token_honoured
    assert list(answer.degradations) == [Degradation.TOKEN_NOT_HONOURED]
    assert ids(answer) == ["f", "e"]


async def test_a_token_is_not_waited_for_while_the_log_is_unreachable(scene: Scene) -> None:
    scene.stream.log_reachable = False
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, token=FreshnessToken("epoch-1", 3, 99)))
    assert set(answer.degradations) == {Degradation.TOKEN_NOT_HONOURED, Degradation.NOT_FRESH}
    assert ids(answer) == ["f", "e"]
    assert scene.states.calls == 1


@pytest.mark.parametrize("epoch", ["older", ""])
async def test_a_token_of_another_epoch_is_not_waited_for(epoch: str, scene: Scene) -> None:
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, token=FreshnessToken(epoch, 3, 1)))
    assert not answer.token_honoured
    assert scene.states.calls == 1


async def test_popular_items_instead_of_a_fresh_state_do_not_honour_its_token(scene: Scene) -> None:
    scene.candidates.failure = DOWN
    query = RecommendQuery(user_id="ann", k=2, token=FreshnessToken("epoch-1", 3, 7))
    answer = await scene.recommend(query)
    assert sources(answer) == {"popular"}
    assert not answer.token_honoured
    assert set(answer.degradations) == {Degradation.POPULAR_FALLBACK, Degradation.TOKEN_NOT_HONOURED}


async def test_a_history_that_could_not_be_encoded_does_not_honour_its_token(scene: Scene) -> None:
    scene.states.histories["bob"] = [HistoryEvent("b", 1)]
    scene.encoder.failure = DOWN
    answer = await scene.recommend(RecommendQuery(user_id="bob", k=2, token=FreshnessToken("epoch-1", 3, 7)))
    assert not answer.token_honoured
    assert Degradation.TOKEN_NOT_HONOURED in answer.degradations


async def test_a_token_of_a_user_that_nothing_is_known_of_is_honoured_by_popular_items() -> None:
    # Its event was dead-lettered, say: what there is to know is known.
    answer = await Scene().recommend(RecommendQuery(user_id="new", k=2, token=FreshnessToken("epoch-1", 3, 7)))
    assert (answer.token_honoured, list(answer.degradations)) == (True, [Degradation.POPULAR_FALLBACK])

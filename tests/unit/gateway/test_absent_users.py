"""How long somebody has been away: one row of the model's in the state that all are asked with, told in the answer."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from freshet.v1 import gateway_pb2
from gateway_scene import STORED, Scene, query_state
from test_by_http import doors

from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.scoring.packed_state import after_absence, pack_query_state
from services.algorithms.scoring.states import QueryStates
from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.contracts.wire import PackedQueryState
from services.gateway.domain import Degradation, ExplainQuery, HistoryEvent, Recommendation, RecommendQuery, SearchQuery
from services.gateway.edge.api_keys import create_key
from services.gateway.edge.roles import Role
from services.gateway.version_sets.routes import Routes, ServedSet
from services.platform.errors import DependencyUnavailable, InvalidRequest

# When the last event in ann's state happened, and a moment far from any bucket's edge: 97 floors later.
LAST_MS = 1_600_000_000_000
AS_OF_MS = LAST_MS + 100_000_000
BUCKET = 7


def rows(seed: int, *, gated: bool = True) -> AbsenceRows:
    random = np.random.default_rng(seed)
    components = random.normal(size=(18, 2, 4)).astype(np.float32)
    gate = random.normal(size=(18, 4)).astype(np.float32)
    components[0], gate[0] = 0.0, 0.0
    return AbsenceRows(floor_seconds=1024, components=components, gate=gate if gated else None)


def packed(name: str, seed: int, *, gated: bool = True) -> PackedQueryState:
    random = np.random.default_rng(seed)
    components = random.normal(size=(1, 2, 4)).astype(np.float32)
    components /= np.linalg.norm(components, axis=2, keepdims=True)
    gate = random.normal(size=(1, 4)).astype(np.float32) if gated else None
    found = pack_query_state(QueryStates(components=components, gate=gate))
    return replace(query_state(name), components=found[0], gate=found[1], num_components=2, component_width=4)


ROWS, STATE, ENCODED = rows(1), packed("stored", 5), packed("request", 6)


def scene(absence: AbsenceRows | None = ROWS, state: PackedQueryState = STATE) -> Scene:
    made = Scene(absence=absence)
    made.states.states["ann"] = replace(STORED, query_state=state, event_time_ms=LAST_MS)
    made.encoder.query_state = ENCODED
    return made


def moved(state: PackedQueryState, of: AbsenceRows = ROWS, bucket: int = BUCKET) -> PackedQueryState:
    """What is asked with after so long, by the definition."""
    found, in_bucket = after_absence(state, of, 0, 1000 * (1024 << (bucket - 1)))
    assert in_bucket == bucket
    return found


def said(answer: Recommendation) -> tuple[object, ...]:
    """All of an answer but what is another one's each time."""
    return (
        answer.items,
        answer.certificate,
        answer.state,
        answer.state_source,
        answer.degradations,
        answer.model_version,
    )


async def test_within_a_sitting_the_stored_bytes_are_asked_with_and_the_answer_is_that_of_a_model_without_rows() -> (
    None
):
    for as_of_ms in (LAST_MS, LAST_MS + 1_023_999, LAST_MS - 5_000_000):
        query = RecommendQuery(user_id="ann", k=3, as_of_ms=as_of_ms)
        with_rows, without = scene(), scene(None)
        answer = await with_rows.recommend(query)
        assert with_rows.candidates.query_states[0] is STATE
        assert (answer.absence_bucket, said(answer)) == (0, said(await without.recommend(query)))


@pytest.mark.parametrize("gated", [True, False])
async def test_all_who_are_asked_are_asked_with_one_state(gated: bool) -> None:
    of, state = rows(1, gated=gated), packed("stored", 5, gated=gated)
    made = scene(of, state)
    wanted = moved(state, of)
    assert wanted.components != state.components
    assert (wanted.gate != state.gate) == gated
    answers = [
        await made.recommend(RecommendQuery(user_id="ann", k=2, as_of_ms=AS_OF_MS)),
        await made.recommend(RecommendQuery(user_id="ann", k=2, max_per_category=1, as_of_ms=AS_OF_MS)),
    ]
    assert [answer.absence_bucket for answer in answers] == [BUCKET] * 2
    assert {*made.candidates.query_states, *made.reranker.query_states} == {wanted}
    assert (len(made.candidates.query_states) >= 2, len(made.reranker.query_states) >= 1) == (True, True)


async def test_search_and_explain_ask_with_the_state_of_now() -> None:
    made, away_ms = scene(), 100_000_000
    last_ms = time.time_ns() // 1_000_000 - away_ms
    made.states.states["ann"] = replace(STORED, query_state=STATE, event_time_ms=last_ms)
    explained = await made.explain(ExplainQuery(user_id="ann", item_id="b"))
    found = await made.search(SearchQuery(query="space", user_id="ann", k=2))
    assert (explained.absence_bucket, found.absence_bucket) == (BUCKET, BUCKET)
    assert {*made.candidates.query_states, *made.reranker.query_states} == {moved(STATE)}
    assert [exposure.absence_bucket for _, exposure in made.exposures.written] == [BUCKET]
    nobody = await made.search(SearchQuery(query="space", k=2))
    assert nobody.absence_bucket == 0


async def test_a_state_of_the_stored_history_counts_from_its_last_event() -> None:
    made = scene()
    made.states.behind, made.states.histories["ann"] = {"ann"}, [HistoryEvent("b", 1), HistoryEvent("c", LAST_MS)]
    answer = await made.recommend(RecommendQuery(user_id="ann", k=2, as_of_ms=AS_OF_MS))
    assert (answer.state_source, answer.absence_bucket) == ("stored_history", BUCKET)
    assert made.candidates.query_states == [moved(ENCODED)]


async def test_a_stale_state_counts_from_its_own_last_event() -> None:
    made = scene()
    made.states.behind, made.states.histories["ann"] = {"ann"}, [HistoryEvent("b", AS_OF_MS)]
    made.encoder.failure = DependencyUnavailable("away")
    answer = await made.recommend(RecommendQuery(user_id="ann", k=2, as_of_ms=AS_OF_MS))
    assert (answer.state_source, list(answer.degradations)) == ("stored", [Degradation.STALE_STATE])
    assert (answer.absence_bucket, made.candidates.query_states) == (BUCKET, [moved(STATE)])


async def test_a_history_in_the_request_counts_from_the_last_event_that_histories_keep() -> None:
    made = scene()
    history = (HistoryEvent("b", LAST_MS), HistoryEvent("c", AS_OF_MS, "impression"))
    query = RecommendQuery(k=2, history=history, as_of_ms=AS_OF_MS)
    answer = await made.recommend(query)
    assert (answer.state_source, answer.absence_bucket) == ("request", BUCKET)
    untimed = await made.recommend(replace(query, history=(HistoryEvent("b"), HistoryEvent("c"))))
    assert untimed.absence_bucket == 0
    assert [event.event_time_ms for event in made.encoder.histories[1][1]] == [AS_OF_MS] * 2
    assert made.candidates.query_states == [moved(ENCODED), ENCODED]


async def test_a_further_page_and_its_exposure_have_the_lists_bucket() -> None:
    made = scene()
    first = await made.recommend(RecommendQuery(user_id="ann", k=2, page_depth=5, as_of_ms=AS_OF_MS))
    second = await made.recommend(RecommendQuery(user_id="ann", k=2, page_token=first.next_page_token))
    third = await made.recommend(
        RecommendQuery(user_id="ann", k=2, page_token=second.next_page_token, as_of_ms=LAST_MS)
    )
    assert [answer.absence_bucket for answer in (first, second, third)] == [BUCKET] * 3
    assert [exposure.absence_bucket for _, exposure in made.exposures.written] == [BUCKET] * 3
    assert len(made.candidates.query_states) == 1


async def test_a_moment_that_no_request_has_is_refused_by_name() -> None:
    for as_of_ms in (-1, time.time_ns() // 1_000_000 + 2 * 86_400_000):
        with pytest.raises(InvalidRequest, match=rf"as_of='{as_of_ms} ms' allowed: 0 to \d+ ms: at most a day"):
            await scene().recommend(RecommendQuery(user_id="ann", k=2, as_of_ms=as_of_ms))


async def test_operators_alone_ask_as_of_another_time(tmp_path: Path) -> None:
    path, asked = tmp_path / "keys.json", {"userId": "ann", "k": 2, "asOf": "2020-09-14T16:13:20Z"}
    secrets = {}
    for name, roles in (("reader", {Role.RECOMMEND}), ("replay", {Role.RECOMMEND, Role.OPERATOR})):
        made = create_key(path, id=name, roles=frozenset(roles))
        secrets[name] = {"authorization": f"Bearer {made if isinstance(made, str) else made[1]}"}
    async with doors(scene(), api_keys=path, audit_log=tmp_path / "audit.log") as door:
        status, error, _ = await door.post("Recommend", asked, **secrets["reader"])
        assert (status, error["code"]) == (403, "permission_denied")
        assert error["message"] == "as_of needs the role operator; API key reader has recommend"
        status, answer, _ = await door.post("Recommend", asked, **secrets["replay"])
        assert (status, answer["absenceBucket"]) == (200, BUCKET)
        request = gateway_pb2.RecommendRequest(user_id="ann", k=2)
        request.as_of.FromMilliseconds(AS_OF_MS)
        metadata = tuple(secrets["replay"].items())
        assert (await door.stub.Recommend(request, timeout=5, metadata=metadata)).absence_bucket == BUCKET
    async with doors(scene()) as door:
        assert (await door.post("Recommend", asked))[1]["absenceBucket"] == BUCKET
        status, error, _ = await door.post("Recommend", asked | {"asOf": "yesterday"})
        assert (status, error["code"]) == (400, "invalid_argument")
        assert error["message"].startswith('JSON: asOf="yesterday" allowed: a time like')


async def test_each_version_set_asks_with_its_own_rows() -> None:
    other = rows(2)
    scenes = {"a": scene(), "b": scene(other)}
    own, canary = (
        ServedSet(handlers=one.handlers, model_version=f"m{name}", refreshers=one.refreshers, shadowed=one.recommend)
        for name, one in scenes.items()
    )

    async def opened(one: VersionSet) -> ServedSet:
        return canary

    routes = Routes(own=own, open_set=opened)
    sets = VersionSets.of_one(VersionSet(name="a", model_version="ma", bundle="/a"))
    await routes.apply(sets.staged(VersionSet(name="b", model_version="mb", bundle="/b")).canaried("b", 1.0, "salt"))
    query = RecommendQuery(user_id="ann", k=2, as_of_ms=AS_OF_MS)
    await routes.of("ann").handlers.recommend(query)
    await own.shadowed(query)
    assert scenes["b"].candidates.query_states == [moved(STATE, other)]
    assert scenes["a"].candidates.query_states == [moved(STATE)]

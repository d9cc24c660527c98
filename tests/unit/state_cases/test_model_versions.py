"""A model is deployed and rolled back: a state of the first version is older than the history, and nobody notices."""

from dataclasses import dataclass, field
from typing import Unpack

from answers import recommend
from fakes.encoder import MemoryStream
from fakes.gateway import MemoryCandidates
from gateway.gateway_scene import ITEMS, Scene
from state_scene import EncoderProcess, FragileStore, append_all, replay, vocabulary

from services.contracts.wire import PackedQueryState
from services.gateway.domain import Ranking, RecommendQuery
from services.gateway.ports import SearchOptions
from services.platform.errors import PreconditionFailed

V1, V2 = vocabulary("m1"), vocabulary("m2", shift=100)


def rolled_back() -> tuple[MemoryStream, FragileStore]:
    """Version 1 applies three events, version 2 two more, then version 1 is deployed again."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abc")
    EncoderProcess(stream, store, words=V1).settle()
    append_all(stream, "de", first=3)
    EncoderProcess(stream, store, words=V2).settle()
    EncoderProcess(stream, store, words=V1).settle()
    assert store.history() == "abcde"
    return stream, store


async def test_after_a_rollback_an_answer_is_made_of_the_whole_history() -> None:
    """The token names the last event, and it is called honoured."""
    stream, store = rolled_back()
    answer, searched = await recommend(store, V1, offset=4)
    assert answer.token_honoured
    assert searched == [replay(stream, words=V1)["ann"]["states"]["m1"]]


async def test_after_a_rollback_a_stored_state_reaches_the_honoured_token() -> None:
    _, store = rolled_back()
    answer, _ = await recommend(store, V1, offset=4)
    reached = answer.state.offset if answer.state is not None else 4
    assert (answer.token_honoured, reached, answer.state_source) == (True, 4, "stored_history")


@dataclass
class RollingDeploy(MemoryCandidates):
    """Two replicas behind one address, asked in turn: the first is of the next version already, and refuses a state of
    this version with the error that the candidates process raises."""

    async def search(self, query_state: PackedQueryState, **asked: Unpack[SearchOptions]) -> Ranking:
        if len(self.query_states) % 2 == 0:
            self.query_states.append(query_state)
            raise PreconditionFailed("candidates: query_state.model_version='m1' but this index holds model 'm2'")
        return await super().search(query_state, **asked)


@dataclass
class Deploying(Scene):
    candidates: MemoryCandidates = field(default_factory=lambda: RollingDeploy(item_ids=list(ITEMS)))


async def test_in_a_rolling_deploy_the_replicas_of_this_version_go_on_answering() -> None:
    """Ten requests in a row, while every second call reaches a replica of this version."""
    scene = Deploying()
    answers = [await scene.recommend(RecommendQuery(user_id="ann", k=3)) for _ in range(10)]
    assert [answer.state_source for answer in answers][1::2] == ["stored"] * 5

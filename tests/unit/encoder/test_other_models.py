"""One process makes the states and attributions of several models: each as a process with that model alone does."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import structlog
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import NOW_MS, VOCABULARY, append, forget, forgets_on, handler_on, interaction

from services.contracts.processes import PROCESSES
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.attributions import Attributed, Attribution, encode_attribution
from services.contracts.topics.interactions import Interaction
from services.encoder.domain import EncodedStates, EncodeJob, Vocabulary
from services.encoder.models import Model
from services.encoder.server import ServedModels
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import DependencyUnavailable
from services.platform.rpc.server import HealthState
from services.user_state.forgetting import Forgotten

PARTITIONS = 2
# Knows items that the process's own does not, and the other way round, by other numbers; and has buckets for none.
OTHER = Vocabulary(
    model_version="model-2",
    item_index={f"item-{number}": 99 - number for number in range(49, 60)},
    user_index={"user-1": 3},
    max_history=VOCABULARY.max_history,
)
USERS = [f"user-{number}" for number in range(3)]


class FailingEncoder(HashEncoder):
    """Raises while `error` is set."""

    error: Exception | None = None

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        if self.error is not None:
            raise self.error
        return super().encode(jobs)


@st.composite
def events(draw: st.DrawFn) -> Interaction:
    """Events (late, repeated, of types that histories keep out, of items that either model does not know) and undos."""
    user, number = draw(st.integers(0, 2)), draw(st.integers(0, 12))
    if draw(st.integers(0, 4)) == 0:
        return interaction(user, item_id="", event_id=f"undo-{number}", undoes_event_id=f"event-{number}")
    return interaction(
        user,
        draw(st.integers(47, 52)),
        event_id=f"event-{number}",
        event_time_ms=NOW_MS + draw(st.integers(-20, 0)) * 1_000,
        type=draw(st.sampled_from(["click", "click", "dislike", "impression"])),
    )


class Process:
    """An encoder process on a store and an outbox of its own."""

    def __init__(self, vocabulary: Vocabulary, others: tuple[Model, ...] = ()) -> None:
        self.stream, self.log = MemoryStream(PARTITIONS), MemoryForgetLog()
        self.store, self.outbox, forgotten = MemoryStore(), MemoryOutbox(), Forgotten()
        self.apply = handler_on(self.store, self.outbox, vocabulary, forgotten=forgotten)
        self.apply.encode_batch.others = others
        self.forgets = forgets_on(self.log, self.store, self.outbox, forgotten)
        self.apply.resync(self.stream)
        self.forgets.resync(self.apply.progress.epoch, self.stream.end_offsets())

    def take(self, steps: Sequence[Interaction | int], batch_size: int) -> None:
        """Write and apply; a number forgets that user up to where the stream is then."""
        for number, step in enumerate(steps):
            if isinstance(step, Interaction):
                append(self.stream, step, int(step.user_id == "user-1"))
                continue
            self.turn(batch_size)
            ends = {f"p{partition}": end - 1 for partition, end in self.stream.end_offsets().items()}
            self.log.append(forget(step, f"f{number}", **ends))
        self.turn(batch_size)

    def turn(self, batch_size: int) -> None:
        self.forgets.follow()
        while records := self.stream.poll(0, batch_size):
            self.apply.apply(records)

    def states(self, version: str) -> dict[str, Any]:
        """What a gateway reads for this model: of each user the state, and whether it reflects the whole history."""
        histories = self.store.load_users(USERS, self.apply.progress.epoch)
        return {
            user: (state, self.store.state_positions[user, model] == histories[user].expected)
            for (user, model), state in self.store.states.items()
            if model == version
        }

    def attributions(self, version: str) -> list[bytes]:
        """What a refresher of this model folds, in its order."""
        found = [one for one in self.outbox.attributions if not is_of_other(one, version)]
        return [encode_attribution(one) for one in found]


def is_of_other(one: Attributed, version: str) -> bool:
    return isinstance(one, Attribution) and one.state.model_version != version


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(*[events()] * 9, st.integers(0, 2)), max_size=40), st.integers(1, 9))
def test_two_models_in_one_process_are_two_processes(steps: list[Interaction | int], batch_size: int) -> None:
    both = Process(VOCABULARY, (Model(OTHER, HashEncoder()),))
    alone = [Process(VOCABULARY), Process(OTHER)]
    for process in (both, *alone):
        process.take(steps, batch_size)
    for version, process in zip(("model-1", "model-2"), alone, strict=True):
        assert both.states(version) == process.states(version)
        assert both.attributions(version) == process.attributions(version)
    assert both.store.seen == alone[0].store.seen
    assert both.outbox.clicks == alone[0].outbox.clicks


def clicks(*items: int, start: int = 0) -> list[Interaction]:
    return [
        interaction(0, item, event_id=f"event-{start + at}", event_time_ms=NOW_MS + start + at)
        for at, item in enumerate(items)
    ]


def test_another_models_failure_costs_its_states_and_attributions_alone() -> None:
    failing = FailingEncoder()
    both, alone = Process(VOCABULARY, (Model(OTHER, failing),)), Process(VOCABULARY)
    both.take(clicks(49, 49), 9)
    before = both.states("model-2")["user-0"][0]
    assert len(both.attributions("model-2")) == 1
    failing.error = RuntimeError("a bug")
    both.take(clicks(49, 49, start=2), 1)
    # A duplicate moves no state that was left behind.
    both.take(clicks(49, start=3), 1)
    assert both.states("model-2") == {"user-0": (before, False)}
    assert len(both.attributions("model-2")) == 1
    alone.take([*clicks(49, 49, 49, 49), *clicks(49, start=3)], 9)
    assert both.states("model-1").keys() == alone.states("model-1").keys()
    assert both.attributions("model-1") == alone.attributions("model-1")
    failing.error = None
    both.take(clicks(49, start=9), 9)
    state, is_whole = both.states("model-2")["user-0"]
    assert is_whole
    assert state != before


def test_a_batch_without_another_model_is_counted_and_a_kind_of_failure_is_logged_once() -> None:
    failing = FailingEncoder()
    both = Process(VOCABULARY, (Model(OTHER, failing),))
    failures: list[None] = []
    both.apply.encode_batch.failed = lambda: failures.append(None)
    with structlog.testing.capture_logs() as logs:
        for number, error in enumerate([None, MemoryError(), MemoryError(), RuntimeError(), None]):
            failing.error = error
            append(both.stream, clicks(49, start=number)[0])
            both.apply.apply(both.stream.poll(0, 1))
    assert len(failures) == 3
    failed = [type(entry["exc_info"]) for entry in logs if entry["event"] == "other_model_failed"]
    assert failed == [MemoryError, RuntimeError]


def test_whatever_fails_behind_another_models_answer_is_its_own_matter() -> None:
    class Short(HashEncoder):
        def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
            return super().encode(jobs)[:-1]

    both = Process(VOCABULARY, (Model(OTHER, Short()),))
    both.take(clicks(49, 49), 1)
    assert (both.states("model-1").keys(), both.states("model-2")) == ({"user-0"}, {})


def test_a_failure_leaves_states_whole_whose_histories_did_not_change() -> None:
    failing = FailingEncoder()
    both = Process(VOCABULARY, (Model(OTHER, failing),))
    both.take(clicks(49), 1)
    failing.error = RuntimeError("a bug")
    # A duplicate of one user, and an event of another, in one batch.
    for event in (clicks(49)[0], interaction(2, 49, event_id="of-another")):
        append(both.stream, event)
    both.turn(9)
    assert {user: is_whole for user, (_, is_whole) in both.states("model-2").items()} == {"user-0": True}


def test_the_processs_own_failure_stops_the_stream_as_ever() -> None:
    both = Process(VOCABULARY, (Model(OTHER, HashEncoder()),))
    failing = FailingEncoder()
    failing.error = RuntimeError("a bug")
    both.apply.encode_batch.own = Model(VOCABULARY, failing)
    with pytest.raises(RuntimeError):
        both.take(clicks(49), 1)
    assert (both.store.states, both.outbox.attributions) == ({}, [])


class NamedHealth(HealthState):
    names: Collection[str] = ()

    def serve_as(self, names: Collection[str]) -> None:
        self.names = names


async def test_a_removed_model_is_closed_and_its_health_name_ends() -> None:
    health = NamedHealth()
    served, own, other = ServedModels(health), Model(VOCABULARY, HashEncoder()), Model(OTHER, HashEncoder())
    await served.serve([own])
    of_own = served.handlers["model-1"]
    await served.serve([own, other])
    removed = served.handlers["model-2"]
    assert health.names == [PROCESSES["encoder"].health_of(version) for version in ("model-1", "model-2")]
    await served.serve([own])
    assert (served.handlers, health.names) == ({"model-1": of_own}, [PROCESSES["encoder"].health_of("model-1")])
    with pytest.raises(DependencyUnavailable):
        await removed.encode("", [StoredEvent(NOW_MS, 0, 0, 0, "item-49", "click")])
    await served.close()

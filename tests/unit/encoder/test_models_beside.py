"""A process that holds two models does what two with one each would do; one that fails is its own matter."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.encoder import HashEncoder, MemoryOutbox, MemoryStream
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import VOCABULARY, append, drain, handler_on, interaction
from test_exactly_once import filled, sizes, streams_of_records

from services.contracts.topics.attributions import Attribution
from services.contracts.topics.interactions import Interaction
from services.contracts.version_sets import VersionSet, VersionSets
from services.encoder.domain import EncodedStates, EncodeJob
from services.encoder.encoding import Vocabulary
from services.encoder.models import Model, Models
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import DependencyUnavailable

# It knows fewer items, so some events mean nothing to it.
OTHER = replace(VOCABULARY, model_version="model-2", item_index={f"item-{n}": 49 - n for n in range(50)})


class Failing(HashEncoder):
    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        raise DependencyUnavailable("away")


def made_by(outbox: MemoryOutbox, model: str) -> dict[tuple[int, int], Attribution]:
    found = [one for one in outbox.attributions if isinstance(one, Attribution)]
    return {(one.partition, one.offset): one for one in found if one.state.model_version == model}


def states_of(store: MemoryStore, model: str) -> dict[str, object]:
    return {
        user: (state.query_state, state.partition, state.offset)
        for (user, version), state in store.states.items()
        if version == model
    }


@settings(max_examples=150, deadline=None)
@given(streams_of_records, sizes, st.booleans())
def test_two_models_in_one_process_make_what_two_processes_make(
    records: list[tuple[int, Interaction | bytes]], batch_sizes: list[int], fails: bool
) -> None:
    both, said = MemoryStore(), MemoryOutbox()
    handler = handler_on(both, said)
    handler.encode_batch.others = (Model(OTHER, Failing() if fails else HashEncoder()),)
    failures: list[None] = []
    handler.encode_batch.failed = lambda: failures.append(None)
    drain(handler, filled(records), batch_sizes)
    for vocabulary in (VOCABULARY, OTHER):
        alone, said_alone = MemoryStore(), MemoryOutbox()
        handler_alone = handler_on(alone, said_alone, vocabulary)
        drain(handler_alone, filled(records), batch_sizes)
        model = vocabulary.model_version
        if vocabulary is OTHER and fails:
            assert states_of(both, model) == made_by(said, model) == {}
            assert len(failures) == len(handler_alone.encode_batch.own.encoder.calls)
            continue
        assert states_of(both, model) == states_of(alone, model)
        assert made_by(said, model) == made_by(said_alone, model)
    histories = [
        {u: store.load_users([u], store.epoch() or "")[u].events for u in ("user-0",)} for store in (both, alone)
    ]
    assert histories[0] == histories[1]


def test_a_set_comes_and_goes_between_batches() -> None:
    stream, store, outbox = MemoryStream(), MemoryStore(), MemoryOutbox()
    handler = handler_on(store, outbox)
    append(stream, interaction(0, 1))
    drain(handler, stream, (1,))
    handler.encode_batch.others = (Model(OTHER, HashEncoder()),)
    append(stream, interaction(0, 2))
    drain(handler, stream, (1,))
    # Whole, of both events.
    assert store.states["user-0", "model-2"].offset == 1
    before = store.states["user-0", "model-2"]
    handler.encode_batch.others = ()
    append(stream, interaction(0, 3))
    drain(handler, stream, (1,))
    assert store.states["user-0", "model-2"] == before
    assert store.states["user-0", "model-1"].offset == 2
    assert [one.offset for one in made_by(outbox, "model-2").values()] == [1]


class Opening:
    """A `Models` over vocabularies by folder; `closed`: versions."""

    def __init__(self, **vocabularies: Vocabulary) -> None:
        self.vocabularies, self.closed = vocabularies, list[str]()
        self.seen: list[tuple[str, ...]] = []
        self.models = Models(
            Model(VOCABULARY, HashEncoder()),
            open_model=self._open,
            changed=lambda others: self.seen.append(tuple(one.vocabulary.model_version for one in others)),
            close=lambda model: self.closed.append(model.vocabulary.model_version),
        )

    def _open(self, folder: Path) -> Model:
        return Model(self.vocabularies[folder.name], HashEncoder())


def _set(name: str, model: str) -> VersionSet:
    return VersionSet(name=name, model_version=model, bundle=f"/bundles/{name}")


def test_the_record_says_which_models_are_held() -> None:
    opening = Opening(b=OTHER)
    two = VersionSets.of_one(_set("a", "model-1")).staged(_set("b", "model-2"))
    opening.models.apply(two)
    opening.models.apply(two.promoted("b"))
    assert opening.seen == [("model-2",), ("model-2",)]
    opening.models.drop([7])
    assert [one.encoder.dropped for one in (opening.models.own, *opening.models.others)] == [[7], [7]]
    opening.models.apply(two.promoted("b").rolled_back().retired("b"))
    assert (opening.seen[-1], opening.closed) == ((), ["model-2"])


def test_a_forget_reaches_the_models_beside_though_the_inference_server_is_unavailable() -> None:
    class Unavailable(HashEncoder):
        def drop(self, cache_keys: Sequence[int]) -> None:
            raise DependencyUnavailable("away")

    opening = Opening(b=OTHER)
    opening.models.own = Model(VOCABULARY, Unavailable())
    opening.models.apply(VersionSets.of_one(_set("a", "model-1")).staged(_set("b", "model-2")))
    with pytest.raises(DependencyUnavailable):
        opening.models.drop([7])
    assert [one.encoder.dropped for one in opening.models.others] == [[7]]


def test_a_bundle_that_is_missing_or_spoiled_is_left_out() -> None:
    opening = Opening()  # a KeyError, say
    opening.models.apply(VersionSets.of_one(_set("a", "model-1")).staged(_set("b", "model-2")))
    assert opening.seen == [()]


def test_a_batch_at_hand_ends_before_its_models_go() -> None:
    entered, leave, gone = threading.Event(), threading.Event(), threading.Event()

    class Slow(HashEncoder):
        def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
            entered.set()
            assert leave.wait(30)
            return super().encode(jobs)

    stream, store = MemoryStream(), MemoryStore()
    handler = handler_on(store, MemoryOutbox())
    handler.encode_batch.hold((Model(OTHER, Slow()),))
    append(stream, interaction(0, 1))
    batch = threading.Thread(target=lambda: drain(handler, stream))
    drop = threading.Thread(target=lambda: (handler.encode_batch.hold(()), gone.set()))
    batch.start()
    assert entered.wait(30)
    drop.start()
    assert not gone.wait(0.05)
    leave.set()
    batch.join(30)
    drop.join(30)
    assert gone.is_set()
    assert ("user-0", "model-2") in store.states


@pytest.mark.parametrize(
    "changes", [{"model_version": "model-3"}, {"max_history": 9}], ids=["another model", "another window"]
)
def test_a_model_that_cannot_stand_beside_is_left_out(changes: dict[str, object]) -> None:
    opening = Opening(b=replace(OTHER, **changes))
    opening.models.apply(VersionSets.of_one(_set("a", "model-1")).staged(_set("b", "model-2")))
    assert opening.seen == [()]
    assert opening.closed == [opening.vocabularies["b"].model_version]

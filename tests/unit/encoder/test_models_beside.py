"""A process that holds two models does what two with one each would do; one that fails is its own matter."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.encoder import HashEncoder, MemoryOutbox, MemoryStream
from streams import VOCABULARY, append, drain, handler_on, interaction

from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.encoder.domain import EncodedStates, EncodeJob, Vocabulary
from services.encoder.models import Model, Models
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import DependencyUnavailable

# It knows fewer items, so some events mean nothing to it.
OTHER = replace(VOCABULARY, model_version="model-2", item_index={f"item-{n}": 49 - n for n in range(50)})


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
    handler.encode_batch.set_others((Model(OTHER, Slow()),))
    append(stream, interaction(0, 1))
    batch = threading.Thread(target=lambda: drain(handler, stream))
    drop = threading.Thread(target=lambda: (handler.encode_batch.set_others(()), gone.set()))
    batch.start()
    assert entered.wait(30)
    drop.start()
    assert not gone.wait(0.05)
    leave.set()
    batch.join(30)
    drop.join(30)
    assert gone.is_set()
    assert ("user-0", "model-2") in store.states

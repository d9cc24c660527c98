"""States as the encoder process makes them: led away from what was turned down, as of a time, by events' values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.bundles.model_manifest import AbsenceShape
from services.algorithms.ops.mol_scores import MolScorer
from services.contracts.stored_history import StoredEvent
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.served_states import Person, ServedStates, stored_events
from services.offline.training import PRESETS
from services.offline.training.presets import with_sasrec
from services.offline.training.run import run_training
from tests.unit.offline.training.training_scene import CONFIG, cyclic_interactions


def rated() -> Interactions:
    data = cyclic_interactions()
    stars = np.random.default_rng(3).integers(1, 6, len(data)).astype(np.float32)
    return replace(data, values=stars, type_names=["rating"])


def trained(out: Path, *, actions: bool = False, **changes: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", replace(with_sasrec(CONFIG), epochs=2, **changes))
        run_training(out=out, interactions=rated(), split="time", head="mol", actions=actions)
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("served") / "bundle", absence=AbsenceShape())


def people(data: Interactions, count: int) -> list[Person]:
    order, offsets = data.by_user()
    return [
        Person(data.user_ids[user], stored_events(data, order[offsets[user] : offsets[user + 1]]))
        for user in range(count)
    ]


def acted(person: Person, item_id: str, kind: str) -> Person:
    """The person after one more event, a minute after the last."""
    newest = person.events[-1]
    at = newest.offset + 1
    event = StoredEvent(newest.event_time_ms + 60_000, 0, at, at, item_id, kind, 1.0)
    return replace(person, events=[*person.events, event])


def test_a_dislike_lowers_its_items_score_and_an_impression_changes_nothing(path: Path) -> None:
    bundle, asked, items = load_bundle(path), people(rated(), 20), np.arange(20)
    states, scorer = ServedStates(bundle), MolScorer(bundle.item_states, bundle.pair_gate)
    before = scorer.scores(states(asked)[0])
    for kind in ("dislike", "hide"):
        after = scorer.scores(states([acted(one, bundle.item_ids[row], kind) for row, one in enumerate(asked)])[0])
        # The step is one of many components: of an item far away, the gate may let the score rise.
        assert (after[items, items] < before[items, items]).mean() > 0.7
    seen = states([acted(one, bundle.item_ids[row], "impression") for row, one in enumerate(asked)])[0]
    np.testing.assert_array_equal(scorer.scores(seen), before)


def test_states_are_asked_for_as_of_a_time(path: Path) -> None:
    bundle, asked = load_bundle(path), people(rated(), 10)
    absence, states = bundle.absence, ServedStates(bundle)
    assert absence is not None
    right_after, _ = states(asked)
    for later in (1023, 1024, 86_400):
        found, _ = states([replace(one, as_of=one.events[-1].event_time_ms // 1000 + later) for one in asked])
        wanted = absence.apply(right_after, absence.bucket_of(later))
        np.testing.assert_array_equal(found.components, wanted.components)
        assert found.gate is not None
        assert wanted.gate is not None
        np.testing.assert_array_equal(found.gate, wanted.gate)
        assert np.array_equal(found.components, right_after.components) == (later < 1024)


def test_a_model_that_reads_actions_makes_other_states_of_other_stars(tmp_path: Path) -> None:
    states = ServedStates(load_bundle(trained(tmp_path / "bundle", actions=True)))

    def rating(stars: dict[float, float]) -> list[Person]:
        return [
            replace(one, events=[event._replace(value=stars[event.value]) for event in one.events])
            for one in people(rated(), 10)
        ]

    # Neither speaks against an item: what differs is what the encoder read.
    of_stars, of_others = (
        states(rating(stars))[0] for stars in ({1: 3, 2: 3, 3: 4, 4: 4, 5: 5}, {1: 5, 2: 5, 3: 4, 4: 4, 5: 3})
    )
    assert (np.abs(of_stars.components - of_others.components).max(axis=(1, 2)) > 1e-3).all()

"""The benchmark of actions, on a small model: what it says is what the states and scores say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.algorithms.bundles.model_bundle import Bundle, BundleError, load_bundle
from services.algorithms.bundles.model_manifest import AbsenceShape
from services.algorithms.ops.mol_scores import MolScorer
from services.offline.datasets import Interactions
from services.offline.evaluation.actions import rows
from services.offline.evaluation.actions.next_liked import asked_after, ranks_by_arm
from services.offline.evaluation.actions.pairs import _with, changes
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.engine.served_states import Person, ServedStates, stored_events
from services.offline.training import PRESETS
from services.offline.training.presets import with_sasrec
from services.offline.training.run import run_training
from tests.unit.offline.training.training_scene import CONFIG, cyclic_interactions


def rated() -> Interactions:
    data = cyclic_interactions()
    stars = np.random.default_rng(3).integers(1, 6, len(data)).astype(np.float32)
    return replace(data, values=stars, type_names=["rating"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("actions") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", replace(with_sasrec(CONFIG), epochs=2, absence=AbsenceShape()))
        run_training(out=out, interactions=rated(), split="time", head="mol")
    return out


@pytest.fixture(scope="module")
def with_actions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("actions") / "reads-actions"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", replace(with_sasrec(CONFIG), epochs=2))
        run_training(out=out, interactions=rated(), split="time", head="mol", actions=True)
    return out


def near(bundle: Bundle, item: int, count: int) -> list[int]:
    """The items most like this one, by their mean cosine."""
    unit = bundle.item_states.components / np.linalg.norm(bundle.item_states.components, axis=-1, keepdims=True)
    alike = {other: (unit[item] * unit[other]).sum() for other in range(len(unit)) if other != item}
    return sorted(alike, key=alike.__getitem__, reverse=True)[:count]


def mean_rank(scores: np.ndarray, items: list[int]) -> float:
    return float(np.mean([1 + (scores > scores[item]).sum() for item in items]))


def people(data: Interactions, count: int) -> list[Person]:
    order, offsets = data.by_user()
    return [
        Person(data.user_ids[user], stored_events(data, order[offsets[user] : offsets[user + 1]]))
        for user in range(count)
    ]


def test_a_dislike_lowers_its_items_score_and_an_impression_changes_nothing(path: Path) -> None:
    bundle, asked, items = load_bundle(path), people(rated(), 20), np.arange(20)
    alone, learnt = (changes(bundle, asked, items, learns=learns, nearest=3) for learns in (False, True))
    states, scorer = ServedStates(bundle), MolScorer(bundle.item_states, bundle.pair_gate)
    before = scorer.scores(states(asked)[0])
    for action in ("dislike", "hide"):
        acted = [_with(one, bundle.item_ids[row], action, 1.0) for row, one in enumerate(asked)]
        after = scorer.scores(states(acted)[0])
        # The step is one of many components: of an item far away, the gate may let the score rise.
        assert (after[items, items] < before[items, items]).mean() > 0.7
        # What is near is where the scores put it; an item that has learnt of the dislike falls behind some more.
        assert np.allclose(alone[action].after, [mean_rank(after[row], near(bundle, row, 3)) for row in items])
        assert (learnt[action].after <= alone[action].after).all()
    for found in (alone, learnt):
        assert found["impression"].unchanged == 20
        assert (found["impression"].after == found["impression"].before).all()
        assert found["dislike"].unchanged == found["hide"].unchanged == found["rating 1"].unchanged == 0


def test_states_are_led_away_where_asked(path: Path) -> None:
    bundle, data = load_bundle(path), rated()
    asked = people(data, 10)
    led, _ = ServedStates(bundle)(asked)
    plain, _ = ServedStates(bundle, leads_away=False)(asked)
    against = [min(event.value for event in one.events[-20:]) < 3 for one in asked]
    assert any(against)
    for number, expected in enumerate(against):
        assert np.array_equal(led.components[number], plain.components[number]) != expected


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


def test_a_model_that_reads_actions_makes_other_states_of_other_stars(with_actions: Path) -> None:
    states, data = ServedStates(load_bundle(with_actions), leads_away=False), rated()
    asked = people(data, 10)
    turned = [Person(one.user_id, [event._replace(value=6 - event.value) for event in one.events]) for one in asked]
    of_stars, of_others = states(asked)[0], states(turned)[0]
    assert (np.abs(of_stars.components - of_others.components).max(axis=(1, 2)) > 1e-3).all()


def test_every_event_is_ranked_once_and_only_by_what_came_before(path: Path) -> None:
    bundle, data = load_bundle(path), rated()
    first = int(bundle.manifest.data["events"])
    asked = asked_after(data, first, 50, seed=1)
    assert len(set(asked.rows.tolist())) == 50
    for row, past in zip(asked.rows.tolist(), asked.before, strict=True):
        assert row >= first
        assert (data.users[past] == data.users[row]).all()
        assert (past < row).all()
        assert len(past) == np.count_nonzero(data.users[:row] == data.users[row])
    for ranks in ranks_by_arm(bundle, asked, lambda arm: None).values():
        assert ((ranks >= 1) & (ranks <= bundle.num_items + 1)).all()


def test_the_page_says_both(path: Path, with_actions: Path, tmp_path: Path) -> None:
    request = Request(how="freshet bench actions", out=tmp_path, quick=True, seed=0)
    report = rows.run(request, bundles=[path, with_actions, path], interactions=rated())
    assert {row["arm"] for row in report["rows"] if row["part"] == "next"} >= {"all events alike", "led away (served)"}
    models = {row["arm"]: row["models"] for row in report["rows"] if row["part"] == "next"}
    assert (models["all events alike"], models["item neighbours alone"], models["actions encoded"]) == (2, 2, 1)
    page = (tmp_path / "actions.md").read_text(encoding="utf-8")
    assert "| items and times | impression | off | " in page
    assert "| actions, too | impression | off | " in page
    assert "| liked | " in page


def test_models_that_saw_what_is_asked_are_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", replace(with_sasrec(CONFIG), epochs=1))
    run_training(out=tmp_path / "all", interactions=rated(), split="none", head="mol", export=False)
    request = Request(how="", out=tmp_path, quick=True, seed=0)
    with pytest.raises(BundleError, match="allowed: one data set, split by time"):
        rows.run(request, bundles=[path, tmp_path / "all"], interactions=rated())

"""A new model is judged by what people did next, kept where it passes, held back where it does not, and made once."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.bundles.model_manifest import BundleError, Manifest
from services.offline.datasets import Interactions
from services.offline.datasets.catalogue_file import Catalogue
from services.offline.evaluation.engine.served_scorer import ServedScorer
from services.offline.retraining.gate import MIN_EVENTS, Compared, _verdict, judge
from services.offline.retraining.run import retrain
from services.offline.training import PRESETS
from services.offline.training.bundling import load_model
from services.offline.training.evaluation import ModelScorer
from services.offline.training.fit import NONE
from services.offline.training.neighbours import WithNeighbours
from services.offline.training.presets import with_sasrec
from services.offline.training.run import run_training
from services.offline.training.sequences import Histories
from tests.unit.offline.training.training_scene import CONFIG, cyclic_interactions

SETTINGS: Mapping[str, Any] = {"preset_name": "quick", "head": "dot", "epochs": 4, "seed": 0}
HOURS = 72.0


def everything() -> Interactions:
    """Eleven and a half days; the next item follows from the last, and nobody has had them all."""
    return cyclic_interactions(num_users=60, num_items=150, events=6_000)


def ticks() -> Any:
    """A clock of equal steps: what a busy machine does holds no model back."""
    return itertools.count().__next__


def copied(bundle: Path) -> Callable[..., Mapping[str, Any]]:
    """A training whose result is another one's: an export alone takes seconds."""

    def train(*, out: Path, **options: Any) -> Mapping[str, Any]:
        shutil.copytree(bundle, out)
        return {}

    return train


def untrained(**options: Any) -> Mapping[str, Any]:
    raise AssertionError("trained again")


@pytest.fixture(scope="module", autouse=True)
def _small_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", replace(with_sasrec(CONFIG), absence=PRESETS["quick"].absence))
        yield


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A serving bundle that learnt noise, and one that learnt the order, of the first half."""
    folder, half = tmp_path_factory.mktemp("serving"), everything().select(slice(0, 3_000))
    noise = replace(half, items=np.random.default_rng(0).permutation(half.items))
    run_training(interactions=noise, out=folder / "noise", split=NONE, **SETTINGS)
    run_training(interactions=half, out=folder / "order", split=NONE, **SETTINGS)
    return folder / "noise", folder / "order"


def test_a_better_model_takes_the_place_and_the_same_run_does_nothing(
    bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {
        "serving": bundles[0],
        "data": everything(),
        "out": tmp_path / "next",
        "hours": HOURS,
        "clock": ticks(),
    }
    report = retrain(**asked, settings=SETTINGS)
    assert report["gate"]["passes"]
    assert not (tmp_path / "next.held-back").exists()
    new = load_bundle(tmp_path / "next")
    noted = json.loads((tmp_path / "next" / "manifest.json").read_text())["metrics"]["retraining"]
    assert noted["gate"] == report["gate"]
    lineage = noted["lineage"]
    first = lineage["events"]
    assert (lineage["events"], lineage["judged_events"]) == (first, 6_000 - first)
    assert lineage["serving"] == load_bundle(bundles[0]).model_version
    assert lineage["newest_time"] == everything().timestamps[first - 1] == new.manifest.data["newest_time"]
    again = retrain(**asked, settings=SETTINGS, train=untrained)
    assert (again["is_new"], again["gate"]) == (False, report["gate"])
    with pytest.raises(AssertionError, match="trained again"):
        retrain(**asked, settings={**SETTINGS, "seed": 1}, train=untrained)


def test_a_worse_model_is_held_back_beside_and_the_old_one_stays(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "next"
    asked: dict[str, Any] = {"serving": bundles[1], "data": everything(), "out": out, "hours": HOURS, "clock": ticks()}
    shutil.copytree(bundles[1], out)
    before = Manifest.read(out / "manifest.json")
    report = retrain(**asked, settings=SETTINGS, train=copied(bundles[0]))
    assert not report["gate"]["passes"]
    assert report["gate"]["held_back"][0].startswith("hit rate at 10 ")
    assert Manifest.read(out / "manifest.json") == before
    assert load_bundle(tmp_path / "next.held-back").model_version == report["model_version"]
    assert not retrain(**asked, settings=SETTINGS, train=untrained)["is_new"]


def test_a_run_that_ended_before_it_judged_goes_on_without_training(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "serving": bundles[0],
        "data": everything(),
        "out": tmp_path / "next",
        "hours": HOURS,
        "clock": ticks(),
    }
    whole = retrain(**asked, settings=SETTINGS, train=copied(bundles[1]))
    path = tmp_path / "next" / "manifest.json"
    manifest = Manifest.read(path)
    # Cut off after it was judged, before it was moved; then before it was judged.
    (tmp_path / "next").rename(tmp_path / "next.held-back")
    assert retrain(**asked, settings=SETTINGS, train=untrained)["bundle"] == str(tmp_path / "next")
    del manifest.metrics["retraining"]["gate"]
    manifest.write(path)
    (tmp_path / "next").rename(tmp_path / "next.held-back")
    report = retrain(**asked, settings=SETTINGS, train=untrained)
    assert report["is_new"]
    assert report["gate"]["compared"] == whole["gate"]["compared"]
    assert load_bundle(tmp_path / "next").model_version == whole["model_version"]


def test_scores_are_those_of_the_model_with_its_neighbours(bundles: tuple[Path, Path]) -> None:
    data = everything()
    # The data's items in another order, and one that the bundle has not.
    order = np.random.default_rng(1).permutation(data.num_items)
    ids = [data.item_ids[row] for row in order] + ["item-new"]
    moved = replace(
        data,
        items=np.argsort(order)[data.items].astype(np.int32),
        item_ids=ids,
        titles=[*data.titles, ""],
        categories=[*data.categories, ()],
    )
    bundle = load_bundle(bundles[1])
    events = np.arange(200, 5_900, 570)
    histories = Histories.of(data)
    users = np.searchsorted(histories.offsets, events, side="right") - 1
    assert bundle.absence is not None
    assert any(bundle.absence.bucket_of(gap) for gap in histories.gaps(events).tolist())
    scorer: Any = ModelScorer(load_model(bundle))
    if bundle.neighbours is not None:
        scorer = WithNeighbours(model=scorer, neighbours=bundle.neighbours)
    index = np.array([bundle.item_index[item_id] for item_id in data.item_ids])
    in_bundle = replace(data, items=index[data.items].astype(np.int32), item_ids=list(bundle.item_ids))
    wanted = scorer.scores(Histories.of(in_bundle), events, users)[:, index][:, order]
    served = ServedScorer(bundle, moved).scores(Histories.of(moved), events, users)
    assert served[:, :-1] == pytest.approx(wanted, abs=2e-3)  # states in half precision
    assert np.isneginf(served[:, -1]).all()


def shown_and_turned_down(data: Interactions) -> Interactions:
    """The same events; after each of them its user is shown the next item twice, and after everything turns it down."""
    following = (data.items + 1) % data.num_items
    last = np.zeros(len(data), dtype=bool)
    last[np.unique(data.users[::-1], return_index=True)[1]] = True
    last = last[::-1]
    parts = [
        (np.arange(len(data)), data.items, 0, 1.0),
        *[(np.arange(len(data)), following, 1, 1.0)] * 2,
        (np.flatnonzero(last), following[last], 2, 1.0),
        (np.flatnonzero(last), following[last], 3, 2.0),
    ]
    row, items, kind, value = (
        np.concatenate([np.broadcast_to(part[column], len(part[0])) for part in parts]) for column in range(4)
    )
    # What turns down comes after everything, so that nothing else is predicted from it.
    order = np.lexsort((kind, row, kind > 1))
    end = int(data.timestamps[-1])
    return replace(
        data,
        users=data.users[row[order]],
        items=items[order].astype(np.int32),
        timestamps=np.where(kind[order] > 1, end, data.timestamps[row[order]]),
        values=value[order].astype(np.float32),
        types=kind[order].astype(np.int16),
        type_names=["click", "impression", "dislike", "rating"],
    )


def test_what_was_shown_or_turned_down_judges_nobody(bundles: tuple[Path, Path]) -> None:
    data, first = everything(), 4_500
    serving, new = (load_bundle(path) for path in bundles)
    wanted = judge(serving, new, data, first, clock=ticks())
    mixed = shown_and_turned_down(data)
    found = judge(serving, new, mixed, int(np.flatnonzero(mixed.types == 0)[first]), clock=ticks())
    assert found == wanted


def test_the_new_model_keeps_what_the_serving_one_was_told(tmp_path: Path) -> None:
    data = replace(everything(), type_names=["took"])
    events, attributes = tmp_path / "events.yaml", pa.table({"price": np.arange(150.0)})
    events.write_text("types: {took: {role: positive}, banner: {role: exposure}}")
    items = Catalogue(rows={one: row for row, one in enumerate(data.item_ids)}, attributes=attributes)
    told: dict[str, Any] = {"events": events, "catalogue": items, "actions": True}
    serving = tmp_path / "serving"
    run_training(interactions=data.select(slice(0, 3_000)), out=serving, split=NONE, export=False, **told, **SETTINGS)
    said: dict[str, Any] = {}

    def note(**options: Any) -> Mapping[str, Any]:
        said.update(options, events=options["events"].read_text())
        raise InterruptedError

    with pytest.raises(InterruptedError):
        retrain(serving=serving, data=data, out=tmp_path / "next", hours=HOURS, settings=SETTINGS, train=note)
    assert said["events"] == events.read_text()
    assert said["actions"]
    assert said["catalogue"].attributes_of(data.item_ids).to_pydict() == attributes.to_pydict()


def test_what_was_only_shown_is_in_no_new_catalogue(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    data = everything()
    known: list[Interactions] = []

    def note(*, interactions: Interactions, **options: Any) -> Mapping[str, Any]:
        known.append(interactions)
        raise InterruptedError

    mixed = replace(
        data,
        types=(data.items == 7).astype(np.int16),
        type_names=["click", "impression"],
    )
    with pytest.raises(InterruptedError):
        retrain(serving=bundles[0], data=mixed, out=tmp_path / "n", hours=HOURS, settings=SETTINGS, train=note)
    assert set(data.item_ids) - set(known[0].item_ids) == {"item-7"}


def compared(stratum: str, mean: float, low: float, p_worse: float, *, serving: float = 0.2) -> Compared:
    return Compared(
        question="q",
        stratum=stratum,
        events=1_000,
        serving=serving,
        new=serving + mean,
        difference=(mean, low, mean + (mean - low)),
        p_worse=p_worse,
    )


@pytest.mark.parametrize(
    ("overall", "parts", "costs", "said"),
    [
        (compared("all", 0.001, -0.009, 1), [], (1, 1), []),
        (compared("all", 0.001, -0.011, 1), [], (1, 1), ["it may lose 0.0110; allowed: 5%, 0.0100"]),
        (compared("all", 0.02, 0.01, 1), [compared("new", -0.05, -0.09, 0.001)], (1, 1), ["q, new: 0.1500"]),
        # One of ten that looks worse by chance holds nothing back.
        (
            compared("all", 0.02, 0.01, 1),
            [compared("new", -0.05, -0.09, 0.02), *(compared(str(n), 0.01, 0, 1) for n in range(9))],
            (1, 1),
            [],
        ),
        (compared("all", 0.02, 0.01, 1), [], (1.6, 1), ["processor time: 1.60"]),
        (compared("all", 0.02, 0.01, 1), [], (1, 2.0), ["bytes: 2.00"]),
    ],
    ids=["level", "may lose", "worse for some", "by chance", "slower", "larger"],
)
def test_what_holds_a_model_back(
    overall: Compared, parts: list[Compared], costs: tuple[float, float], said: list[str]
) -> None:
    verdict = _verdict([overall, *parts], *costs)
    assert verdict.passes == (not said)
    assert len(verdict.held_back) == len(said)
    for found, wanted in zip(verdict.held_back, said, strict=True):
        assert wanted in found


def test_what_cannot_be_judged_is_refused(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    data, out = everything(), tmp_path / "next"
    refusals = [
        ({"data": replace(data, has_times=False)}, "cyclic has no times by the clock"),
        ({"hours": 10_000}, "hours=10000; allowed: less than the cyclic data's"),
        ({"hours": 200}, r"has learnt events up to .* judged by those from .* allowed: newer data, or fewer hours"),
        ({"hours": 0.2}, f"events to judge by; allowed: {MIN_EVENTS} and more"),
        ({"serving": tmp_path / "nothing"}, "manifest.json is missing"),
    ]
    for changes, said in refusals:
        asked: dict[str, Any] = {"serving": bundles[0], "data": data, "hours": HOURS} | changes
        with pytest.raises((ValueError, BundleError), match=said):
            retrain(**asked, out=out, settings=SETTINGS, train=copied(bundles[1]) if "hours" in changes else untrained)
    with pytest.raises(ValueError, match="events to judge by"):
        judge(load_bundle(bundles[0]), load_bundle(bundles[1]), data, len(data) - 5)

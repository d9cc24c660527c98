"""The comparison runs once, goes on where it was, reads the test last, and its page says what was measured."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from services.offline.datasets import Interactions
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.engine.baselines import GRIDS
from services.offline.evaluation.engine.ranked_events import RankedEvents
from services.offline.evaluation.quality import table
from services.offline.evaluation.quality.arms import ARMS, EVERY_ARM, Trial, bytes_per_item, tune
from services.offline.evaluation.quality.page import page, plot_curves, quality
from services.offline.evaluation.quality.runs import Finished, Plan, Store
from services.offline.evaluation.quality.table import DATA as SETS
from services.offline.evaluation.quality.table import (
    MeasuredData,
    OutOfTime,
    Work,
    difference,
    family,
    finals_of,
    measure,
    plan_for,
    report,
    values_of,
)
from tests.unit.offline.training.training_scene import CONFIG, cyclic_interactions


@dataclass(frozen=True, kw_only=True, slots=True)
class CyclicData(MeasuredData):
    def load(self) -> Interactions:
        return cyclic_interactions(num_users=60, num_items=200)


DATA = (CyclicData(name="cyclic", splits=("leave-one-out",), seeds=2),)


def short(data: MeasuredData, train: Interactions) -> Plan:
    return Plan(config=replace(CONFIG, num_negatives=8), trial_epochs=1, final_epochs=2, tuning_seconds=0.0)


def work(folder: Path, **options) -> Work:
    return Work(store=folder, say=lambda line: None, plan=short, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    assert not measure(work(folder, until=time.monotonic() - 1), DATA)
    assert measure(work(folder, commit="4f1d2c3"), DATA)
    return folder


def test_every_arm_has_its_trials_and_a_final_run_per_seed(finished: Path) -> None:
    store = Store(finished / "cyclic" / "leave-one-out")
    finals = finals_of(store)
    assert set(finals) == {*ARMS, *GRIDS}
    for name in ARMS:
        assert len(finals[name]) == 2
        # No time for more than what every arm tries.
        trials = [store.get(f"{name}/trial-{number}") for number in range(len(EVERY_ARM))]
        assert store.get(f"{name}/trial-{len(EVERY_ARM)}") is None
        assert {(one.row["trial"]["loss"], one.row["trial"]["num_negatives"]) for one in trials} == {
            ("sampled-softmax", 64),
            ("corrected-softmax", 64),
            ("corrected-softmax", 256),
        }
        best = max(trials, key=lambda one: one.row["validation"])
        assert finals[name][0].row["trial"] == best.row["trial"]
        assert all(one.ranked is None and "metrics" not in one.row for one in trials), "a trial has read the test"


def test_with_neighbours_the_best_of_each_head_are_ranked_again_and_not_trained_again(finished: Path) -> None:
    store = Store(finished / "cyclic" / "leave-one-out")
    assert not list(finished.rglob("neighbours-*.checkpoint"))
    near = {name: runs for name in ARMS if (runs := [store.get(f"{name}/neighbours-{seed}") for seed in range(2)])[0]}
    assert [ARMS[name].is_mixture for name in near] == [False, True]
    for name, runs in near.items():
        for seed, run in enumerate(runs):
            alone = store.get(f"{name}/final-{seed}")
            assert (run.row["curve"], run.row["trial"]) == (alone.row["curve"], alone.row["trial"])
            assert (run.ranked.events == alone.ranked.events).all()
            # Where the model keeps all of a score, nothing changes; 64 neighbours take 512 bytes.
            assert run.row["model_share"] < 1 or (run.ranked.ranks == alone.ranked.ranks).all()
            assert run.row["bytes_per_item"] - alone.row["bytes_per_item"] == 512
    verdicts = report(work(finished), DATA)["sections"][0]["verdicts"]
    questions = [verdict["question"] for verdict in verdicts]
    assert questions.count("with item neighbours minus without") == 2 * len(near)
    served = [one for one in verdicts if one["question"] == "mixture minus best dot product, both with item neighbours"]
    dot, mixture = near
    assert {(verdict["one"], verdict["other"]) for verdict in served} == {(mixture, dot)}
    for verdict in served:
        one, other = (values_of(near[name], verdict["metric"]).mean() for name in (mixture, dot))
        assert verdict["mean"] == pytest.approx(one - other, abs=1e-5)


def test_what_is_done_is_not_done_again(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.json")}
    assert measure(work(finished, until=time.monotonic() - 1), DATA)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*.json")} == before


def test_sections_of_an_earlier_report_stand_until_there_is_more(finished: Path, tmp_path: Path) -> None:
    request = Request(how="freshet bench paper table-3", out=tmp_path / "page", quick=False, seed=0)

    def sections(store: Path, data: tuple[MeasuredData, ...] = DATA, hours: float | None = None) -> list[dict]:
        return quality(request, data=data, store=store, seeds=None, hours=hours)["sections"]

    others = CyclicData(name="others", splits=("leave-one-out",))
    assert [one["finals"]["done"] for one in sections(tmp_path / "nothing", (others, *DATA), hours=0)] == [0, 0]
    whole = sections(finished)[1]
    assert whole["finals"]["done"] == whole["finals"]["expected"] == DATA[0].expected("leave-one-out") > 0
    # Another machine, with no run: nothing is done again, and nothing of what was not asked for is lost.
    again = sections(tmp_path / "nothing")
    assert again[1] == whole
    assert [one["data"] for one in again] == ["others", "cyclic"]
    assert not (tmp_path / "nothing").exists()
    # A trial alone is more than nothing, and is not lost to a machine that has none.
    trial = Store(finished / "cyclic" / "leave-one-out").get("hstu-dot/trial-0")
    Store(tmp_path / "begun" / "others" / "leave-one-out").put("hstu-dot/trial-0", trial)
    for store in ("begun", "nothing"):
        assert sections(tmp_path / store, (others,), hours=0)[0]["trials"] == [trial.row]


def test_a_call_that_goes_on_may_try_another_setting_than_the_one_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_arm = CyclicData(name="cyclic", splits=("leave-one-out",), seeds=1, arms=("hstu-dot",), baselines=())

    def planned(data: MeasuredData, train: Interactions) -> Plan:
        return replace(short(data, train), trial_epochs=3)

    def stops(line: str) -> None:
        if "epoch 3" in line:
            raise OutOfTime

    assert not measure(replace(work(tmp_path), plan=planned, say=stops), (one_arm,))
    assert list(tmp_path.rglob("trial-0*.checkpoint"))
    other = Trial(loss="sampled-softmax", num_negatives=16)

    def tries_other(changes: object, seconds: float, tried: Callable[[Trial, float], object]) -> Trial:
        assert tried(other, math.inf) is not None
        return other

    monkeypatch.setattr(table, "tune", tries_other)
    assert measure(replace(work(tmp_path), plan=planned), (one_arm,))
    assert finals_of(Store(tmp_path / "cyclic" / "leave-one-out"))["hstu-dot"][0].row["trial"] == asdict(other)


def test_rows_from_before_a_setting_existed_are_not_tried_again(finished: Path, tmp_path: Path) -> None:
    before = Store(finished / "cyclic" / "leave-one-out")
    kept = Store(tmp_path / "cyclic" / "leave-one-out")
    rows = [before.get(f"hstu-dot/trial-{number}").row for number in range(len(EVERY_ARM))]
    # Another one than this machine would choose.
    chosen = Trial(**EVERY_ARM[1])
    for number, row in enumerate(rows):
        row["validation"] = float(Trial(**row["trial"]) == chosen)
        del row["trial"]["start_noise"]
        kept.put(f"hstu-dot/trial-{number}", Finished(row=row, ranked=None))
    begun: list[str] = []
    one_arm = CyclicData(name="cyclic", splits=("leave-one-out",), seeds=1, arms=("hstu-dot",), baselines=())
    assert measure(replace(work(tmp_path), say=begun.append), (one_arm,))
    assert not [line for line in begun if "trial-" in line]
    assert finals_of(kept)["hstu-dot"][0].row["trial"] == asdict(chosen)
    [found] = report(work(tmp_path), (one_arm,))["sections"]
    assert found["trials"] == rows


def test_settings_of_another_set_are_taken_or_asked_for(finished: Path, tmp_path: Path) -> None:
    section = report(work(finished), DATA)["sections"][0]
    chosen = {row["arm"]: row["chosen"] for row in section["rows"] if row["arm"] in GRIDS}
    large = CyclicData(
        name="large", splits=("leave-one-out",), seeds=1, baselines=("als",), arms=("hstu-mol",), settings_of="cyclic"
    )
    with pytest.raises(
        ValueError, match="settings that cyclic's trials chose, but there is no als/trial-0; measure cyclic"
    ):
        measure(work(tmp_path / "alone"), (large,))
    copytree(finished / "cyclic", tmp_path / "cyclic")
    assert measure(work(tmp_path), (large,))
    finals = finals_of(Store(tmp_path / "large" / "leave-one-out"))
    assert finals["als"][0].row["settings"] == chosen["als"]
    store = Store(finished / "cyclic" / "leave-one-out")
    assert finals["hstu-mol"][0].row["trial"] == store.get("hstu-mol/final-0").row["trial"]
    assert not list((tmp_path / "large").rglob("trial-*"))


def test_the_page_has_every_row_and_the_verdicts_on_models(finished: Path, tmp_path: Path) -> None:
    found = report(work(finished), DATA) | {"command": "freshet bench paper table-3"}
    json.dumps(found)
    text = page(found)
    section = found["sections"][0]
    assert text.count("\n| **") == len(ARMS) + 2
    assert text.count(", with item neighbours**") == 2
    shown = {verdict["question"] for verdict in section["verdicts"]} - {"with item neighbours minus without"}
    assert all(question in text for question in shown)
    assert len(section["trials"]) == len(ARMS) * len(EVERY_ARM)
    for metric in ("ndcg@10", "hr@10"):
        # Three families, each corrected by itself: the smallest of its p-values by the number of its verdicts.
        families: dict[str, list[dict]] = {}
        for verdict in (one for one in section["verdicts"] if one["metric"] == metric):
            families.setdefault(family(verdict["question"]), []).append(verdict)
        assert set(families) == {"mixture against dot product", "against the best baseline", "item neighbours"}
        for members in families.values():
            first = min(members, key=lambda one: one["p_value"])
            assert first["holm"] == pytest.approx(min(1, first["p_value"] * len(members)), abs=1e-4)
    plot_curves(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def tuned(scores: dict[str, float], seconds: float, arm: str = "hstu-mol") -> tuple[Trial, list[str]]:
    """With this score for each setting by its text (else 0) and a second each: what is chosen, and what was tried."""
    seen: list[str] = []

    def tried(trial: Trial, left: float) -> tuple[float, float] | None:
        if left < 1:
            return None
        seen.append(trial.text)
        return scores.get(trial.text, 0.0), 1.0

    return tune(ARMS[arm].changes, seconds, tried), seen


def test_an_arm_tries_changes_to_its_best_setting_while_its_time_lasts() -> None:
    best = "corrected-softmax, 256 negatives"
    everybody = ["sampled-softmax, 64 negatives", "corrected-softmax, 64 negatives", best]
    assert tuned({best: 0.2}, 0.0) == (Trial(**EVERY_ARM[2]), everybody)
    noisy = f"{best}, start noise 0.3"
    scores = {best: 0.2, noisy: 0.3}
    dropping = f"{best}, gate dropout 0.2, pair dropout 0.1, start noise 0.3"
    assert tuned(scores, 5.5) == (Trial(**EVERY_ARM[2], start_noise=0.3), [*everybody, noisy, dropping])
    # A change that is no better is left again.
    slower = f"{best}, gate rate 0.3"
    assert tuned({best: 0.2}, 6.5)[1][-1] == slower


def test_settings_that_a_full_softmax_does_not_read_are_not_tried_with_it() -> None:
    chosen, seen = tuned({"full-softmax": 0.3, "corrected-softmax, 1024 negatives": 0.2}, 100.0, "hstu-dot")
    assert chosen == Trial(loss="full-softmax")
    assert seen[3:] == [
        "full-softmax",
        "corrected-softmax, 1024 negatives",
        "full-softmax, rate 0.5",
        "full-softmax, rate 2",
    ]


def test_a_trials_settings_are_those_of_its_training() -> None:
    trial = Trial(
        loss="corrected-softmax",
        num_negatives=256,
        regularised=True,
        component_width=4,
        groups_per_tile=2,
        gate_dropout=0.2,
        pair_dropout=0.3,
        rate=0.5,
        head_rate=3.0,
        gate_rate=0.25,
        start_noise=0.125,
    )
    assert trial.applied(CONFIG) == replace(
        CONFIG,
        loss="corrected-softmax",
        num_negatives=256,
        dropouts=replace(CONFIG.dropouts, encoder=0.3, item=0.2, gate=0.2, pair=0.3),
        head=replace(CONFIG.head, component_width=4),
        groups_per_tile=2,
        learning_rate=CONFIG.learning_rate / 2,
        head_rate=3.0,
        gate_rate=0.25,
        start_noise=0.125,
    )
    assert trial.text == (
        "corrected-softmax, 256 negatives, more dropout, component width 4, groups per tile 2, gate dropout 0.2, "
        "pair dropout 0.3, rate 0.5, head rate 3, gate rate 0.25, start noise 0.125"
    )


def test_a_long_training_differs_in_its_epochs_alone() -> None:
    by_key = {one.key: one for one in SETS}
    assert len(by_key) == len(SETS)
    train = cyclic_interactions(num_users=60, num_items=200)
    usual, longer = plan_for(by_key["ml-1m"], train), plan_for(by_key["ml-1m-long"], train)
    assert longer == replace(usual, final_epochs=30) != usual
    assert by_key["ml-1m-long"].tuned_on("leave-one-out") == by_key["ml-1m"].tuned_on("leave-one-out")


def test_one_person_with_many_events_decides_nothing() -> None:
    users = np.array([0] * 90 + [1] * 10)

    def runs(ranks: np.ndarray) -> list[Finished]:
        ranked = RankedEvents(events=np.arange(100), users=users, ranks=ranks, coverage=1.0)
        return [Finished(row={}, ranked=ranked)]

    found = difference(runs(np.where(users == 0, 0, 50)), runs(np.where(users == 1, 0, 50)), "hr@10")
    assert found.mean == pytest.approx(0.8)
    assert (found.low, found.high) == (-1, 1)
    assert found.p_value > 0.2


def test_the_wide_dot_product_has_the_mixtures_bytes_per_item() -> None:
    assert bytes_per_item(ARMS["hstu-dot-wide"].shaped(CONFIG)) == bytes_per_item(CONFIG)

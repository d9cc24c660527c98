"""The whole comparison: the data, splits and seeds, the order of the runs, and the results.

Every arm and baseline is tuned on validation, then ranks the test events; arms do so once per seed. At the time limit
the work ends; the next call continues it. The report counts missing runs. A section of an earlier report, possibly from
another machine, is used until this machine has more runs for that section.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from services.offline.datasets import Interactions, MeasuredSplit, load_dataset, order_test
from services.offline.datasets.splits import SPLITS
from services.offline.evaluation.common.report import machine
from services.offline.evaluation.engine.baselines import GRIDS
from services.offline.evaluation.engine.intervals import Estimate, holm, paired_difference, spread
from services.offline.evaluation.engine.metrics import METRICS, gains
from services.offline.evaluation.quality.arms import ARMS, Arm, Trial, tune
from services.offline.evaluation.quality.runs import Finished, Plan, Row, Store, run_arm, run_baseline
from services.offline.training.choice import microseconds_per_position
from services.offline.training.loop import Step
from services.offline.training.presets import preset
from services.offline.training.sequences import Histories

TIME, LAST, LAST_REVERSED = "global time", "leave-one-out", "leave-one-out, reversed ties"
# Each verdict has these metrics. Holm's correction is applied to the verdicts of one family and one metric.
JUDGED = ("ndcg@10", "hr@10")
# The smallest possible p-value is 2 / (R + 1). Holm multiplies it by a family's comparisons, at most 50, to .02.
_REPLICATES = 5_000
# Processor time for an arm's trials on one split. On ML-1M, a dot product has time for 12 trials, a mixture for 6.
TUNING_SECONDS = 600.0
_SHORTER, _NEIGHBOURS = "short", "neighbours"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredData:
    """A data set of the table. The first split is the primary one; `seeds` is the number of final runs per arm.

    `variant` distinguishes entries of one data set. `setting`: the setting of all arms, which replaces tuning.
    `settings_of`: another set, whose trials chose the settings. `epochs`: the length of final runs.
    """

    name: str
    variant: str = ""
    splits: tuple[str, ...]
    seeds: int = 3
    baselines: tuple[str, ...] = tuple(GRIDS)
    arms: tuple[str, ...] = tuple(ARMS)
    setting: Trial | None = None
    settings_of: str | None = None
    epochs: int | None = None

    @property
    def key(self) -> str:
        """The name by which it is requested."""
        return f"{self.name}-{self.variant}" if self.variant else self.name

    def tuned_on(self, split: str) -> tuple[str, str]:
        """Return the data and split of the trials that choose the settings."""
        return self.settings_of or self.key, LAST if split == LAST_REVERSED else split

    def arms_of(self, split: str) -> tuple[str, ...]:
        """Return the split's arms. The split with reversed ties only checks one verdict, so it has two arms."""
        return ("hstu-dot", "hstu-mol") if split == LAST_REVERSED else self.arms

    def expected(self, split: str) -> int:
        """Return a complete split's number of final runs."""
        return len(self.baselines) + self.seeds * len(self.arms_of(split))

    def load(self) -> Interactions:
        """Return the events; ml-1m without rare items, as in published tables."""
        interactions = load_dataset(self.name, download=False)
        return interactions.keep_frequent(min_per_item=5) if self.name == "ml-1m" else interactions


DATA = (
    MeasuredData(name="ml-latest-small", splits=(TIME, LAST)),
    MeasuredData(name="amazon-beauty-2014", splits=(LAST,)),
    MeasuredData(name="ml-1m", splits=(TIME, LAST, LAST_REVERSED)),
    MeasuredData(name="amazon-sports-2014", splits=(LAST,)),
    # Trials on this set would take five hours. EASE's matrices of items by items need 22 GiB.
    MeasuredData(
        name="amazon-beauty-large-2014",
        splits=(LAST,),
        baselines=tuple(name for name in GRIDS if name != "ease"),
        settings_of="amazon-beauty-2014",
    ),
    # Does the verdict of short trainings hold for long ones?
    MeasuredData(
        name="ml-1m",
        variant="long",
        splits=(TIME, LAST),
        baselines=(),
        arms=("hstu-dot", "hstu-dot-wide", "hstu-mol"),
        settings_of="ml-1m",
        epochs=30,
    ),
    # The paper's own comparison: all arms have the same sampled negatives.
    *(
        MeasuredData(
            name=name,
            variant="equal",
            splits=(LAST,),
            baselines=(),
            arms=("sasrec-dot", "hstu-dot", "sasrec-mol", "hstu-mol"),
            setting=Trial(loss="sampled-softmax", num_negatives=128),
        )
        for name in ("ml-1m", "amazon-beauty-2014")
    ),
    # Do the mixture's 64 negatives explain that it is below the dot product?
    MeasuredData(
        name="amazon-sports-2014",
        variant="equal",
        splits=(LAST,),
        baselines=(),
        arms=("hstu-dot", "hstu-dot-wide", "hstu-mol"),
        setting=Trial(loss="corrected-softmax", num_negatives=256),
    ),
)


class OutOfTime(Exception):
    """The time limit is over; all finished runs are stored."""


def plan_for(data: MeasuredData, train: Interactions) -> Plan:
    """Return preset `quick` with a million positions a trial and 2.5 million a final run.

    Short histories use larger batches, which halve the processor time.
    """
    positions = Histories.of(train).num_positions
    sequences = int((train.user_counts() > 1).sum())
    config = preset("quick")
    config = replace(config, batch_sequences=128 if positions < 20 * sequences else config.batch_sequences)
    return Plan(
        config=config,
        trial_epochs=int(np.clip(round(1_000_000 / positions), 3, 10)),
        final_epochs=data.epochs or int(np.clip(round(2_500_000 / positions), 6, 20)),
        tuning_seconds=TUNING_SECONDS,
    )


@dataclass(kw_only=True, slots=True)
class Work:
    """No run begins after `until` (a time.monotonic()); None means no limit."""

    store: Path
    say: Callable[[str], None]
    until: float | None = None
    plan: Callable[[MeasuredData, Interactions], Plan] = plan_for
    earlier: Sequence[Mapping[str, Any]] = field(default_factory=list)
    commit: str | None = None

    def earlier_of(self, key: str, split: str) -> dict[str, Any] | None:
        """Return this split's earlier section, if any."""
        return next((dict(one) for one in self.earlier if (one["data"], one["split"]) == (key, split)), None)

    def check_time(self) -> None:
        if self.until is not None and time.monotonic() >= self.until:
            raise OutOfTime


def measure(work: Work, data: Sequence[MeasuredData]) -> bool:
    """Do the missing runs; return whether all are done."""
    try:
        for one in data:
            open_splits = [split for split in one.splits if _num_done(work, one, split) < one.expected(split)]
            # This machine repeats a split that another machine began, so splits without any result come first.
            open_splits.sort(key=partial(_num_done, work, one))
            if not open_splits:
                continue
            interactions = one.load()
            for split_name in open_splits:
                _Comparison(work, one, SPLITS[split_name](interactions)).measure()
    except OutOfTime:
        return False
    return True


def _num_done(work: Work, data: MeasuredData, split: str) -> int:
    earlier = work.earlier_of(data.key, split)
    return 0 if earlier is None else int(earlier["finals"]["done"])


class _Comparison:
    def __init__(self, work: Work, data: MeasuredData, split: MeasuredSplit) -> None:
        self.work, self.data, self.split, self.seeds = work, data, split, data.seeds
        self.folder = work.store / data.key / _folder(split.name)
        self.store = Store(self.folder)
        tuned_data, tuned_split = data.tuned_on(split.name)
        self.trials = Store(work.store / tuned_data / _folder(tuned_split))
        self.arms = [ARMS[name] for name in data.arms_of(split.name)]
        self.plan = work.plan(data, split.train)

    def measure(self) -> None:
        for name in self.data.baselines:
            self.baseline(name)
        chosen = {arm.name: self.tuned(arm) for arm in self.arms}
        for seed in range(self.seeds):
            for arm in self.arms:
                self.final(arm, chosen[arm.name], seed)
        self.shorter_mixture()
        finals = finals_of(self.store)
        for name in _best_arms(finals):
            for seed in range(self.seeds):
                self.final(ARMS[name], chosen[name], seed, served=True)

    def baseline(self, name: str) -> None:
        settings = GRIDS[name][0]
        if len(GRIDS[name]) > 1:
            trials = [
                self._done(
                    self.trials, f"{name}/trial-{number}", partial(run_baseline, name, one, self.split, is_final=False)
                )
                for number, one in enumerate(GRIDS[name])
            ]
            settings = GRIDS[name][int(np.argmax([one.row["validation"] for one in trials]))]
        self._done(self.store, f"{name}/final-0", partial(run_baseline, name, settings, self.split, is_final=True))

    def tuned(self, arm: Arm) -> Trial:
        """Return the data's fixed setting, or the best one on validation with one seed, of those that the plan's time
        allows.
        """
        if self.data.setting is not None:
            return self.data.setting
        begun = self.store.get(f"{arm.name}/final-0")
        if begun is not None:  # expected times vary, and all seeds must have one setting
            return Trial(**begun.row["trial"])
        known = {Trial(**one.row["trial"]): one for one in _stored(self.trials, arm.name, "trial")}

        def tried(trial: Trial, left: float) -> tuple[float, float] | None:
            if trial not in known:
                if left < math.inf and (self.data.settings_of or left < self._expected_seconds(arm, trial)):
                    return None
                known[trial] = self._trained(f"{arm.name}/trial-{len(known)}", arm, trial, seed=0, is_final=False)
            return known[trial].row["validation"], known[trial].row["cpu_seconds"]

        return tune(arm.changes, self.plan.tuning_seconds, tried)

    def _expected_seconds(self, arm: Arm, trial: Trial) -> float:
        self.work.check_time()
        microseconds = microseconds_per_position(trial.applied(arm.shaped(self.plan.config)), self.split.train)
        return Histories.of(self.split.train).num_positions * self.plan.trial_epochs * microseconds / 1e6

    def final(self, arm: Arm, trial: Trial, seed: int, *, served: bool = False) -> None:
        """Do a final run. `served`: rank with item neighbours, as a bundle does."""
        name = f"{arm.name}/final-{seed}"
        served_name = f"{arm.name}/{_NEIGHBOURS}-{seed}" if served else name
        self._trained(served_name, arm, trial, seed=seed, is_final=True, of=name)

    def shorter_mixture(self) -> None:
        """Train the best mixture again, alone and as served, in at most the best dot product's processor time."""
        finals = finals_of(self.store)
        mixture, dot = best_arm(finals, mixtures=True), best_arm(finals, mixtures=False)
        if mixture is None or dot is None:
            return
        per_epoch = np.mean([one.row["cpu_seconds"] / one.row["epochs"] for one in finals[mixture]])
        epochs = int(_mean(finals[dot], "cpu_seconds") / per_epoch)
        if epochs >= max(one.row["epochs"] for one in finals[mixture]):
            return
        arm = ARMS[mixture]
        trial = Trial(**finals[mixture][0].row["trial"])
        for seed in range(self.seeds):
            plan, name = replace(self.plan, final_epochs=max(1, epochs)), f"{mixture}/{_SHORTER}-{seed}"
            for served in (name, f"{mixture}/{_SHORTER}-{_NEIGHBOURS}-{seed}"):
                self._trained(served, arm, trial, seed=seed, is_final=True, plan=plan, of=name)

    def _trained(
        self, name: str, arm: Arm, trial: Trial, *, seed: int, is_final: bool, plan: Plan | None = None, of: str = ""
    ) -> Finished:
        """Do a run. If `of` names another run, use that run's model, with item neighbours."""
        store = self.store if is_final else self.trials
        # A trial's checkpoint is named by its setting, because a later call may try another setting as this trial.
        checkpoints = of or (name if is_final else f"{name}, {trial.text}")

        def progress(step: Step) -> None:
            # An interrupted training continues from its last checkpoint, at most half a minute earlier.
            self.work.check_time()
            share = step.positions / step.total_positions
            self.work.say(
                f"{self.data.key}, {self.split.name}, {name}: epoch {step.epoch + 1}, {share:.0%}, loss {step.loss:.3f}"
            )

        run = partial(
            run_arm,
            *(arm, trial, plan or self.plan, self.split),
            seed=seed,
            is_final=is_final,
            checkpoints=store.folder / f"{checkpoints}.checkpoint",
            progress=progress,
            with_neighbours=of not in ("", name),
        )
        return self._done(store, name, run)

    def _done(self, store: Store, name: str, work: Callable[[], Finished]) -> Finished:
        found = store.get(name)
        if found is not None:
            return found
        if store is self.trials and self.data.settings_of is not None:
            raise ValueError(
                f"{self.data.key} uses the settings that {self.data.settings_of}'s trials chose, "
                f"but there is no {name}; measure {self.data.settings_of} first"
            )
        self.work.check_time()
        self.work.say(f"{self.data.key}, {self.split.name}, {name}")
        finished = work()
        return store.put(name, replace(finished, row=finished.row | {"commit": self.work.commit}))


def _folder(split: str) -> str:
    return split.replace(", ", "-").replace(" ", "-")


def finals_of(store: Store) -> dict[str, list[Finished]]:
    """Return the finished final runs by arm or baseline, by seed."""
    return {name: found for name in (*GRIDS, *ARMS) if (found := list(_stored(store, name, "final")))}


def _stored(store: Store, name: str, kind: str) -> Iterator[Finished]:
    number = 0
    while (found := store.get(f"{name}/{kind}-{number}")) is not None:
        yield found
        number += 1


def best_arm(finals: Mapping[str, Sequence[Finished]], *, mixtures: bool) -> str | None:
    """Return the mixture, or the dot product, with the best mean validation over seeds; None if none has finished."""
    names = [name for name in finals if name in ARMS and ARMS[name].is_mixture == mixtures]
    return max(names, key=lambda name: _mean(finals[name], "validation"), default=None)


def _best_arms(finals: Mapping[str, Sequence[Finished]]) -> list[str]:
    return [name for mixtures in (True, False) if (name := best_arm(finals, mixtures=mixtures)) is not None]


def best_baseline(finals: Mapping[str, Sequence[Finished]]) -> str | None:
    """Return the baseline that ranks the test events best: the strictest comparison."""
    names = [name for name in finals if name in GRIDS]
    return max(names, key=lambda name: finals[name][0].row["metrics"]["ndcg@10"], default=None)


def _mean(runs: Sequence[Finished], field: str) -> float:
    return float(np.mean([one.row[field] for one in runs]))


def values_of(runs: Sequence[Finished], metric: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return a metric per seed and event, (S, E): hits, discounted gains or reciprocal ranks."""
    return gains(np.stack([one.ranked.ranks for one in runs if one.ranked is not None]), metric)


def report(work: Work, data: Sequence[MeasuredData]) -> dict[str, Any]:
    """Return a section of results per split. An earlier section is used if it has at least as many runs, or if its data
    was not requested.
    """
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    for one in data:
        interactions = one.load()
        for split_name in one.splits:
            found = _section(_Comparison(work, one, SPLITS[split_name](interactions)))
            earlier = work.earlier_of(one.key, split_name)
            if earlier is not None and _num_runs(earlier) >= _num_runs(found):
                found = earlier
            measured[one.key, split_name] = found
    sections = [measured.pop((one["data"], one["split"]), dict(one)) for one in work.earlier] + list(measured.values())
    correct(sections)
    return {"sections": sections}


def _num_runs(section: Mapping[str, Any]) -> tuple[int, int]:
    """Final runs are compared before trials."""
    return section["finals"]["done"], len(section["trials"])


def _section(comparison: _Comparison) -> dict[str, Any]:
    split, store = comparison.split, comparison.store
    finals = finals_of(store)
    train = split.train
    expected = comparison.data.expected(split.name)
    trials = {arm.name: list(_stored(store, arm.name, "trial")) for arm in comparison.arms}
    return {
        "data": comparison.data.key,
        "split": split.name,
        "machine": machine(),
        "commits": sorted({commit for runs in finals.values() for one in runs if (commit := one.row.get("commit"))}),
        "order": _order(comparison),
        "users": int((train.user_counts() > 0).sum()),
        "items": split.interactions.num_items,
        "train_events": len(train),
        "test_events": len(split.test_rows),
        "test_users": len(np.unique(split.interactions.users[split.test_rows])),
        "finals": {"done": sum(len(runs) for runs in finals.values()), "expected": expected},
        "rows": [_arm_row(name, runs, trials.get(name, [])) for name, runs in finals.items()]
        + [_near_row(name, runs) for name, runs in _near(store, finals).items()],
        "trials": [one.row for runs in trials.values() for one in runs],
        "curves": {name: [one.row["curve"] for one in runs] for name, runs in finals.items() if name in ARMS},
        "verdicts": list(_verdicts(store, finals)),
    }


def _order(comparison: _Comparison) -> dict[str, Any] | None:
    """Return the shuffle test, only for the data's first split; reuse the earlier report's result if it has one."""
    data, split = comparison.data, comparison.split
    if data.key != data.name or split.name != data.splits[0]:
        return None
    earlier = comparison.work.earlier_of(data.key, split.name) or {}
    if earlier.get("order") is not None:
        return dict(earlier["order"])
    found = order_test(split.interactions)
    return {"verdict": found.verdict, "lift": round(found.lift, 2), "z": round(found.z, 1)}


def _arm_row(name: str, runs: Sequence[Finished], trials: Sequence[Finished]) -> Row:
    first = runs[0].row
    row: Row = {"arm": name, "title": ARMS[name].title if name in ARMS else name, "seeds": len(runs)}
    for metric in METRICS:
        values = [one.row["metrics"][metric] for one in runs]
        row[metric] = round(float(np.mean(values)), 5)
        row[f"{metric}_sd"] = spread(values)
    row["coverage"] = round(_mean(runs, "coverage"), 4)
    row["cpu_seconds"] = round(_mean(runs, "cpu_seconds"), 1)
    row["trials"] = len(trials)
    row["trial_cpu_seconds"] = round(sum(one.row["cpu_seconds"] for one in trials), 1)
    row["bytes_per_item"] = first.get("bytes_per_item")
    row["chosen"] = Trial(**first["trial"]).text if "trial" in first else first["settings"]
    return row


def _near(store: Store, finals: Mapping[str, Sequence[Finished]]) -> dict[str, list[Finished]]:
    return {name: runs for name in _best_arms(finals) if (runs := list(_stored(store, name, _NEIGHBOURS)))}


def _near_row(name: str, runs: Sequence[Finished]) -> Row:
    shares = ", ".join(f"{one.row['model_share']:g}" for one in runs)
    row = _arm_row(name, runs, [])
    return row | {"title": f"{row['title']}, with item neighbours", "chosen": f"the model's share {shares}"}


def _verdicts(store: Store, finals: Mapping[str, Sequence[Finished]]) -> Iterator[dict[str, Any]]:
    best = best_arm(finals, mixtures=True), best_arm(finals, mixtures=False), best_baseline(finals)
    mixture, dot, baseline = map(str, best)  # "None" has no runs
    near, equal_time = _near(store, finals), "mixture minus best dot product at equal training time"
    shorter, served = (list(_stored(store, mixture, kind)) for kind in (_SHORTER, f"{_SHORTER}-{_NEIGHBOURS}"))
    pairs: list[tuple[str, str, str, Sequence[Finished], Mapping[str, Sequence[Finished]]]] = [
        *(
            (f"with item neighbours minus {than}", name, other, runs, finals)
            for name, runs in near.items()
            for than, other in (("without", name), ("best baseline", baseline))
        ),
        ("mixture minus best dot product, both with item neighbours", mixture, dot, near.get(mixture, []), near),
        ("mixture minus best dot product", mixture, dot, finals.get(mixture, []), finals),
        ("mixture minus dot product at equal bytes", mixture, "hstu-dot-wide", finals.get(mixture, []), finals),
        (equal_time, mixture, dot, shorter, finals),
        (f"{equal_time}, both with item neighbours", mixture, dot, served, near),
        ("mixture minus best baseline", mixture, baseline, finals.get(mixture, []), finals),
        ("best dot product minus best baseline", dot, baseline, finals.get(dot, []), finals),
    ]
    for question, one, other, runs, others in pairs:
        if runs and other in others:
            for metric in JUDGED:
                found = difference(runs, others[other], metric)
                figures = {name: round(value, 5) for name, value in asdict(found).items()}
                yield {"question": question, "one": one, "other": other, "metric": metric} | figures


def difference(one: Sequence[Finished], other: Sequence[Finished], metric: str) -> Estimate:
    """Return how much higher a metric is in `one`'s runs than in `other`'s.

    Users and seeds are drawn, because in a time split a user has several similar test events.
    """
    ranked = one[0].ranked
    assert ranked is not None
    return paired_difference(
        values_of(one, metric), values_of(other, metric), users=ranked.users, replicates=_REPLICATES
    )


def family(question: str) -> str:
    """Return the question's family: the page's question whose p-values are corrected together."""
    if question.endswith("best baseline"):
        return "against the best baseline"
    return "item neighbours" if question.startswith("with item neighbours") else "mixture against dot product"


def correct(sections: Sequence[dict[str, Any]]) -> None:
    """Apply Holm's correction within each family and metric."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for verdict in (verdict for section in sections for verdict in section["verdicts"]):
        groups.setdefault((family(verdict["question"]), verdict["metric"]), []).append(verdict)
    for verdicts in groups.values():
        adjusted = holm({number: verdict["p_value"] for number, verdict in enumerate(verdicts)})
        for number, verdict in enumerate(verdicts):
            verdict["holm"] = round(adjusted[number], 5)

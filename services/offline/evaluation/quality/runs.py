"""One run of the comparison: train an arm or fit a baseline, rank the events, store the result.

A finished run is stored and not repeated; an interrupted training continues from its checkpoint. Only final runs rank
the test events.

Letters: E events, X items.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.offline.datasets import MeasuredSplit
from services.offline.evaluation.engine.baselines import make_baseline
from services.offline.evaluation.engine.metrics import summary
from services.offline.evaluation.engine.ranked_events import EventScorer, RankedEvents, evenly, rank_events
from services.offline.evaluation.quality.arms import Arm, Trial, bytes_per_item
from services.offline.training.evaluation import ModelScorer
from services.offline.training.loop import Step, dense_users, train
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.neighbours import WithNeighbours, learn_neighbours, shares_tried, with_share
from services.offline.training.presets import TrainConfig

Row = dict[str, Any]

# The validation metric that selects trials and epochs.
CHOSEN_BY = "ndcg@10"
# Enough events to separate scores of .05 and .055, at a small part of an epoch's time.
_EVENTS_PER_EPOCH = 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Lengths of trainings. `tuning_seconds`: processor time of all trials of an arm."""

    config: TrainConfig
    trial_epochs: int
    final_epochs: int
    tuning_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A finished run. Only a final run has ranked test events."""

    row: Row
    ranked: RankedEvents | None


class Store:
    """A folder of finished runs, stored as `name`.json and, for final runs, also `name`.npz."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> Finished | None:
        """Return a finished run, if any."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        row = json.loads(path.read_text(encoding="utf-8"))
        arrays_path = path.with_suffix(".npz")
        if not arrays_path.exists():
            return Finished(row=row, ranked=None)
        with np.load(arrays_path) as arrays:
            ranked = RankedEvents(
                events=arrays["events"],
                users=arrays["users"],
                ranks=arrays["ranks"].astype(np.int64),
                coverage=row["coverage"],
            )
        return Finished(row=row, ranked=ranked)

    def put(self, name: str, finished: Finished) -> Finished:
        """Store the ranks first, so that a row is never without them."""
        path = self.folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if finished.ranked is not None:
            ranked = finished.ranked
            np.savez_compressed(
                path.with_suffix(".npz"),
                events=ranked.events,
                users=ranked.users.astype(np.int32),
                ranks=ranked.ranks.astype(np.int32),
            )
        aside = path.with_suffix(".writing")
        aside.write_text(json.dumps(finished.row, indent=1) + "\n", encoding="utf-8")
        aside.rename(path)
        return finished


def run_arm(
    arm: Arm,
    trial: Trial,
    plan: Plan,
    split: MeasuredSplit,
    *,
    seed: int,
    is_final: bool,
    checkpoints: Path,
    progress: Callable[[Step], None],
    with_neighbours: bool = False,
) -> Finished:
    """Train an arm with one setting on the training rows; use the epoch with the best validation score.

    with_neighbours: combine the final run's model with item neighbours, at the weight that is best on validation.
    """
    config = trial.applied(arm.shaped(plan.config))
    config = replace(config, seed=seed, epochs=plan.final_epochs if is_final else plan.trial_epochs)
    judged = evenly(split.valid_rows, _EVENTS_PER_EPOCH)
    users = dense_users(config, split.train)

    def score(model: SequentialModel) -> float:
        return summary(rank_events(ModelScorer(model, users), split.interactions, judged).ranks)[CHOSEN_BY]

    report = train(config, split.train, out=checkpoints, resume=True, progress=progress, validate=score)
    row: Row = {
        "arm": arm.name,
        "kind": "final" if is_final else "trial",
        "trial": asdict(trial),
        "seed": seed,
        "epochs": len(report.valid_scores),
        "best_epoch": int(np.argmax(report.valid_scores)) + 1,
        "validation": round(max(report.valid_scores), 5),
        "curve": [
            [round(seconds, 1), round(value, 5)]
            for seconds, value in zip(report.epoch_cpu_seconds, report.valid_scores, strict=True)
        ],
        "cpu_seconds": round(report.cpu_seconds, 3),
        "bytes_per_item": bytes_per_item(config),
    }
    if not is_final:
        return Finished(row=row, ranked=None)
    scorer: EventScorer = ModelScorer(report.model, report.user_index)
    if with_neighbours:
        learnt = learn_neighbours(split.train)
        tried = shares_tried(scorer, learnt, split.interactions, judged)
        share = max(tried, key=tried.__getitem__)
        row |= {"kind": "neighbours", "model_share": share, "validation": round(tried[share], 5)}
        row["bytes_per_item"] += learnt.nbytes // len(learnt.items)
        scorer = WithNeighbours(model=scorer, neighbours=with_share(learnt, share))
    return _ranked(row, scorer, split)


def run_baseline(name: str, settings: Mapping[str, Any], split: MeasuredSplit, *, is_final: bool) -> Finished:
    """Fit a baseline. A trial is scored on validation; a final run ranks the test events."""
    began = time.process_time()
    scorer = make_baseline(name, settings)
    scorer.fit(split.train)
    row: Row = {
        "arm": name,
        "kind": "final" if is_final else "trial",
        "settings": dict(settings),
        "seed": 0,
        "cpu_seconds": round(time.process_time() - began, 3),
    }
    if is_final:
        return _ranked(row, scorer, split)
    ranked = rank_events(scorer, split.interactions, evenly(split.valid_rows, _EVENTS_PER_EPOCH))
    return Finished(row=row | {"validation": round(summary(ranked.ranks)[CHOSEN_BY], 5)}, ranked=None)


def _ranked(row: Row, scorer: EventScorer, split: MeasuredSplit) -> Finished:
    ranked = rank_events(scorer, split.interactions, split.test_rows)
    metrics = {name: round(value, 5) for name, value in summary(ranked.ranks).items()}
    return Finished(row=row | {"metrics": metrics, "coverage": round(ranked.coverage, 5)}, ranked=ranked)

"""Train on a split, choose the share of item neighbours, and measure on the held-out events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from services.algorithms.bundles.event_schema import EventSchema
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.offline.datasets import Interactions, global_time_split, leave_one_out_split
from services.offline.evaluation.engine.baselines import Popularity, ServedNeighbours
from services.offline.evaluation.engine.metrics import summary
from services.offline.evaluation.engine.ranked_events import EventScorer, counting, evenly, rank_events
from services.offline.training.evaluation import ModelScorer
from services.offline.training.loop import ProgressListener, Step, TrainReport, train
from services.offline.training.neighbours import (
    WithNeighbours,
    choosing_rows,
    learn_neighbours,
    shares_tried,
    with_share,
)
from services.offline.training.new_items import measure_new_item_length
from services.offline.training.presets import TrainConfig

LEAVE_ONE_OUT, TIME, NONE = "leave-one-out", "time", "none"
SPLITS = (LEAVE_ONE_OUT, TIME, NONE)


@contextmanager
def training_progress(console: Console | None, num_epochs: int) -> Iterator[ProgressListener | None]:
    """Yield a listener that moves a bar with epoch, positions/s and loss."""
    if console is None:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]} positions/s  loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"epoch 1/{num_epochs}", total=None, rate="–", loss="–")

        def listener(step: Step) -> None:
            bar.update(
                task,
                description=f"epoch {step.epoch + 1}/{step.num_epochs}",
                total=step.total_positions,
                completed=step.positions,
                rate=f"{step.positions_per_s:,.0f}",
                loss=f"{step.loss:.3f}",
            )

        yield listener


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSplit:
    """The training data, and the rows of `whole` to predict; without rows nothing is evaluated."""

    train: Interactions
    whole: Interactions
    test_rows: npt.NDArray[np.int64]
    split_time: int | None = None


def fit_split(interactions: Interactions, split: str, schema: EventSchema, *, max_events: int = 6000) -> FitSplit:
    """Split data for training.

    "leave-one-out" predicts each user's last event; "time" trains on the first .8 of the events and predicts up to
    `max_events` of the rest, evenly spread; "none" trains on everything. Only events that the schema counts as positive
    are predicted.
    Raises: ValueError naming the known splits.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; allowed: {', '.join(SPLITS)}")
    if split == LEAVE_ONE_OUT:
        parts = leave_one_out_split(interactions)
        return FitSplit(
            train=interactions.select(parts.refit_rows),
            whole=interactions,
            test_rows=counting(interactions, parts.test_rows, schema),
        )
    if split == TIME:
        divided = global_time_split(interactions, 0.8)
        held_out = counting(interactions, np.arange(len(divided.train), len(interactions), dtype=np.int64), schema)
        return FitSplit(
            train=divided.train,
            whole=interactions,
            test_rows=evenly(held_out, max_events),
            split_time=divided.split_time,
        )
    return FitSplit(train=interactions, whole=interactions, test_rows=np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A trained model and its measurements. taken: the training data without rejections."""

    report: TrainReport
    taken: Interactions
    neighbours: ItemNeighbours | None
    metrics: dict[str, Any]
    new_item_length: float | None

    def as_dict(self, config: TrainConfig) -> dict[str, Any]:
        """Return plain values."""
        report = self.report
        return {
            "encoder": config.encoder.kind,
            "head": config.head.kind,
            "epochs": config.epochs,
            "metrics": self.metrics,
            "new_item_length": self.new_item_length,
            "model_share": 1.0 if self.neighbours is None else self.neighbours.shape.model_share,
            "positions": report.positions,
            "seconds": round(report.seconds, 3),
            "positions_per_s": round(report.positions_per_s, 1),
            "part_shares": {part: round(share, 4) for part, share in report.part_shares.items()},
            "peak_memory_bytes": report.peak_memory_bytes,
            "epoch_losses": [round(loss, 5) for loss in report.epoch_losses],
            "threads": torch.get_num_threads(),
        }


def fit_model(
    config: TrainConfig,
    divided: FitSplit,
    schema: EventSchema,
    checkpoints: Path,
    console: Console | None,
    say: Callable[[str], None],
    *,
    device: str,
    resume: bool,
) -> Fit:
    """Train, choose the share of item neighbours on reserved events, and measure on held-out ones."""
    with training_progress(console, config.epochs) as listener:
        kept = choosing_rows(divided.train, schema)
        learnt = divided.train.select(np.setdiff1d(np.arange(len(divided.train)), kept, assume_unique=True))
        report = train(config, learnt, out=checkpoints, progress=listener, resume=resume, device=device)
    report.model.to("cpu")
    # Only the encoder reads rejections.
    taken = divided.train.encoded(schema)
    neighbours = _neighbours(report, divided.train, kept, learnt.encoded(schema), taken, say)
    return Fit(
        report=report,
        taken=taken,
        neighbours=neighbours,
        metrics=_metrics(report, neighbours, divided, taken),
        new_item_length=measure_new_item_length(report.model, taken),
    )


def _neighbours(
    report: TrainReport,
    interactions: Interactions,
    kept: npt.NDArray[np.int64],
    learnt: Interactions,
    taken: Interactions,
    say: Callable[[str], None],
) -> ItemNeighbours | None:
    """Return neighbours learnt from `taken`; None if `kept` is empty or the model's share is 1.

    The share is the best on the events `kept`, with neighbours learnt from `learnt`, which excludes these events.
    """
    if not len(kept):
        return None
    scorer = ModelScorer(report.model, report.user_index)
    found = shares_tried(scorer, learn_neighbours(learnt), interactions, kept)
    share = max(found, key=found.__getitem__)
    scores = ", ".join(f"{one:g}: {value:.4f}" for one, value in found.items())
    say(f"Item neighbours: the model keeps {share:g} of a score. NDCG@10 by its share: {scores}")
    return None if share == 1 else with_share(learn_neighbours(taken), share)


def _metrics(
    report: TrainReport, neighbours: ItemNeighbours | None, divided: FitSplit, taken: Interactions
) -> dict[str, Any]:
    """Return metrics by scorer; empty without test events. Baselines are trained on `taken`."""
    if not len(divided.test_rows):
        return {}
    model = ModelScorer(report.model, report.user_index)
    scorers: dict[str, EventScorer] = {"model": model}
    popularity, item_knn = Popularity(), ServedNeighbours()
    popularity.fit(taken)
    item_knn.fit(taken, neighbours)
    scorers |= {"popularity": popularity, "item_knn": item_knn}
    if neighbours is not None:
        scorers["with_neighbours"] = WithNeighbours(model=model, neighbours=neighbours)
    ranks = {name: rank_events(one, divided.whole, divided.test_rows).ranks for name, one in scorers.items()}
    rounded = {
        name: {metric: round(value, 5) for metric, value in summary(found).items()} for name, found in ranks.items()
    }
    return {**rounded, "num_events": len(ranks["model"])}

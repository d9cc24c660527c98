"""The whole training job: data, split, training, evaluation, bundle, export; what `freshet train` calls.

It strings the package's parts together and says in one dictionary what came out. How any part works is its own
affair, and so is the display.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.algorithms.event_schema import DEFAULT_EVENTS, EventSchema, default_schema
from services.algorithms.native.threads import set_compute_threads
from services.algorithms.neighbours import ItemNeighbours
from services.algorithms.sealed_files import require_target
from services.offline.datasets import (
    Interactions,
    Reading,
    account_text,
    global_time_split,
    leave_one_out_split,
    read_data,
)
from services.offline.datasets.item_attributes import read_item_attributes
from services.offline.evaluation.common.recall import summary
from services.offline.training.bundling import save_bundle
from services.offline.training.checkpoint import read_config
from services.offline.training.choice import Choice, candidates, choose
from services.offline.training.evaluation import ModelScorer, evaluate, rank_events
from services.offline.training.export import export_bundle
from services.offline.training.loop import ProgressListener, Step, TrainReport, train
from services.offline.training.neighbours import (
    WithNeighbours,
    choosing_rows,
    learn_neighbours,
    shares_tried,
    with_share,
)
from services.offline.training.new_items import measure_new_item_length
from services.offline.training.presets import (
    TrainConfig,
    default_epochs,
    preset,
    with_dot_head,
    with_sasrec,
    with_wide_dot_head,
)
from services.offline.training.sequences import Histories

_METRICS = ("hr@1", "hr@10", "hr@50", "hr@200", "ndcg@10", "mrr")


@contextmanager
def training_progress(console: Console | None, num_epochs: int) -> Iterator[ProgressListener | None]:
    """A listener that moves a bar with epoch, positions/s and loss; None without a console."""
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


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """Speed, where the time went, memory, and quality beside the popularity baseline."""
    shares = ", ".join(f"{part} {share:.0%}" for part, share in report["part_shares"].items())
    console.print(
        f"{report['positions']:,} positions in {report['seconds']:.1f} s: "
        f"{report['positions_per_s']:,.0f} positions/s on {report['threads']} threads ({shares}); "
        f"peak memory {report['peak_memory_bytes'] / 2**20:,.0f} MiB"
    )
    metrics = report["metrics"]
    if metrics:
        table = Table(title=f"{metrics['num_events']:,} held-out events, seen items left out")
        for column in ("", *_METRICS):
            table.add_column(column, justify="right" if column else "left")
        for name in (name for name in metrics if name != "num_events"):
            table.add_row(name, *(f"{metrics[name][metric]:.4f}" for metric in _METRICS))
        console.print(table)
    console.print(f"Bundle {report['bundle']} (model version {report['model_version']})")


LEAVE_ONE_OUT, TIME, NONE = "leave-one-out", "time", "none"
SPLITS = (LEAVE_ONE_OUT, TIME, NONE)
ENCODERS = ("hstu", "sasrec")
AUTO = "auto"
HEADS = (AUTO, "mol", "dot", "wide-dot")


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSplit:
    """What to train on, and which rows of `whole` to predict afterwards (none: no evaluation)."""

    train: Interactions
    whole: Interactions
    test_rows: npt.NDArray[np.int64]
    split_time: int | None = None


def fit_split(interactions: Interactions, split: str, *, max_events: int = 6000, fraction: float = 0.8) -> FitSplit:
    """Divide data for training.

    "leave-one-out" predicts each user's last event and trains on all others; "time" trains on the first `fraction` of
    the events and predicts up to `max_events` of the rest, evenly spread; "none" trains on everything.
    Raises: ValueError naming the known splits.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; allowed: {', '.join(SPLITS)}")
    if split == LEAVE_ONE_OUT:
        parts = leave_one_out_split(interactions)
        return FitSplit(train=interactions.select(parts.refit_rows), whole=interactions, test_rows=parts.test_rows)
    if split == TIME:
        divided = global_time_split(interactions, fraction)
        held_out = np.arange(len(divided.train), len(interactions), dtype=np.int64)
        chosen = np.linspace(0, len(held_out) - 1, min(max_events, len(held_out))).astype(np.int64)
        return FitSplit(
            train=divided.train, whole=interactions, test_rows=held_out[chosen], split_time=divided.split_time
        )
    return FitSplit(train=interactions, whole=interactions, test_rows=np.zeros(0, dtype=np.int64))


def configure(
    preset_name: str,
    *,
    epochs: int | None = None,
    seed: int = 0,
    encoder: str = "hstu",
    head: str = "mol",
    loss: str | None = None,
    num_negatives: int | None = None,
    alpha: float | None = None,
) -> TrainConfig:
    """A preset, with another encoder, head or loss where asked for; `alpha` weighs the mutual information.

    For the head "auto" it is the mixture's configuration; another head gets the epochs that fill its processor time.
    Raises: ValueError naming what is allowed.
    """
    if encoder not in ENCODERS:
        raise ValueError(f"encoder={encoder!r}; allowed: {', '.join(ENCODERS)}")
    if head not in HEADS:
        raise ValueError(f"head={head!r}; allowed: {', '.join(HEADS)}")
    config = preset(preset_name, epochs=epochs, seed=seed)
    config = with_sasrec(config) if encoder == "sasrec" else config
    if head == "dot":
        config = with_dot_head(config)
    elif head == "wide-dot":
        config = with_wide_dot_head(config)
    return replace(
        config,
        loss=config.loss if loss is None else loss,
        num_negatives=config.num_negatives if num_negatives is None else num_negatives,
        mutual_information_weight=config.mutual_information_weight if alpha is None else alpha,
    )


def run_training(
    *,
    out: Path,
    preset_name: str = "quick",
    dataset: str | Path = "auto",
    interactions: Interactions | None = None,
    epochs: int | None = None,
    seed: int = 0,
    split: str = LEAVE_ONE_OUT,
    resume: bool = False,
    encoder: str = "hstu",
    head: str = AUTO,
    loss: str | None = None,
    num_negatives: int | None = None,
    alpha: float | None = None,
    device: str = "cpu",
    threads: int | None = None,
    export: bool = True,
    events: Path | None = None,
    attributes: Path | None = None,
    actions: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a preset and write its bundle to `out`; return a report of plain values.

    `interactions` replaces `dataset`. `events`: a file that says what types of events mean, for this bundle; None: the
    default. `attributes`: a table of the items' typed attributes. `actions`: the encoder reads what each event was.
    `threads` sets PyTorch's for this process. With a console, a progress bar with positions/s and loss runs on it, and
    a final table. Checkpoints lie beside `out` until the bundle is written.
    Raises: ValueError for unknown names or unusable data; OSError where `out` cannot be written or is no bundle, before
    it begins; ExportError.
    """
    config = configure(
        preset_name,
        epochs=epochs,
        seed=seed,
        encoder=encoder,
        head=head,
        loss=loss,
        num_negatives=num_negatives,
        alpha=alpha,
    )
    if head == AUTO and (loss, num_negatives, alpha) != (None, None, None):
        raise ValueError(
            "loss, negatives or alpha with head='auto', which chooses them; name a head: mol, dot, wide-dot"
        )
    require_target(out)
    if threads is not None:
        torch.set_num_threads(threads)
        set_compute_threads(threads)
    say: Callable[[str], None] = (lambda text: None) if console is None else partial(console.print, markup=False)
    # What actions are named by lies in the bundle, whatever becomes of the default.
    events = DEFAULT_EVENTS if events is None and actions else events
    schema = default_schema() if events is None else EventSchema.read(events)
    reading = read_data(dataset, schema=schema) if interactions is None else Reading.of(interactions)
    for finding in reading.findings:
        say(finding.text)
    interactions = reading.accepted(for_training=True)
    say(f"Data: {interactions.source}")
    if actions:
        read, names = interactions.with_actions(schema)
        say(f"Actions: {', '.join(names) or 'none'}")
        config = replace(config, encoder=replace(config.encoder, actions=tuple(names)))
    else:
        read = interactions.encoded(schema)
    rows = reading.account(read)
    say(account_text(rows))
    interactions = read
    divided = fit_split(interactions, split)
    of_items = None if attributes is None else read_item_attributes(attributes, divided.train.item_ids)
    if epochs is None:
        config = replace(config, epochs=default_epochs(config, Histories.of(divided.train).num_positions))
    choice = None
    checkpoints = out.with_name(f"{out.name}.checkpoint")
    if head == AUTO:
        begun = _begun(candidates(config), checkpoints) if resume else None
        if begun is None:
            choice = _choose(config, divided.train, device, say)
            begun = choice.config
        config = begun
    with training_progress(console, config.epochs) as listener:
        kept = choosing_rows(divided.train)
        learnt = divided.train.select(np.setdiff1d(np.arange(len(divided.train)), kept, assume_unique=True))
        report = train(config, learnt, out=checkpoints, progress=listener, resume=resume, device=device)
    report.model.to("cpu")
    # What was turned down is known to the encoder alone.
    taken = divided.train.encoded(schema)
    neighbours = _neighbours(report, divided.train, kept, learnt.encoded(schema), taken, say)
    metrics = _metrics(report, neighbours, divided, taken.item_counts())
    data = {
        "name": interactions.name,
        "source": interactions.source,
        "fingerprint": divided.train.fingerprint(),
        "events": len(divided.train),
        "split": split,
        "split_time": divided.split_time,
        "newest_time": int(divided.train.timestamps[-1]) if divided.train.has_times else None,
    }
    training = {"preset": preset_name, "config": config.as_dict(), "positions_per_s": round(report.positions_per_s, 1)}
    length = measure_new_item_length(report.model, taken)
    bundle = save_bundle(
        out,
        report,
        taken,
        data={**data, "training": training},
        metrics=metrics,
        new_item_length=length,
        neighbours=neighbours,
        events_yaml=None if events is None else events.read_bytes(),
        attributes=of_items,
    )
    result: dict[str, Any] = {
        "bundle": str(out),
        "model_version": bundle.model_version,
        "preset": preset_name,
        "encoder": config.encoder.kind,
        "head": config.head.kind,
        "seed": seed,
        "epochs": config.epochs,
        "data": data,
        "rows": rows,
        "metrics": metrics,
        "new_item_length": length,
        "model_share": 1.0 if neighbours is None else neighbours.shape.model_share,
        "positions": report.positions,
        "seconds": round(report.seconds, 3),
        "positions_per_s": round(report.positions_per_s, 1),
        "part_shares": {part: round(share, 4) for part, share in report.part_shares.items()},
        "peak_memory_bytes": report.peak_memory_bytes,
        "epoch_losses": [round(loss, 5) for loss in report.epoch_losses],
        "threads": torch.get_num_threads(),
        "choice": None if choice is None else _plain(choice),
    }
    if export:
        say("Exporting the encoder as ONNX")
        exported = export_bundle(out, interactions=interactions)
        result["export"] = {"max_error": exported.max_error, "histories_checked": exported.histories_checked}
    if checkpoints.is_dir():
        shutil.rmtree(checkpoints)
    if console is not None:
        show_report(console, result)
    return result


def _choose(config: TrainConfig, interactions: Interactions, device: str, say: Callable[[str], None]) -> Choice:
    choice = choose(candidates(config), interactions, on_candidate=lambda told: say(f"Trying {told}"), device=device)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in choice.ndcg_at_10.items())
    say(
        f"Chosen: {choice.name}, {choice.config.epochs} epochs: {choice.reason}. Validation NDCG@10 as served, after "
        f"equal processor time: {scores}; best mixture minus best dot product {choice.lead} (one training each: the "
        f"interval covers users alone). Choosing took {choice.cpu_seconds:.0f} s of processor time"
    )
    return choice


def _begun(options: Mapping[str, TrainConfig], checkpoints: Path) -> TrainConfig | None:
    """The candidate that a checkpoint belongs to, with its epochs, which a new choice might change; or None."""
    found = read_config(checkpoints)
    begun = (replace(config, epochs=found["epochs"]) for config in options.values() if found)
    return next((config for config in begun if json.loads(json.dumps(config.as_dict())) == found), None)


def _plain(choice: Choice) -> dict[str, Any]:
    lead = choice.lead
    return {
        "head": choice.name,
        "ndcg@10": {name: round(value, 5) for name, value in choice.ndcg_at_10.items()},
        "mixture_minus_dot": [round(value, 5) for value in (lead.mean, lead.low, lead.high)],
        "reason": choice.reason,
        "cpu_seconds": round(choice.cpu_seconds, 1),
    }


def _neighbours(
    report: TrainReport,
    interactions: Interactions,
    kept: npt.NDArray[np.int64],
    learnt: Interactions,
    taken: Interactions,
    say: Callable[[str], None],
) -> ItemNeighbours | None:
    """Neighbours of what was taken, with the share that is best, for those of what was learnt, on the events in `kept`
    of all interactions; None where that is all."""
    if not len(kept):
        return None
    scorer = ModelScorer(report.model, report.user_index)
    found = shares_tried(scorer, learn_neighbours(learnt), interactions, kept)
    share = max(found, key=found.__getitem__)
    scores = ", ".join(f"{one:g}: {value:.4f}" for one, value in found.items())
    say(f"Item neighbours: the model keeps {share:g} of a score. NDCG@10 by its share: {scores}")
    return None if share == 1 else with_share(learn_neighbours(taken), share)


def _metrics(
    report: TrainReport, neighbours: ItemNeighbours | None, divided: FitSplit, counts: npt.NDArray[np.int64]
) -> dict[str, Any]:
    if not len(divided.test_rows):
        return {}
    found = evaluate(report.model, divided.whole, divided.test_rows, item_counts=counts, user_index=report.user_index)
    parts = {"model": found.model, "popularity": found.popularity}
    if neighbours is not None:
        served = WithNeighbours(model=ModelScorer(report.model, report.user_index), neighbours=neighbours)
        parts["with_neighbours"] = summary(rank_events(served, divided.whole, divided.test_rows).ranks)
    rounded = {name: {metric: round(value, 5) for metric, value in values.items()} for name, values in parts.items()}
    return {**rounded, "num_events": found.num_events}

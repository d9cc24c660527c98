"""Run the training job of `freshet train`: load data, split, train, evaluate, write the bundle and export."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from services.algorithms.bundles.event_schema import DEFAULT_EVENTS, EventSchema, default_schema
from services.algorithms.native.threads import set_compute_threads
from services.offline.bundles.folders import require_target
from services.offline.datasets import Interactions, Reading, TableOptions, account_text, read_data
from services.offline.datasets.catalogue_file import Catalogue
from services.offline.datasets.validation import lines_for_scales
from services.offline.evaluation.engine.metrics import METRICS
from services.offline.training.bundling import save_bundle
from services.offline.training.checkpoint import read_config
from services.offline.training.choice import Choice, candidates, choose
from services.offline.training.export import export_bundle
from services.offline.training.fit import LEAVE_ONE_OUT, FitSplit, fit_model, fit_split
from services.offline.training.presets import (
    TrainConfig,
    default_epochs,
    preset,
    with_dot_head,
    with_sasrec,
    with_wide_dot_head,
)
from services.offline.training.sequences import Histories


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print speed, time by part, memory, and quality beside that of popularity and item-kNN."""
    shares = ", ".join(f"{part} {share:.0%}" for part, share in report["part_shares"].items())
    console.print(
        f"{report['positions']:,} positions in {report['seconds']:.1f} s: "
        f"{report['positions_per_s']:,.0f} positions/s on {report['threads']} threads ({shares}); "
        f"peak memory {report['peak_memory_bytes'] / 2**20:,.0f} MiB"
    )
    metrics = report["metrics"]
    if metrics:
        table = Table(title=f"{metrics['num_events']:,} held-out events, seen items left out")
        for column in ("", *METRICS):
            table.add_column(column, justify="right" if column else "left")
        for name in (name for name in metrics if name != "num_events"):
            table.add_row(name, *(f"{metrics[name][metric]:.4f}" for metric in METRICS))
        console.print(table)
    console.print(f"Bundle {report['bundle']} (model version {report['model_version']})")


ENCODERS = ("hstu", "sasrec")
AUTO = "auto"
_AS_USUAL = TableOptions()
HEADS = (AUTO, "mol", "dot", "wide-dot")


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
    """Return a preset with the requested encoder, head or loss; `alpha` weighs the mutual information.

    Head "auto" gives the mixture's configuration. Raises: ValueError naming what is allowed.
    """
    if encoder not in ENCODERS:
        raise ValueError(f"encoder={encoder!r}; allowed: {', '.join(ENCODERS)}")
    if head not in HEADS:
        raise ValueError(f"head={head!r}; allowed: {', '.join(HEADS)}")
    if head == AUTO and (loss, num_negatives, alpha) != (None, None, None):
        raise ValueError(
            "loss, negatives or alpha with head='auto', which chooses them; name a head: mol, dot, wide-dot"
        )
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
    table: TableOptions = _AS_USUAL,
    catalogue: Catalogue | None = None,
    actions: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a preset and write its bundle to `out`; return a report of plain values.

    `interactions` and `catalogue` replace `dataset` and its file of items. `events`: a file with the meaning of event
    types; by default the standard one, adapted to the data's value scales. `table`: how to read a table or the file of
    items. `actions`: the encoder reads each event's action. Checkpoints are next to `out` until the bundle is written.
    Raises: ValueError for unknown names or unusable data; before training, OSError if `out` cannot be written, or
    exists and is not a bundle; ExportError.
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
    require_target(out)
    if threads is not None:
        torch.set_num_threads(threads)
        set_compute_threads(threads)
    say: Callable[[str], None] = (lambda text: None) if console is None else partial(console.print, markup=False)
    schema = default_schema() if events is None else EventSchema.read(events)
    if interactions is None:
        reading = read_data(dataset, schema=schema, table=table)
        catalogue = reading.catalogue
    else:
        reading = Reading.of(interactions)
    # A bundle with actions stores the default schema too, so that a later change of the default does not affect it.
    events_yaml = None if events is None and not actions else (events or DEFAULT_EVENTS).read_bytes()
    if events is None and (lines := lines_for_scales(reading.interactions, schema)):
        events_yaml = _with_lines(DEFAULT_EVENTS.read_text(encoding="utf-8"), lines).encode()
        schema = EventSchema.parse(events_yaml, "events.yaml")
        say(f"The bundle's events.yaml says: {'; '.join(lines.values())}")
    accepted, names, rows = _accepted(reading, schema, actions, say)
    config = replace(config, encoder=replace(config.encoder, actions=tuple(names)))
    divided = fit_split(accepted, split, schema)
    of_items = None if catalogue is None else catalogue.attributes_of(divided.train.item_ids)
    if epochs is None:
        config = replace(config, epochs=default_epochs(config, Histories.of(divided.train).num_positions))
    checkpoints = out.with_name(f"{out.name}.checkpoint")
    choice = None
    if head == AUTO:
        config, choice = _chosen(config, divided.train, schema, checkpoints, device, say, resume=resume)
    fit = fit_model(config, divided, schema, checkpoints, console, say, device=device, resume=resume)
    data, result_of_fit = _facts(accepted, divided, split), fit.as_dict(config)
    training = {"preset": preset_name, "config": config.as_dict(), "positions_per_s": result_of_fit["positions_per_s"]}
    bundle = save_bundle(
        out,
        fit.report,
        fit.taken,
        data={**data, "training": training},
        metrics=fit.metrics,
        new_item_length=fit.new_item_length,
        neighbours=fit.neighbours,
        events_yaml=events_yaml,
        attributes=of_items,
    )
    result = {"bundle": str(out), "model_version": bundle.model_version, "preset": preset_name, "seed": seed}
    result |= {"data": data, "rows": rows, "choice": None if choice is None else _plain(choice)} | result_of_fit
    if export:
        say("Exporting the encoder as ONNX")
        exported = export_bundle(out, interactions=accepted)
        result["export"] = {"max_error": exported.max_error, "histories_checked": exported.histories_checked}
    shutil.rmtree(checkpoints, ignore_errors=True)
    if console is not None:
        show_report(console, result)
    return result


def _accepted(
    reading: Reading, schema: EventSchema, actions: bool, say: Callable[[str], None]
) -> tuple[Interactions, list[str], dict[str, Any]]:
    """Return the training data, its actions' names (none without `actions`), and the account of the rows."""
    for line in reading.summary:
        say(line)
    given, names = reading.accepted(for_training=True), list[str]()
    say(f"Data: {given.source}")
    if actions:
        read, names = given.with_actions(schema)
        say(f"Actions: {', '.join(names) or 'none'}")
    else:
        read = given.encoded(schema)
    rows = reading.account(read)
    say(account_text(rows))
    return read, names, rows


def _chosen(
    config: TrainConfig,
    interactions: Interactions,
    schema: EventSchema,
    checkpoints: Path,
    device: str,
    say: Callable[[str], None],
    *,
    resume: bool,
) -> tuple[TrainConfig, Choice | None]:
    """Return the configuration with the chosen head, or the checkpoint's if training resumes."""
    begun = _begun(candidates(config), checkpoints) if resume else None
    if begun is not None:
        return begun, None
    choice = choose(
        candidates(config), interactions, schema, on_candidate=lambda name: say(f"Trying {name}"), device=device
    )
    scores = ", ".join(f"{name} {value:.4f}" for name, value in choice.ndcg_at_10.items())
    say(
        f"Chosen: {choice.name}, {choice.config.epochs} epochs: {choice.reason}. Validation NDCG@10 as served, after "
        f"equal processor time: {scores}; best mixture minus best dot product {choice.lead} (one training each: the "
        f"interval covers users alone). Choosing took {choice.cpu_seconds:.0f} s of processor time"
    )
    return choice.config, choice


def _facts(interactions: Interactions, divided: FitSplit, split: str) -> dict[str, Any]:
    return {
        "name": interactions.name,
        "source": interactions.source,
        "fingerprint": divided.train.fingerprint(),
        "events": len(divided.train),
        "split": split,
        "split_time": divided.split_time,
        "newest_time": int(divided.train.timestamps[-1]) if divided.train.has_times else None,
    }


def _begun(options: Mapping[str, TrainConfig], checkpoints: Path) -> TrainConfig | None:
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


def _with_lines(text: str, lines: Mapping[str, str]) -> str:
    kept = [line for line in text.splitlines() if line.strip().partition(":")[0] not in lines]
    begin = kept.index("types:") + 1
    return "\n".join([*kept[:begin], *(f"  {line}" for line in lines.values()), *kept[begin:], ""])

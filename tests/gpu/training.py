"""One training at the paper's size on a card, for so many seconds: histories from arrays, a curve, a checkpoint.

    python -m tests.gpu.training prepare ml-1m .freshet/ml-1m.npz      # where the data and all packages are
    python -m tests.gpu.training train .freshet/ml-1m.npz --seconds 200 --checkpoint RESULTS/training

Model, loss and batches are the trainer's own (`services.offline.training`). HR@10 is leave-one-out. By default the
protocol is that of docs/benchmarks/quality.md: films of five ratings and more, the last event is the test, the last but
one validates, neither is trained on, and no film that the user has seen competes. `--published` is the authors': every
film, the time of the next event, absolute positions, trained on all but the last event, and only the user's last 200
films excluded (docs/benchmarks/published.md).
"""

# ruff: noqa: T201
import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import tests.gpu.bare  # noqa: F401 - before what imports the packages that it stands in for
from services.algorithms.ops.mol_scores.device import DeviceScorer
from services.algorithms.scoring.states import QueryStates
from services.offline.datasets import Interactions, MeasuredSplit, from_columns, leave_one_out_split, load_dataset
from services.offline.evaluation.quality.published import PROTOCOLS, PublishedModel, ranked, with_next_times
from services.offline.training.evaluation import ModelScorer
from services.offline.training.loop import Step, dense_users, train
from services.offline.training.models.mol import Dropouts
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.presets import TrainConfig, preset, with_dot_head

_EPOCHS_BETWEEN_EVALUATIONS = 4
_SECONDS_BETWEEN_LINES = 15.0
_LAST_SECONDS = 8.0  # for the last evaluation
_VALIDATION_EVENTS = 4_000
_TRIED_USERS = 60
PUBLISHED = {"mol": 0.3465, "dot": 0.3332}


class TimeIsUp(Exception):
    """The training has had its seconds."""


class _PlainScores:
    """Scores of all items in float32 on the model's device."""

    def __init__(self, model: SequentialModel) -> None:
        device = model.item_embedding.weight.device
        self._scorer = DeviceScorer(model.all_item_states(), model.pair_gate(), device=device, kernels=False)

    def scores(self, queries: QueryStates) -> np.ndarray:
        upper, lower = self._scorer.bounds(self._scorer.prepare(queries))
        return ((upper.double() + lower.double()) / 2).cpu().numpy()


class _Scorer(ModelScorer):
    """As `ModelScorer`, without the compiled kernels of a processor."""

    def __init__(self, model: SequentialModel, user_index: np.ndarray | None) -> None:
        self._model, self._user_index, self._scorer = model.eval(), user_index, _PlainScores(model)
        self._absence = model.absence_rows()


class _Curve:
    """Judges the model every few seconds, and ends the training when its time is up."""

    def __init__(self, split: MeasuredSplit, users: np.ndarray | None, options: argparse.Namespace) -> None:
        protocol = "published" if options.published else "ours"
        self._head, self._title = options.head, f"{options.head}, {protocol}, seed {options.seed}"
        self._users, self._options, self._interactions = users, options, split.interactions
        self._valid = split.valid_rows[:: -(-len(split.valid_rows) // _VALIDATION_EVENTS)]
        self._test = split.test_rows
        self._started = self._printed = time.monotonic()
        self._model: SequentialModel | None = None
        self._step: Step | None = None
        self.best: tuple[float, str] = (-1.0, "not once judged")

    def step(self, step: Step) -> None:
        """Raises: TimeIsUp."""
        self._step = step
        if time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            print(
                f"{self._title}: {step.positions} positions, {step.positions_per_s:.0f}/s, loss {step.loss:.4f}",
                flush=True,
            )
        if time.monotonic() - self._started > self._options.seconds - _LAST_SECONDS:
            if self._model is not None:
                self._judge(self._model)
            raise TimeIsUp

    def validate(self, model: SequentialModel) -> float:
        """Called after each epoch."""
        self._model = model
        assert self._step is not None
        done = self._step.epoch + 1
        if done % _EPOCHS_BETWEEN_EVALUATIONS and done != self._step.num_epochs:
            return -1.0
        return self._judge(model)

    def _judge(self, model: SequentialModel) -> float:
        assert self._step is not None
        step, began, seconds = self._step, time.monotonic(), time.monotonic() - self._started
        scorer = _Scorer(model, self._users)
        valid, test = (ranked(scorer, self._interactions, rows) for rows in (self._valid, self._test))
        model.train()
        figures = " ".join(
            f"{name.upper()} {test['seen'][name]:.4f}" for name in ("hr@10", "hr@50", "hr@200", "ndcg@10")
        )
        line = (
            f"{self._title}: {seconds:6.1f} s, epoch {step.epoch + 1} of {step.num_epochs}, "
            f"{step.positions_per_s:.0f}/s, loss {step.loss:.4f}, validation HR@10 {valid['seen']['hr@10']:.4f}, "
            f"test {figures}, last 200 excluded HR@10 {test['recent']:.4f}, judged in {time.monotonic() - began:.1f} s"
        )
        print(line, flush=True)
        if self._options.curve is not None:
            row = {"head": self._head, "protocol": self._title.split(", ")[1], "seed": self._options.seed}
            row |= {"epoch": step.epoch + 1, "positions_per_s": round(step.positions_per_s), "loss": step.loss}
            with self._options.curve.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row | {"validation": valid, "test": test}) + "\n")
        if valid["seen"]["ndcg@10"] > self.best[0]:
            self.best = (valid["seen"]["ndcg@10"], line)
        return float(valid["seen"]["ndcg@10"])


def prepare(options: argparse.Namespace) -> None:
    """Write the events of a data set as arrays: 3 MB for ml-1m."""
    events, out = load_dataset(options.name, options.root, download=False), options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = {"users": events.users.astype(np.uint16), "items": events.items.astype(np.uint16)}
    # Sorted by time: steps are small numbers.
    np.savez_compressed(out, **columns, steps=np.diff(events.timestamps, prepend=0), name=np.array(options.name))
    print(
        f"{out}: {len(events)} events, {events.num_users} users, {events.num_items} items, {out.stat().st_size} bytes"
    )


def interactions_of(path: Path, users: int | None) -> Interactions:
    """What `prepare` wrote, of the first `users` users."""
    with np.load(path) as arrays:
        codes, items, timestamps = arrays["users"].astype(np.int64), arrays["items"], np.cumsum(arrays["steps"])
        name = str(arrays["name"])
    kept = slice(None) if users is None else codes < users
    vocabularies = [[str(code) for code in range(int(column.max()) + 1)] for column in (codes, items)]
    return from_columns(
        users=(codes[kept], vocabularies[0]),
        items=(items[kept].astype(np.int64), vocabularies[1]),
        timestamps=timestamps[kept],
        name=name,
        source=str(path),
    )


def config_of(head: str, device: str, epochs: int) -> TrainConfig:
    """The paper's size; on the CPU one block and narrow layers, to try the path."""
    config = preset("ml-1m", epochs=epochs)
    if device == "cpu":
        encoder = replace(config.encoder, num_blocks=1, width=16, d_qk=8, d_v=8, max_history=20)
        shape = replace(config.head, num_query_components=2, num_item_components=2, component_width=8, gate_hidden=8)
        config = replace(config, encoder=encoder, head=shape, dropouts=Dropouts(), num_negatives=8, batch_sequences=8)
    return config if head == "mol" else with_dot_head(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("prepare")
    made.add_argument("name")
    made.add_argument("out", type=Path)
    made.add_argument("--root", type=Path)
    made.set_defaults(call=prepare)
    run = commands.add_parser("train")
    run.add_argument("histories", type=Path)
    run.add_argument("--head", choices=("mol", "dot"), default="mol")
    run.add_argument("--seconds", type=float, required=True)
    run.add_argument("--checkpoint", type=Path, help="kept here, and gone on from where there is one")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--epochs", type=int, default=101)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--published", action="store_true", help="the authors' protocol instead of ours")
    run.add_argument("--curve", type=Path, help="every evaluation, a JSON object a line")
    run.set_defaults(call=trained)
    options = parser.parse_args()
    options.call(options)


def trained(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")  # TF32, as the authors train
    interactions = interactions_of(options.histories, _TRIED_USERS if options.device == "cpu" else None)
    interactions = with_next_times(interactions) if options.published else interactions.keep_frequent(min_per_item=5)
    split = leave_one_out_split(interactions)
    trained_on = split.interactions.select(split.refit_rows) if options.published else split.train
    config = replace(config_of(options.head, options.device, options.epochs), seed=options.seed)
    config = replace(config, absence=None) if options.published else config
    curve = _Curve(split, dense_users(config, trained_on), options)
    print(f"{options.head}: {interactions.num_users} users, {interactions.num_items} items, {len(trained_on)} events")
    try:
        report = train(
            config,
            trained_on,
            out=options.checkpoint,
            resume=options.checkpoint is not None,
            device=options.device,
            progress=curve.step,
            validate=curve.validate,
            build=partial(PublishedModel, protocol=PROTOCOLS[-1]) if options.published else SequentialModel,
        )
        print(f"{options.head}: all {options.epochs} epochs; shares of time {report.part_shares}")
    except TimeIsUp:
        print(f"{options.head}: {options.seconds:.0f} s are over")
    print(f"SUMMARY best by validation: {curve.best[1]}; published {PUBLISHED[options.head]}", flush=True)


if __name__ == "__main__":
    main()

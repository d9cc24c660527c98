"""Measure how each difference of the authors' protocol (github.com/bailuding/rails) changes leave-one-out on ML-1M.

`published.md.j2` lists the differences. Some models here use the time of the next event, which serving cannot
know, so no bundle can contain them.

Letters: B histories, L events, E events to predict, X items.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.algorithms.bundles.model_manifest import EncoderShape, HeadShape
from services.offline.datasets import Interactions, load_dataset
from services.offline.datasets.splits import leave_one_out_split
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.engine.intervals import spread
from services.offline.evaluation.engine.metrics import summary, target_ranks
from services.offline.evaluation.engine.ranked_events import EventScorer, held_out_batches
from services.offline.evaluation.quality.arms import ARMS, Trial
from services.offline.evaluation.quality.runs import CHOSEN_BY
from services.offline.evaluation.quality.table import LAST, MeasuredData, plan_for
from services.offline.training.evaluation import ModelScorer
from services.offline.training.loop import train
from services.offline.training.models.hstu import HstuEncoder, elapsed_buckets
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import IntArray

Row = dict[str, Any]

_ARMS = ("hstu-dot", "hstu-mol")
_SETTING = Trial(loss="corrected-softmax", num_negatives=256)
# The authors exclude only this many last films from the ranking: the length of their history window.
_RECENT = 200
_GAP_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """The differences of a protocol; the defaults are this repository's protocol.

    knows_absence: the model gets the time since the last event, in buckets, of which the first ends at 1,024 s. seeds:
    number of trainings with the dot product and with the mixture.
    """

    title: str
    seeds: tuple[int, int] = (1, 0)
    knows_absence: bool = True
    knows_next_time: bool = False
    has_positions: bool = False
    keeps_all_items: bool = False
    trains_on_validation: bool = False


PROTOCOLS = (
    Protocol(title="ours", seeds=(3, 3)),
    Protocol(title="without the time since the last event", knows_absence=False),
    Protocol(title="the time of the next event in its place", seeds=(1, 1), knows_absence=False, knows_next_time=True),
    Protocol(title="absolute positions", has_positions=True),
    Protocol(title="every film", keeps_all_items=True),
    Protocol(title="trained on the validation events too", trains_on_validation=True),
    Protocol(
        title="all of these",
        seeds=(3, 3),
        knows_absence=False,
        knows_next_time=True,
        has_positions=True,
        keeps_all_items=True,
        trains_on_validation=True,
    ),
)


class _PublishedEncoder(HstuEncoder):
    """The protocol's encoder. With `knows_next_time`, its event times must come from `with_next_times`."""

    def __init__(self, shape: EncoderShape, *, dropout: float, protocol: Protocol) -> None:
        super().__init__(shape, dropout=dropout)
        self.protocol = protocol
        if protocol.has_positions:
            start = torch.empty(shape.max_history, shape.width).normal_(std=shape.width**-0.5)
            self.positions = nn.Parameter(start)

    def forward(self, embedded: Tensor, event_time: Tensor) -> Tensor:
        if self.protocol.has_positions:
            embedded = embedded + self.positions[: embedded.shape[1]] / self.input_scale
        return super().forward(embedded, event_time)

    def buckets(self, event_time: Tensor) -> Tensor:
        if not self.protocol.knows_next_time:
            return super().buckets(event_time)
        own = event_time >> _GAP_BITS
        following = own + (event_time & (2**_GAP_BITS - 1))
        return elapsed_buckets(following.unsqueeze(2) - own.unsqueeze(1), self.num_time_buckets)


class PublishedModel(SequentialModel):
    """`SequentialModel` with the protocol's encoder."""

    def __init__(self, encoder: EncoderShape, head: HeadShape, *, protocol: Protocol, **settings: Any) -> None:
        super().__init__(encoder, head, **settings)
        self.encoder = _PublishedEncoder(encoder, dropout=settings["dropouts"].encoder, protocol=protocol)


def with_next_times(interactions: Interactions) -> Interactions:
    """Return the events with two values in each timestamp: the upper 32 bits have the event's time.

    The lower 32 bits have the seconds until the user's next event, or 0 for the last event.
    """
    rows, offsets = interactions.by_user()
    times = interactions.timestamps[rows]
    gaps = np.diff(times, append=times[-1:])
    gaps[offsets[1:] - 1] = 0
    packed = np.empty_like(times)
    packed[rows] = (times << _GAP_BITS) | gaps
    # A stable sort preserves each user's order: among a user's events of one second, only the last can have a gap.
    order = np.argsort(packed, kind="stable")
    return replace(interactions.select(order), timestamps=packed[order])


def ranked(scorer: EventScorer, interactions: Interactions, rows: IntArray) -> Row:
    """Return the metrics, HR@10 excluding only the user's last 200 items, and HR@10 excluding none."""
    ranks = []
    for batch in held_out_batches(interactions, rows):
        recent = np.zeros_like(batch.seen)
        starts = np.maximum(batch.histories.offsets[batch.users], batch.events - _RECENT)
        for row, (start, end) in enumerate(zip(starts, batch.events, strict=True)):
            recent[row, batch.histories.items[start:end]] = True
        scores = scorer.scores(batch.histories, batch.events, batch.users)
        left_out = (batch.seen, recent, np.zeros_like(recent))
        ranks.append([target_ranks(scores, batch.targets, excluded) for excluded in left_out])
    seen, last, nothing = (summary(np.concatenate(part)) for part in zip(*ranks, strict=True))
    return {"seen": seen, "recent": last["hr@10"], "none": nothing["hr@10"]}


def run(request: Request) -> Report:
    """Return rows by protocol and arm; writes published.{md,json} after every training.

    Trainings in published.json are not repeated. Raises: DatasetUnavailableError.
    """
    began, path = time.perf_counter(), request.out / "published.json"
    runs: list[Row] = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    data = MeasuredData(name="ml-latest-small" if request.quick else "ml-1m", splits=(LAST,))
    report: Report = {}
    for protocol, arm, seed in _planned(quick=request.quick):
        wanted = {"data": data.name, "protocol": protocol.title, "arm": arm, "seed": seed}
        if not any(wanted.items() <= one.items() for one in runs):
            runs.append(wanted | _trained(request, data, protocol, arm, seed))
        rows = list(_rows([one for one in runs if one["data"] == data.name]))
        report = written(request, report_of("published", request, rows, began) | {"runs": runs}, page)
    return report


def _planned(*, quick: bool) -> Iterator[tuple[Protocol, str, int]]:
    for number, arm in enumerate(_ARMS):
        for seed in range(1 if quick else 3):
            yield from ((one, arm, seed) for one in PROTOCOLS if seed < one.seeds[number])


def _trained(request: Request, data: MeasuredData, protocol: Protocol, arm: str, seed: int) -> Row:
    interactions = load_dataset(data.name, download=False)
    interactions = interactions if protocol.keeps_all_items else interactions.keep_frequent(min_per_item=5)
    split = leave_one_out_split(with_next_times(interactions) if protocol.knows_next_time else interactions)
    plan = plan_for(data, split.train)
    config = _SETTING.applied(ARMS[arm].shaped(plan.config))
    config = replace(config, seed=seed, epochs=1 if request.quick else plan.final_epochs)
    config = config if protocol.knows_absence else replace(config, absence=None)
    epochs: list[Row] = []

    def judge(model: SequentialModel) -> float:
        parts = {"validation": split.valid_rows, "test": split.test_rows}
        scorer = ModelScorer(model)
        epochs.append({part: ranked(scorer, split.interactions, rows) for part, rows in parts.items()})
        request.say(f"{protocol.title}, {arm}, seed {seed}: epoch {len(epochs)} of {config.epochs}")
        return float(epochs[-1]["validation"]["seen"][CHOSEN_BY])

    request.say(f"{protocol.title}, {arm}, seed {seed}")
    learnt = split.interactions.select(split.refit_rows if protocol.trains_on_validation else split.train_rows)
    report = train(config, learnt, validate=judge, build=partial(PublishedModel, protocol=protocol))
    return {"items": interactions.num_items, "cpu_seconds": round(report.cpu_seconds, 1), "epochs": epochs}


def _rows(runs: Sequence[Row]) -> Iterator[Row]:
    for arm in _ARMS:
        ours: list[float] = []
        for protocol in PROTOCOLS:
            found = [one["epochs"] for one in runs if (one["arm"], one["protocol"]) == (arm, protocol.title)]
            if not found:
                continue
            best = [max(epochs, key=lambda one: one["validation"]["seen"][CHOSEN_BY])["test"] for epochs in found]
            hits = [one["seen"]["hr@10"] for one in best]
            ours = ours or hits
            yield {
                "arm": arm,
                "protocol": protocol.title,
                "seeds": len(found),
                "hr@10": float(np.mean(hits)),
                "hr@10_sd": spread(hits),
                # Compare equal seeds.
                "more": None if hits is ours else float(np.mean(hits) - np.mean(ours[: len(hits)])),
                "ndcg@10": float(np.mean([one["seen"]["ndcg@10"] for one in best])),
                "recent": float(np.mean([one["recent"] for one in best])),
                "none": float(np.mean([one["none"] for one in best])),
                "by_test": float(np.mean([max(one["test"]["recent"] for one in epochs) for epochs in found])),
            }


def page(report: Report) -> str:
    """Return published.md."""
    missing = len(list(_planned(quick=report["quick"]))) - sum(row["seeds"] for row in report["rows"])
    return filled(Path(__file__).with_name("published.md.j2"), **report, arms=ARMS, missing=missing)

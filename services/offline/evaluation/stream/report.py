"""`freshet bench stream`: measure what feedback improves without training, event by event.

A model is trained on the first four fifths of the events; the last fifth is the stream. Except in ml-latest-small, a
tenth of the items is withheld from training.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from services.algorithms.pefa.policy import FeedbackPolicy, SharePolicy
from services.offline.datasets import Interactions, load_dataset
from services.offline.evaluation.common.report import Report, Request, report_of, written
from services.offline.evaluation.stream.baselines import NeighbourSettings, StreamingItemNeighbours, StreamingPopularity
from services.offline.evaluation.stream.measures import EventColumns, columns, estimates, joined, kinds
from services.offline.evaluation.stream.models import Fit, TrainedModels, stream_model
from services.offline.evaluation.stream.page import WalkedSet, page, plot_stream
from services.offline.evaluation.stream.pefa import RefreshedItems, VoteSettings, WithVotes
from services.offline.evaluation.stream.walk import IntArray, StreamSetting, stream_setting, walk

Row = dict[str, Any]

DATASETS = ("ml-1m", "ml-latest-small")
# A stream with many new items needs no withheld ones.
_WITHHELD_SHARES = {"ml-latest-small": 0.0}
_WITHHELD_SHARE = 0.1
_FEEDBACK = FeedbackPolicy()
_CAPACITY, _MIN_USERS = 50_000, 3
XS, ALONE, FROZEN, RETRAINED = "XS", "XS, m = 1", "frozen", "retrained"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """Settings of each ranker."""

    share: SharePolicy
    new_share: SharePolicy
    votes: VoteSettings
    half_life_events: float
    neighbours: NeighbourSettings

    def as_plain(self) -> Row:
        """Return plain values; a policy becomes its text."""
        return {
            "feedback": _FEEDBACK.text,
            "XS share": self.share.text,
            "XS share of new items": self.new_share.text,
            "XL": asdict(self.votes) | {"capacity": _CAPACITY},
            "distinct users": _MIN_USERS,
            "popularity half-life, events": self.half_life_events,
            "item-kNN": asdict(self.neighbours),
        }


# `freshet bench stream` of commit 507ecdf7 chose these settings on the last fifth of each set's training part.
_CHOSEN = {
    "ml-1m": Policies(
        share=SharePolicy.parse("evidence(prior=30)"),
        new_share=SharePolicy.parse("evidence(prior=0.5)"),
        votes=VoteSettings(k=64, share=0.5),
        half_life_events=5_000,
        neighbours=NeighbourSettings(window=10, recency=0.8, damping=0.8, shrink=2.0),
    ),
    "ml-latest-small": Policies(
        share=SharePolicy.parse("fixed(least=0.9)"),
        new_share=SharePolicy.parse("fixed(least=0)"),
        votes=VoteSettings(k=16, share=0.15),
        half_life_events=1_000,
        neighbours=NeighbourSettings(window=50, recency=0.95, damping=0.8, shrink=2.0),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    request: Request
    interactions: Interactions
    fit: Fit
    withheld_share: float
    retrainings: int
    predict_every: int

    def say(self, line: str) -> None:
        self.request.say(f"{self.interactions.name}, {line}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seed:
    """A seed's walk. `trainings`: the stream places where the retrained ranker was trained."""

    seed: int
    setting: StreamSetting
    table: EventColumns
    ranks: dict[str, IntArray]
    trainings: list[int]


def run(
    request: Request,
    *,
    fit: Fit,
    datasets: Sequence[str],
    seeds: Sequence[int],
    retrainings: int,
    predict_every: int = 1,
) -> Report:
    """Walk each data set once per seed; write freshness.{md,json,png} to `request.out`.

    retrainings: number of retrainings, evenly spread over the stream. predict_every: predict only every n-th event, and
    learn all.
    Raises: ValueError for no data set, no seed, negative retrainings, predict_every below 1 or unavailable data.
    """
    for name, value in (("datasets", datasets), ("seeds", seeds)):
        if not len(value):
            raise ValueError(f"{name} is empty; allowed: at least one")
    if retrainings < 0:
        raise ValueError(f"retrainings={retrainings}; allowed: 0 or more")
    if predict_every < 1:
        raise ValueError(f"predict_every={predict_every}; allowed: 1 or more")
    began = time.perf_counter()
    rows: list[Row] = []
    sets: list[WalkedSet] = []
    settings: list[Row] = []
    for wanted in datasets:
        interactions = load_dataset(wanted)
        name = interactions.name
        plan = _Plan(
            request=request,
            interactions=interactions,
            fit=fit,
            withheld_share=_WITHHELD_SHARES.get(name, _WITHHELD_SHARE),
            retrainings=retrainings,
            predict_every=predict_every,
        )
        chosen_on = name if name in _CHOSEN else DATASETS[0]
        policies = _CHOSEN[chosen_on]
        walked = [_walk_seed(plan, policies, seed) for seed in seeds]
        table = joined([one.table for one in walked])
        ranks = {key: np.concatenate([one.ranks[key] for one in walked]) for key in walked[0].ranks}
        sets.append(WalkedSet(name=name, table=table, ranks=ranks, trainings=walked[0].trainings))
        settings.append(_setting_row(plan, walked) | policies.as_plain() | {"chosen on": chosen_on})
        rows += [{"dataset": name, **row} for row in _rows(table, ranks)]
    report = report_of("freshness", request, rows, began) | {"settings": settings}
    return written(request, report, page, lambda _, out: plot_stream(sets, out / "freshness.png"))


def _walk_seed(plan: _Plan, policies: Policies, seed: int) -> _Seed:
    setting = stream_setting(plan.interactions, seed=seed, withheld_share=plan.withheld_share)
    plan.say(f"seed {seed}: training on {setting.split:,} events")
    model = stream_model(setting, plan.fit, seed=seed)
    models = [model]
    parts = plan.retrainings + 1
    starts = [round(setting.num_streamed * number / parts) for number in range(1, parts)]
    for first, end in zip(starts, [*starts[1:], setting.num_streamed], strict=False):
        plan.say(f"seed {seed}: training again after {first:,} streamed events")
        models.append(stream_model(setting, plan.fit, seed=seed, first=first, end=end))
    least = {XS: _MIN_USERS, ALONE: 1}
    items = RefreshedItems(setting, model, _FEEDBACK, least, share=policies.share, new_share=policies.new_share)
    voting = WithVotes(
        setting,
        model,
        _FEEDBACK,
        {" + XL": policies.votes},
        [TrainedModels(setting, [model], name=FROZEN), items],
        capacity=_CAPACITY,
        min_users=_MIN_USERS,
    )
    walked = walk(
        setting,
        [
            voting,
            TrainedModels(setting, models, name=RETRAINED),
            StreamingPopularity(setting, half_life_events=policies.half_life_events),
            StreamingItemNeighbours(setting, policies.neighbours),
        ],
        predicted=np.arange(setting.num_streamed) % plan.predict_every == 0,
        progress=lambda done: plan.say(f"seed {seed}: {done:,} of {setting.num_streamed:,} events"),
    )
    return _Seed(
        seed=seed,
        setting=setting,
        table=columns(setting, walked.places, model.predictable(walked.places)),
        ranks={name: found for name, found in walked.ranks.items() if name != f"{ALONE} + XL"},
        trainings=starts,
    )


def _rows(table: EventColumns, ranks: dict[str, IntArray]) -> list[Row]:
    rows: list[Row] = []
    for kind, mask in kinds(table).items():
        against = {other: estimates(table, ranks, mask, minus=other) for other in (FROZEN, "popularity", "item-kNN")}
        for ranker, estimate in estimates(table, ranks, mask).items():
            row: Row = {
                "kind": kind,
                "contender": ranker,
                "events": int(mask.sum()),
                "items": len(np.unique(table.items[mask])),
                **estimate,
            }
            row |= {f"minus {other}": gaps[ranker] for other, gaps in against.items() if ranker in gaps}
            rows.append(row)
    return rows


def _setting_row(plan: _Plan, walked: Sequence[_Seed]) -> Row:
    setting = walked[0].setting
    predictable = np.concatenate([one.table.predictable for one in walked])
    return {
        "dataset": plan.interactions.name,
        "source": plan.interactions.source,
        "seeds": [one.seed for one in walked],
        "events before the split": setting.split,
        "events streamed": setting.num_streamed,
        "events predicted": int(predictable.sum()),
        "events without a history": int((~predictable).sum()),
        "items withheld": int(setting.withheld.sum()),
        "new items": int(setting.new_items.sum()),
        "events on new items": int(setting.new_items[setting.interactions.items[setting.split :]].sum()),
        "trained again after": walked[0].trainings,
        "predicted every": plan.predict_every,
    }

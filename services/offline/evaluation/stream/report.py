"""`freshet bench stream`: what feedback without training is worth, event by event; one page, its plots, one report.

Per data set: settings are chosen on the end of the training part; then, per seed, a model is trained on the first four
fifths of the events with a tenth of the catalogue withheld, and the rest is walked through. Who trains is handed in.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.offline.datasets import Interactions, load_dataset
from services.offline.evaluation.common.report import Report, Request, written
from services.offline.evaluation.stream.baselines import StreamingItemNeighbours, StreamingPopularity
from services.offline.evaluation.stream.choice import Policies, choose
from services.offline.evaluation.stream.measures import (
    EventColumns,
    as_plain,
    chosen,
    columns,
    differences,
    estimates,
    joined,
    kinds,
)
from services.offline.evaluation.stream.models import Fit, StreamModel, TrainedModels, stream_model
from services.offline.evaluation.stream.page import page
from services.offline.evaluation.stream.pefa import RefreshedItems, Refreshing, WithVotes
from services.offline.evaluation.stream.plots import WalkedSet, plot_new_items, plot_stream
from services.offline.evaluation.stream.setting import IntArray, StreamSetting, before_the_stream, stream_setting
from services.offline.evaluation.stream.walk import Contender, Walked, walk

Row = dict[str, Any]

DATASETS = ("ml-1m", "ml-latest-small")
# Nothing is withheld where time itself brings many new items.
_WITHHELD_SHARES = {"ml-latest-small": 0.0}
_WITHHELD_SHARE = 0.1
_CHOICE_PREDICTS_EVERY = 4
_SAMPLED_QUERIES = 1000
# A seed no stream uses: what is withheld while choosing is not what is withheld while measuring.
_CHOICE_SEED = 1000
XS, ALONE, FROZEN, RETRAINED = "XS", "XS, m = 1", "frozen", "retrained"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seed:
    """What one seed's walk left."""

    setting: StreamSetting
    table: EventColumns
    ranks: dict[str, IntArray]
    behind: dict[str, float]


def run(
    request: Request,
    *,
    fit: Fit,
    datasets: Sequence[str],
    seeds: Sequence[int],
    retrainings: int,
    predict_every: int = 1,
) -> Report:
    """Walk each data set once per seed; write freshness.{md,json}, freshness.png and new_items.png to `request.out`.

    `retrainings`: how often the retrained contender is trained again, evenly over the stream. Of the events every
    `predict_every`-th is predicted; all are learnt from.
    Raises: ValueError for no data set, no seed, negative retrainings, predict_every below 1 or data that cannot be had.
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
    choices: list[Row] = []
    for wanted in datasets:
        interactions = load_dataset(wanted)
        name = interactions.name
        share = _WITHHELD_SHARES.get(name, _WITHHELD_SHARE)
        every = max(predict_every, _CHOICE_PREDICTS_EVERY)
        policies, tried = _chosen_policies(request, interactions, fit, share, every)
        choices += tried
        walked = []
        for seed in seeds:
            walked.append(_walk_seed(request, interactions, fit, share, seed, retrainings, policies, predict_every))
        table = joined([one.table for one in walked])
        ranks = {key: np.concatenate([one.ranks[key] for one in walked]) for key in walked[0].ranks}
        trainings = _training_places(walked[0].setting, retrainings)
        sets.append(WalkedSet(name=name, table=table, ranks=ranks, trainings=trainings))
        settings.append(_setting_row(name, interactions, walked, policies, trainings, seeds, predict_every))
        rows += _rows(name, table, ranks, walked, seeds)
    report: Report = {
        "benchmark": "freshness",
        "how": request.how,
        "quick": request.quick,
        "seconds": round(time.perf_counter() - began, 1),
        "settings": settings,
        "choices": choices,
        "rows": rows,
    }
    request.out.mkdir(parents=True, exist_ok=True)
    plot_stream(sets, request.out / "freshness.png")
    plot_new_items(sets, request.out / "new_items.png")
    return written(request, report, page(report))


def _chosen_policies(
    request: Request, interactions: Interactions, fit: Fit, withheld_share: float, predict_every: int
) -> tuple[Policies, list[Row]]:
    """Settings from a walk through the last fifth of the training part, with other items withheld."""
    name = interactions.name
    before = before_the_stream(stream_setting(interactions, seed=_CHOICE_SEED, withheld_share=0))
    setting = stream_setting(before, seed=_CHOICE_SEED, withheld_share=withheld_share)
    request.say(f"{name}: training on the first {setting.split:,} events, to choose settings on what follows")
    model = stream_model(setting, fit, seed=_CHOICE_SEED, past=True)
    policies, tried = choose(
        setting, model, predict_every=predict_every, say=lambda line: request.say(f"{name}: {line}")
    )
    return policies, [{"dataset": name, **row} for row in tried]


def _walk_seed(
    request: Request,
    interactions: Interactions,
    fit: Fit,
    withheld_share: float,
    seed: int,
    retrainings: int,
    policies: Policies,
    predict_every: int,
) -> _Seed:
    name = interactions.name
    setting = stream_setting(interactions, seed=seed, withheld_share=withheld_share)
    request.say(f"{name}, seed {seed}: training on {setting.split:,} events")
    model = stream_model(setting, fit, seed=seed, past=policies.feedback.from_past)
    models = [model]
    starts = _training_places(setting, retrainings)
    for place, end in zip(starts, [*starts[1:], setting.num_streamed], strict=False):
        request.say(f"{name}, seed {seed}: training again after {place:,} streamed events")
        models.append(stream_model(setting, fit, seed=seed, first=place, end=end))
    refreshing = {
        XS: Refreshing(share=policies.share, new_share=policies.new_share, min_users=policies.min_users),
        ALONE: Refreshing(share=policies.share, new_share=policies.new_share, min_users=1),
    }
    items = RefreshedItems(setting, model, policies.feedback, refreshing)
    voting = WithVotes(
        setting,
        model,
        policies.feedback,
        {" + XL": policies.votes},
        [TrainedModels(setting, [model], name=FROZEN), items],
        capacity=policies.capacity,
        min_users=policies.min_users,
    )
    contenders: list[Contender] = [
        voting,
        TrainedModels(setting, models, name=RETRAINED),
        StreamingPopularity(setting, half_life_events=policies.half_life_events),
        StreamingItemNeighbours(setting, policies.neighbours),
    ]
    walked = walk(
        setting,
        contenders,
        predict_every=predict_every,
        progress=lambda done: request.say(f"{name}, seed {seed}: {done:,} of {setting.num_streamed:,} events"),
    )
    ranks = {name: found for name, found in walked.ranks.items() if name != f"{ALONE} + XL"}
    sample = walked.places[:: max(1, len(walked.places) // _SAMPLED_QUERIES)]
    behind = items.behind(model.queries(sample)[1]) | {
        "share of XL's voters on what the user had": voting.share_on_seen
    }
    return _Seed(setting=setting, table=_table(setting, model, walked), ranks=ranks, behind=behind)


def _table(setting: StreamSetting, model: StreamModel, walked: Walked) -> EventColumns:
    able, _ = model.queries(walked.places)
    predictable = np.zeros(setting.num_streamed, dtype=bool)
    predictable[walked.places[able]] = True
    return chosen(columns(setting, predictable), walked.places)


def _training_places(setting: StreamSetting, retrainings: int) -> list[int]:
    """Stream places of the retrainings: the stream in equal parts."""
    return [round(setting.num_streamed * number / (retrainings + 1)) for number in range(1, retrainings + 1)]


def _rows(
    name: str, table: EventColumns, ranks: dict[str, IntArray], walked: Sequence[_Seed], seeds: Sequence[int]
) -> list[Row]:
    rows: list[Row] = []
    by_seed = [kinds(one.table) for one in walked]
    for kind, mask in kinds(table).items():
        found = estimates(table, ranks, mask, seed=0)
        against = {
            other: differences(table, ranks, mask, minus=other, seed=0) for other in (FROZEN, "popularity", "item-kNN")
        }
        for contender, estimate in found.items():
            row: Row = {
                "dataset": name,
                "kind": kind,
                "contender": contender,
                "events": int(mask.sum()),
                "items": len(np.unique(table.items[mask])),
                **as_plain(estimate),
            }
            for other, gaps in against.items():
                if contender in gaps:
                    row[f"minus {other}"] = as_plain(gaps[contender])
            if kind in ("all", "new items, from their 3rd interaction"):
                row["by seed"] = {
                    str(seed): _own_rates(one, contender, masks[kind])
                    for seed, one, masks in zip(seeds, walked, by_seed, strict=True)
                    if kind in masks
                }
            rows.append(row)
    return rows


def _own_rates(one: _Seed, contender: str, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, float]:
    """A seed's own rates."""
    found = estimates(one.table, {contender: one.ranks[contender]}, mask, seed=0)
    return {metric: round(value.mean, 5) for metric, value in found.get(contender, {}).items()}


def _setting_row(
    name: str,
    interactions: Interactions,
    walked: Sequence[_Seed],
    policies: Policies,
    trainings: Sequence[int],
    seeds: Sequence[int],
    predict_every: int,
) -> Row:
    setting = walked[0].setting
    new = setting.new_items[setting.interactions.items[setting.split :]]
    return {
        "dataset": name,
        "source": interactions.source,
        "seeds": list(seeds),
        "events before the split": setting.split,
        "events streamed": setting.num_streamed,
        "events predicted": int(sum(int(one.table.predictable.sum()) for one in walked)),
        "events without a history": int(sum(int((~one.table.predictable).sum()) for one in walked)),
        "items withheld": int(setting.withheld.sum()),
        "new items": int(setting.new_items.sum()),
        "events on new items": int(new.sum()),
        "trained again after": list(trainings),
        "predicted every": predict_every,
        "behind": {
            label: round(float(np.mean([one.behind[label] for one in walked if label in one.behind])), 4)
            for label in dict.fromkeys(label for one in walked for label in one.behind)
        },
        **policies.as_plain(),
    }

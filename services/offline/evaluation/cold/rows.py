"""`freshet bench cold`: what is popular now for people of whom nothing or little is known.

A model is trained on the first four fifths of time; then events come one by one. Each is predicted from what happened
before it: by training's counts, by the counts of the stream (`algorithms.items.popularity`, as the encoder process
keeps them), by the model, and by the model with popular items favoured for everybody
(`services.gateway.recommend.favoured`).

Letters: C events of a batch that are predicted, X items, E predicted events in all.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.event_schema import default_schema
from services.gateway.domain import ScoredItem
from services.gateway.recommend.favoured import MAX_FAVOURED, favours
from services.gateway.recommend.popular import TRAINING_COUNTS
from services.offline.datasets import Interactions, load_dataset
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.engine.intervals import paired_difference
from services.offline.evaluation.engine.metrics import gains
from services.offline.evaluation.stream.models import Fit, TrainedModels, stream_model
from services.offline.evaluation.stream.walk import EventBatch, Scores, StreamSetting, stream_setting, walk

DATASETS = ("ml-1m", "ml-100k", "ml-latest-small")
HALF_LIFE_S = 7 * 86_400.0
TRAINING, NOW, MODEL, FAVOURED = "training's counts", "popular now", "the model", "popular items favoured"
_GROUPS = ((0, 0), (1, 1), (2, 3), (4, 5), (6, 9), (10, 19), (20, 29), (30, 59), (60, 10_000))

Row = dict[str, Any]
Counts = npt.NDArray[np.float64]


def run(
    request: Request,
    *,
    fit: Fit,
    seeds: Sequence[int],
    predict_every: int,
    datasets: Iterable[Interactions | str] = DATASETS,
) -> Report:
    """Measure; writes cold.{md,json}. Raises: ValueError for data without times by the clock."""
    began = time.perf_counter()
    rows = []
    for data in datasets:
        events = load_dataset(data) if isinstance(data, str) else data
        rows += _rows(request, events, fit, seeds, predict_every)
    return written(request, report_of("cold", request, rows, began), page)


def page(report: Report) -> str:
    """cold.md of a report; a `remark` is what a person adds to it."""
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report})


def _rows(request: Request, data: Interactions, fit: Fit, seeds: Sequence[int], predict_every: int) -> list[Row]:
    if not data.has_times:
        raise ValueError(f"{data.name} has no times by the clock; allowed: data that has")
    setting = stream_setting(data, seed=seeds[0], withheld_share=0)
    hits: dict[str, list[Counts]] = {}
    for seed in seeds:
        request.say(f"{data.name}, seed {seed}: training on {setting.split:,} events")
        model = stream_model(setting, fit, seed=seed)
        ranker = ColdRanker(setting, TrainedModels(setting, [model], name=MODEL), tau=model.tau)
        walked = walk(setting, [ranker], predict_every=predict_every)
        for name, ranks in walked.ranks.items():
            hits.setdefault(name, []).append(gains(ranks, "hr@10"))
    rows, before = [], events_before(setting)[walked.places]
    users = setting.interactions.users[setting.split :][walked.places]
    for low, high in _GROUPS:
        chosen = (before >= low) & (before <= high)
        if not chosen.any():
            continue
        of = {name: np.array(found)[:, chosen] for name, found in hits.items()}
        gain = paired_difference(
            of[FAVOURED] - of[MODEL], np.zeros((1, int(chosen.sum()))), users=users[chosen], seed=request.seed
        )
        rows.append(
            {
                "data": data.name,
                "earlier": str(low) if low == high else f"{low}–{high}" if high < _GROUPS[-1][1] else f"{low} and more",
                "events": int(chosen.sum()),
                "seeds": len(seeds),
                **{name: round(float(found.mean()), 4) for name, found in of.items()},
                "gain": [round(one, 4) for one in (gain.mean, gain.low, gain.high)] if low else None,
            }
        )
    return rows


def events_before(setting: StreamSetting) -> npt.NDArray[np.int64]:
    """Of each streamed event, how many its person had before."""
    users = setting.interactions.users
    order = np.argsort(users, kind="stable")
    starts = np.flatnonzero(np.diff(users[order], prepend=-1))
    place = np.arange(len(users)) - np.repeat(starts, np.diff(starts, append=len(users)))
    found = np.empty(len(users), dtype=np.int64)
    found[order] = place
    return found[setting.split :]


class ColdRanker:
    """Scores by all four names; the counts of the stream are as of each event."""

    def __init__(self, setting: StreamSetting, model: TrainedModels, *, tau: float) -> None:
        events = setting.interactions
        self._model, self._tau = model, tau
        self._training = np.bincount(events.items[: setting.split], minlength=events.num_items).astype(np.float64)
        self._taken = np.zeros(events.num_items)
        self._now_s = float(events.timestamps[setting.split])
        schema = default_schema()
        names = [events.type_names[code] for code in events.types[setting.split :].tolist()]
        values = events.values[setting.split :].tolist()
        self._weights = [schema.weight_for(name, value) for name, value in zip(names, values, strict=True)]

    def step(self, batch: EventBatch) -> Mapping[str, Scores]:
        model = np.asarray(self._model.step(batch)[MODEL], dtype=np.float64)
        now = np.empty_like(model)
        favoured = model.copy()
        rows = {place: row for row, place in enumerate(batch.chosen.tolist())}
        for place, (item, at) in enumerate(zip(batch.items.tolist(), batch.times.tolist(), strict=True)):
            self._taken *= 0.5 ** (max(0.0, at - self._now_s) / HALF_LIFE_S)
            self._now_s = max(self._now_s, float(at))
            if place in rows:
                row = rows[place]
                now[row] = self._taken + TRAINING_COUNTS * self._training
                self._favour(favoured[row], now[row])
            self._taken[item] += self._weights[int(batch.places[place])]
        training = np.repeat(self._training[None], len(now), axis=0)
        return {
            TRAINING: np.where(training > 0, training, -np.inf),
            NOW: np.where(now > 0, now, -np.inf),
            MODEL: model,
            FAVOURED: favoured,
        }

    def _favour(self, scores: Counts, counts: Counts) -> None:
        best = np.argsort(-counts, kind="stable")[:MAX_FAVOURED].tolist()
        popular = [ScoredItem(str(item), float(counts[item]), "popular") for item in best]
        for item, more in favours(popular, self._tau).items():
            scores[int(item)] += more

"""`freshet evaluate`: a bundle as served, next to baselines, on events outside its training.

Letters: E events, X items.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import load_bundle
from services.offline.datasets import Interactions, MeasuredSplit, TableOptions
from services.offline.evaluation.bundles.judged import Data, judged_by
from services.offline.evaluation.engine.baselines import Ease, Popularity, RecentPopularity, ServedNeighbours
from services.offline.evaluation.engine.intervals import estimates
from services.offline.evaluation.engine.metrics import METRICS
from services.offline.evaluation.engine.ranked_events import EventScorer, RankedEvents, rank_events
from services.offline.evaluation.engine.served_scorer import ServedScorer
from services.offline.evaluation.engine.strata import strata

MODEL = "model"
# EASE inverts a matrix of items by items. It is omitted if that takes longer than this.
EASE_SECONDS = 30.0
_PROBE_ITEMS = 512
# The fewest events of a reported kind.
MIN_EVENTS = 30

_AS_USUAL = TableOptions()
Report = dict[str, Any]
Say = Callable[[str], None]


def evaluate(bundle_path: Path, data: Data, *, table: TableOptions = _AS_USUAL, say: Say = lambda line: None) -> Report:
    """Return a report of plain values with a row per scorer and a segment per kind of event.

    Intervals come from draws of users. Differences from a baseline use the same draws.
    Raises: ValueError raised by `judged_by`, or if no event has an earlier event of its user; BundleError.
    """
    bundle = load_bundle(bundle_path)
    judged = judged_by([bundle], data, table=table, say=say)
    split, note = judged.split, judged.note
    scorers, left_out = baselines_of(split, bundle.event_schema.of)
    ranked = {}
    for name, scorer in {MODEL: ServedScorer(bundle, split.interactions), **scorers}.items():
        say(f"ranking {len(split.test_rows):,} events: {name}")
        ranked[name] = rank_events(scorer, split.interactions, split.test_rows)
    of = ranked[MODEL]
    best = max(scorers, key=lambda name: (ranked[name].ranks < 10).mean(), default=None)
    return {
        "bundle": str(bundle_path),
        "model_version": bundle.model_version,
        "data": split.interactions.name,
        "note": note,
        "events": len(of.ranks),
        "users": len(np.unique(of.users)),
        "items": split.interactions.num_items,
        "learnt_events": len(split.train_rows),
        "best_baseline": best,
        "left_out": left_out,
        "rows": list(_rows(split, ranked)),
        "segments": segments(split, of, {name: one.ranks for name, one in ranked.items()}, minus=best),
    }


def baselines_of(split: MeasuredSplit, means: Callable[[str], Any]) -> tuple[dict[str, EventScorer], dict[str, str]]:
    """Return fitted baselines by name, and the reasons for omitted ones.

    `means`: an event type's meaning.
    """
    past = split.train
    taken = past.select(past.of_types([name for name in past.type_names if means(name).is_encoded]))
    if not len(taken):
        return {}, {"baselines": "the data has no event from before: there is nothing that they could learn"}
    found: dict[str, Popularity | RecentPopularity | ServedNeighbours | Ease] = {
        "item-kNN": ServedNeighbours(),
        "popularity": Popularity(),
        "recent popularity": RecentPopularity(),
    }
    left_out: dict[str, str] = {}
    seconds = ease_seconds(taken.num_items)
    if seconds <= EASE_SECONDS:
        found["EASE"] = Ease()
    else:
        left_out["EASE"] = f"{taken.num_items:,} items would take {seconds:,.0f} s; allowed: {EASE_SECONDS:.0f} s"
    for baseline in found.values():
        baseline.fit(taken)
    return dict(found), left_out


def ease_seconds(num_items: int) -> float:
    """Estimate the seconds of EASE's cubic inverse from the best of three small ones."""
    import torch

    matrix, times = torch.eye(_PROBE_ITEMS) + 1e-4, []
    for _ in range(3):
        began = time.perf_counter()
        torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        times.append(time.perf_counter() - began)
    return min(times) * (num_items / _PROBE_ITEMS) ** 3


def segments(
    split: MeasuredSplit, of: RankedEvents, ranks: Mapping[str, np.ndarray[Any, Any]], *, minus: str | None
) -> list[dict[str, Any]]:
    """Return HR@10 and NDCG@10 by name, and differences to `minus`, of each kind with at least MIN_EVENTS events."""
    names = ("hr@10", "ndcg@10")
    found = []
    for question, kind, mask in strata(split, of):
        if mask.sum() < MIN_EVENTS:
            continue
        users, kept = of.users[mask], {name: one[mask] for name, one in ranks.items()}
        row: dict[str, Any] = {"question": question, "segment": kind, "events": int(mask.sum())}
        row["values"] = estimates(kept, users, names)
        row["differences"] = estimates(kept, users, names, minus=minus) if minus else {}
        found.append(row)
    return found


def _rows(split: MeasuredSplit, ranked: Mapping[str, RankedEvents]) -> Any:
    users = ranked[MODEL].users
    ranks = {name: one.ranks for name, one in ranked.items()}
    means = estimates(ranks, users, METRICS)
    for name, one in ranked.items():
        row = {"name": name, "metrics": means[name]}
        if name != MODEL:
            row["model_minus"] = estimates({MODEL: ranks[MODEL], name: ranks[name]}, users, METRICS, minus=name)[MODEL]
        yield row | beyond_accuracy(split, one)


def beyond_accuracy(split: MeasuredSplit, ranked: RankedEvents) -> dict[str, float | None]:
    """Return measures of the first ten items of every event.

    `coverage`: the share of the catalogue that these items cover. `novelty`: the mean of -log2 of an item's share of
    the training events, with one more event per item. `popularity_bias`: the mean number of training events of these
    items, divided by that of the target items; None if the divisor is 0.
    """
    counts = split.train.item_counts().astype(np.float64)
    assert ranked.first is not None
    shown = ranked.first[ranked.first >= 0]
    targets = _targets(split.interactions, ranked)
    surprise = -np.log2((counts + 1) / (counts.sum() + len(counts)))
    taken = float(counts[targets].mean())
    return {
        "coverage": round(len(np.unique(shown)) / len(counts), 5),
        "novelty": round(float(surprise[shown].mean()), 4),
        "popularity_bias": round(float(counts[shown].mean()) / taken, 4) if taken else None,
    }


def _targets(data: Interactions, ranked: RankedEvents) -> np.ndarray[Any, Any]:
    rows, _ = data.by_user()
    return data.items[rows[ranked.events]]

"""Decide whether a new model may replace the serving one, by predictions of the same later events (decision 059).

Users unknown to a model get its popular items, as in serving.

Letters: E events, B events at a time, X items of the data.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle
from services.offline.datasets import Interactions, MeasuredSplit
from services.offline.evaluation.engine.intervals import holm, paired_difference
from services.offline.evaluation.engine.metrics import gains
from services.offline.evaluation.engine.ranked_events import counting, evenly, rank_events
from services.offline.evaluation.engine.served_scorer import ServedScorer
from services.offline.evaluation.engine.strata import strata
from services.offline.training.sequences import Histories

# Non-inferiority: the interval of the difference must lie above minus this share of the serving model's hit rate.
MARGIN = 0.05
# A stratum needs this many events. It rejects the model if the p-value (Holm) of its loss is below LEVEL.
MIN_EVENTS, LEVEL = 100, 0.05
# Limit of the new model's processor time per event and of its bytes, relative to the serving model's.
MAX_COST = 1.5
_MAX_EVENTS = 6_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Hit rates at 10 over the E events of a stratum, and new minus serving."""

    question: str
    stratum: str
    events: int
    serving: float
    new: float
    difference: tuple[float, float, float]
    p_worse: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The decision.

    held_back: sentences why the new model may not serve; empty if it may. Costs are ratios of new to serving.
    """

    compared: Sequence[Compared]
    time_ratio: float
    bytes_ratio: float
    held_back: Sequence[str]

    @property
    def passes(self) -> bool:
        return not self.held_back


def judge(
    serving: Bundle, new: Bundle, data: Interactions, first: int, *, clock: Callable[[], float] = time.process_time
) -> Verdict:
    """Compare two bundles on up to 6,000 events from row `first` on, on which neither may have trained.

    The new model's event schema decides which events are positive and which items are seen.
    Raises: ValueError if fewer than 100 of these events can be predicted.
    """
    seen = data.seen(new.event_schema)
    data, first = data.select(seen), int(np.searchsorted(seen, first))
    rows = evenly(counting(data, np.arange(first, len(data), dtype=np.int64), new.event_schema), _MAX_EVENTS)
    if len(rows) < MIN_EVENTS:
        raise ValueError(f"{len(rows)} events to judge by; allowed: {MIN_EVENTS} and more, so judge by more hours")
    before = np.arange(first, dtype=np.int64)
    split = MeasuredSplit(
        name="next", interactions=data, train_rows=before, valid_rows=rows[:0], test_rows=rows, refit_rows=before
    )
    scorers = [ServedScorer(one, data, clock=clock) for one in (serving, new)]
    ranked = [rank_events(one, data, rows) for one in scorers]
    old_hits, new_hits = (gains(one.ranks[None], "hr@10") for one in ranked)
    users = ranked[0].users
    trained = [item_id for item_id in serving.item_ids if item_id not in serving.untrained]
    known = np.isin(data.item_ids, trained)[Histories.of(data).items[ranked[0].events]]
    groups = [("all", "all", np.ones(len(users), dtype=bool)), *strata(split, ranked[0])]
    groups += [("item", "of the serving model", known), ("item", "new to it", ~known)]
    compared = [
        _compared(question, name, old_hits[:, mask], new_hits[:, mask], users[mask])
        for question, name, mask in groups
        if mask.sum() >= MIN_EVENTS
    ]
    if not compared:
        raise ValueError(
            f"{len(users)} events can be predicted; allowed: {MIN_EVENTS} and more, so judge by more hours"
        )
    costs = [one.seconds_per_event for one in scorers]
    sizes = [sum(file.bytes for file in one.manifest.files.values()) for one in (serving, new)]
    return _verdict(compared, costs[1] / costs[0], sizes[1] / sizes[0])


def _compared(
    question: str,
    name: str,
    old: npt.NDArray[np.float64],
    new: npt.NDArray[np.float64],
    users: npt.NDArray[np.integer],
) -> Compared:
    found = paired_difference(new, old, users=users)
    return Compared(
        question=question,
        stratum=name,
        events=old.shape[1],
        serving=round(float(old.mean()), 4),
        new=round(float(new.mean()), 4),
        difference=(round(found.mean, 4), round(found.low, 4), round(found.high, 4)),
        p_worse=found.p_value if found.mean < 0 else 1.0,
    )


def _verdict(compared: Sequence[Compared], time_ratio: float, bytes_ratio: float) -> Verdict:
    overall, *parts = compared
    held_back = []
    if overall.difference[1] < -MARGIN * overall.serving:
        held_back.append(
            f"hit rate at 10 {overall.new:.4f}, the serving model's {overall.serving:.4f}: it may lose "
            f"{-overall.difference[1]:.4f}; allowed: {MARGIN:.0%}, {MARGIN * overall.serving:.4f}"
        )
    worse = holm({number: part.p_worse for number, part in enumerate(parts)})
    held_back += [
        f"{part.question}, {part.stratum}: {part.new:.4f}, the serving model's {part.serving:.4f}, worse beyond doubt"
        for number, part in enumerate(parts)
        if worse[number] < LEVEL
    ]
    for name, ratio in (("processor time", time_ratio), ("bytes", bytes_ratio)):
        if ratio > MAX_COST:
            held_back.append(f"{name}: {ratio:.2f} of the serving model's; allowed: at most {MAX_COST}")
    return Verdict(
        compared=compared, time_ratio=round(time_ratio, 3), bytes_ratio=round(bytes_ratio, 3), held_back=held_back
    )

"""Splits into events to train on and events to predict.

Leave-one-out holds out each user's last events; a time split holds out all events from a moment on. Codes mean the same
in each part.

Letters: N events.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .interactions import Interactions, RowArray

MAX_PREDICTED_EVENTS = 6_000


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTimeSplit:
    """The events before `split_time` (unix seconds), and the events from then on."""

    train: Interactions
    held_out: Interactions
    split_time: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSplit:
    """Rows of `interactions`, each array increasing; train, validation and test share no row.

    train_rows: training data of every model. valid_rows, test_rows: the events to predict from all earlier events of
    the user. refit_rows: all rows outside the test part; the tested model is trained on these.
    """

    name: str
    interactions: Interactions
    train_rows: RowArray
    valid_rows: RowArray
    test_rows: RowArray
    refit_rows: RowArray

    @property
    def train(self) -> Interactions:
        return self.interactions.select(self.train_rows)


def leave_one_out_split(interactions: Interactions, name: str = "leave-one-out") -> MeasuredSplit:
    """Test on each user's last event, validate on the one before; users with fewer than three events only train."""
    rows, offsets = interactions.by_user()
    ends = offsets[1:][np.diff(offsets) >= 3]
    test_rows, valid_rows = np.sort(rows[ends - 1]), np.sort(rows[ends - 2])
    refit_rows = np.setdiff1d(np.arange(len(interactions), dtype=np.int64), test_rows, assume_unique=True)
    return MeasuredSplit(
        name=name,
        interactions=interactions,
        train_rows=np.setdiff1d(refit_rows, valid_rows, assume_unique=True),
        valid_rows=valid_rows,
        test_rows=test_rows,
        refit_rows=refit_rows,
    )


def global_time_split(interactions: Interactions, fraction: float = 0.8) -> GlobalTimeSplit:
    """Split at the moment by which `fraction` of the events have happened; all events of that second are held out.

    Raises: ValueError if `fraction` is not inside (0, 1), the data have no timestamps, or all events have one time.
    """
    _require_times(interactions)
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction={fraction}; allowed: between 0 and 1, both excluded")
    if len(interactions) < 2:
        raise ValueError(f"{interactions.name} has {len(interactions)} events; a time split needs at least 2")
    times = interactions.timestamps
    boundary = _first_of_second(interactions, fraction)
    if boundary == 0:
        # The first second has more events than the training part, so the split comes after it.
        boundary = int(np.searchsorted(times, times[0], side="right"))
        if boundary == len(times):
            raise ValueError(f"every event of {interactions.name} has the time {times[0]}; it can't be split")
    return GlobalTimeSplit(
        train=interactions.select(slice(0, boundary)),
        held_out=interactions.select(slice(boundary, len(times))),
        split_time=int(times[boundary]),
    )


def time_split(interactions: Interactions, *, max_events: int = MAX_PREDICTED_EVENTS) -> MeasuredSplit:
    """Train before t1, validate in [t1, t2), test from t2 on; t1 and t2 cut the events 80 : 10 : 10.

    Events of one second stay together. Validation and test each predict up to `max_events` evenly spread events whose
    users have an earlier event.
    Raises: ValueError if `max_events` is below 1, if there are no timestamps, or if a part has no event to predict.
    """
    _require_times(interactions)
    if max_events < 1:
        raise ValueError(f"max_events={max_events}; allowed: 1 and more")
    valid_start = _first_of_second(interactions, 0.8)
    test_start = _first_of_second(interactions, 0.9)
    predictable = ~_first_events(interactions)
    parts = {}
    for part, begin, end in (("validation", valid_start, test_start), ("test", test_start, len(interactions))):
        candidates = (begin + np.flatnonzero(predictable[begin:end])).astype(np.int64)
        if valid_start == 0 or not len(candidates):
            raise ValueError(
                f"{interactions.name} ({len(interactions)} events) leaves no training or no {part} event to predict"
            )
        parts[part] = _evenly(candidates, max_events)
    return MeasuredSplit(
        name="global time",
        interactions=interactions,
        train_rows=np.arange(valid_start, dtype=np.int64),
        valid_rows=parts["validation"],
        test_rows=parts["test"],
        refit_rows=np.arange(test_start, dtype=np.int64),
    )


SPLITS: dict[str, Callable[[Interactions], MeasuredSplit]] = {
    "leave-one-out": leave_one_out_split,
    "leave-one-out, reversed ties": lambda interactions: leave_one_out_split(
        reverse_ties(interactions), "leave-one-out, reversed ties"
    ),
    "global time": time_split,
}


def reverse_ties(interactions: Interactions) -> Interactions:
    """Return the events with the order inside each second reversed. Raises: ValueError without times."""
    if not interactions.has_times:
        raise ValueError(f"{interactions.name} has no timestamps, so no ties")
    latest_first = -np.arange(len(interactions))
    return interactions.select(np.lexsort((latest_first, interactions.timestamps)))


def _require_times(interactions: Interactions) -> None:
    if not interactions.has_times:
        raise ValueError(f"{interactions.name} has no timestamps; allowed: leave-one-out")


def _first_of_second(interactions: Interactions, share: float) -> int:
    times = interactions.timestamps
    if not len(times):
        return 0
    boundary = times[min(int(len(times) * share), len(times) - 1)]
    return int(np.searchsorted(times, boundary, side="left"))


def _first_events(interactions: Interactions) -> npt.NDArray[np.bool_]:
    rows, offsets = interactions.by_user()
    first = np.zeros(len(interactions), dtype=bool)
    first[rows[offsets[:-1][np.diff(offsets) > 0]]] = True
    return first


def _evenly(rows: RowArray, count: int) -> RowArray:
    """Return the middle row of each of `count` equal stretches, or all rows if there are at most `count`."""
    if len(rows) <= count:
        return rows
    middles = (2 * np.arange(count, dtype=np.int64) + 1) * len(rows) // (2 * count)
    return rows[middles]

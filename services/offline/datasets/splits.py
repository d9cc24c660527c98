"""Past and future: the two splits that sequential recommendation is judged by.

Leave-one-out holds out each user's last event (test) and last but one (validation); the global time split holds out
everything after one moment, which is what a stream looks like. Both keep all vocabularies, so codes stay comparable.
It does not know how anything is scored.
"""

from dataclasses import dataclass

import numpy as np

from .interactions import Interactions, RowArray


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOneOut:
    """Row numbers into `interactions`, increasing. Users with fewer than three events are in train alone."""

    interactions: Interactions
    train_rows: RowArray
    valid_rows: RowArray
    test_rows: RowArray

    @property
    def train(self) -> Interactions:
        return self.interactions.select(self.train_rows)

    @property
    def valid(self) -> Interactions:
        return self.interactions.select(self.valid_rows)

    @property
    def test(self) -> Interactions:
        return self.interactions.select(self.test_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTimeSplit:
    """Everything before `split_time` (unix seconds), and everything from it on."""

    train: Interactions
    held_out: Interactions
    split_time: int


def leave_one_out(interactions: Interactions) -> LeaveOneOut:
    """Hold out each user's last event as test and the one before as validation."""
    rows, offsets = interactions.by_user()
    ends = offsets[1:][np.diff(offsets) >= 3]
    test_rows, valid_rows = np.sort(rows[ends - 1]), np.sort(rows[ends - 2])
    in_train = np.ones(len(interactions), dtype=bool)
    in_train[test_rows] = False
    in_train[valid_rows] = False
    return LeaveOneOut(
        interactions=interactions,
        train_rows=np.flatnonzero(in_train).astype(np.int64),
        valid_rows=valid_rows,
        test_rows=test_rows,
    )


def require_times(interactions: Interactions) -> None:
    """Raises: ValueError, with the name of the data, when only the order inside each user is known."""
    if not interactions.has_times:
        raise ValueError(f"{interactions.name} has no timestamps; allowed: leave-one-out")


def global_time_split(interactions: Interactions, fraction: float = 0.8) -> GlobalTimeSplit:
    """Split at the moment by which `fraction` of the events have happened.

    Events of the boundary's own second all fall into the held-out part, so no second lies on both sides.
    Raises: ValueError when `fraction` is not inside (0, 1), the data have no timestamps, or all events carry one time
    so that one side is empty.
    """
    require_times(interactions)
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction={fraction}; allowed: between 0 and 1, both excluded")
    if len(interactions) < 2:
        raise ValueError(f"{interactions.name} has {len(interactions)} events; a time split needs at least 2")
    times = interactions.timestamps
    split_time = int(times[min(int(len(times) * fraction), len(times) - 1)])
    boundary = int(np.searchsorted(times, split_time, side="left"))
    if boundary == 0:
        # The first second is larger than the wished part: split after it instead.
        boundary = int(np.searchsorted(times, split_time, side="right"))
        if boundary == len(times):
            raise ValueError(f"every event of {interactions.name} has the time {split_time}; it can't be split")
        split_time = int(times[boundary])
    return GlobalTimeSplit(
        train=interactions.select(slice(0, boundary)),
        held_out=interactions.select(slice(boundary, len(times))),
        split_time=split_time,
    )

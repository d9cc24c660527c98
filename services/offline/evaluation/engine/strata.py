"""Ranked events by the item's popularity, the history's length, the time since the last event, and the user.

Letters: E events.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.offline.datasets import MeasuredSplit
from services.offline.evaluation.engine.ranked_events import RankedEvents
from services.offline.training.sequences import Histories

Mask = npt.NDArray[np.bool_]

_HOUR_S, _DAY_S = 3600, 86400


def strata(split: MeasuredSplit, ranked: RankedEvents) -> Iterator[tuple[str, str, Mask]]:
    """Yield (question, stratum, mask (E,)) of every stratum that has an event.

    Popularity is the target's number of training events. Events at most an hour apart are one sitting. A new user has
    no training event. Without times, there are no strata by time.
    """
    histories = Histories.of(split.interactions)
    train = split.train
    target = histories.items[ranked.events]
    count = train.item_counts()[target]
    before = ranked.events - histories.offsets[ranked.users]
    groups: list[tuple[str, str, Mask]] = [
        ("target's training events", "none", count == 0),
        ("target's training events", "1 to 9", (count > 0) & (count < 10)),
        ("target's training events", "10 to 99", (count >= 10) & (count < 100)),
        ("target's training events", "100 or more", count >= 100),
        ("history", "fewer than 10 events", before < 10),
        ("history", "10 to 49", (before >= 10) & (before < 50)),
        ("history", "50 or more", before >= 50),
    ]
    if split.interactions.has_times:
        gap = histories.times[ranked.events] - histories.times[ranked.events - 1]
        groups += [
            ("time since the last event", "same sitting (within an hour)", gap <= _HOUR_S),
            ("time since the last event", "within a day", (gap > _HOUR_S) & (gap < _DAY_S)),
            ("time since the last event", "a day or more", gap >= _DAY_S),
        ]
    known = train.user_counts()[ranked.users] > 0
    if not known.all():
        groups += [("user", "in training", known), ("user", "new", ~known)]
    yield from ((question, name, mask) for question, name, mask in groups if mask.any())

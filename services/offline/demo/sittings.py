"""Group predicted events by the time since the user's previous event: same sitting, same day or a later day.

In MovieLens-1M nine of ten predicted events follow the user's previous event within an hour; a state frozen at the
split lacks that previous event. Times are the data set's, not the replay's.

Letters: M predictions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.datasets import Interactions
from services.offline.demo.plan import ReplayEvent, hit_rate

SITTING_MINUTES = 60
_DAY_S = 86_400

SAME_SITTING = "same_sitting"
SAME_DAY = "later_the_same_day"
LATER_DAY = "later_day"
FIRST = "first_event"
KINDS = (SAME_SITTING, SAME_DAY, LATER_DAY, FIRST)

DEFINITION = (
    f"same_sitting: less than {SITTING_MINUTES} minutes after the user's previous event, by the events' own times (the "
    "previous event may lie before the split); later_day: after that, and on a later UTC day; later_the_same_day: "
    "after that, and on the same UTC day; first_event: nothing is known of the user before it"
)


def kind_of(time_s: int, previous_s: int | None) -> str:
    """Return one of KINDS for an event at `time_s` (unix seconds)."""
    if previous_s is None:
        return FIRST
    if time_s - previous_s < 60 * SITTING_MINUTES:
        return SAME_SITTING
    return LATER_DAY if time_s // _DAY_S > previous_s // _DAY_S else SAME_DAY


def last_times(train: Interactions) -> dict[str, int]:
    """Return unix seconds of each user's last event; users without an event are omitted."""
    last = np.full(train.num_users, -1, dtype=np.int64)
    np.maximum.at(last, train.users, train.timestamps)
    return {train.user_ids[code]: int(last[code]) for code in np.flatnonzero(train.user_counts()).tolist()}


def kinds_of_predictions(events: Sequence[ReplayEvent], last_before: Mapping[str, int]) -> npt.NDArray[np.str_]:
    """Return the kind (M,) of each predicted event; `events` in sending order, `last_before` from `last_times`."""
    last = dict(last_before)
    found = []
    for event in events:
        if event.predicted:
            found.append(kind_of(event.time_s, last.get(event.user_id)))
        last[event.user_id] = event.time_s
    return np.array(found, dtype=np.str_)


def hit_rates_by_kind(
    kinds: npt.NDArray[np.str_], hit: Mapping[str, npt.NDArray[np.bool_]]
) -> dict[str, dict[str, Any]]:
    """Return, for each of KINDS, its number of `events` and every contender's hit rate."""
    return {
        kind: {"events": int((kinds == kind).sum())}
        | {name: hit_rate(values[kinds == kind]) for name, values in hit.items()}
        for kind in KINDS
    }

"""Rates of rankers over a stream by kind of event, with intervals clustered by item.

Events of one item are correlated, so the bootstrap draws items, each with its events of all seeds.

Letters: N predicted events (of all seeds together), X items.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.offline.evaluation.engine import intervals
from services.offline.evaluation.engine.intervals import Interval
from services.offline.evaluation.stream.walk import BoolArray, IntArray, StreamSetting

_NO_END = 10**9
# A new item's age: its number of interactions, including the predicted one.
_AGES = ((1, 2), (3, 5), (6, 10), (11, 30), (31, _NO_END))

METRICS = ("hr@10", "hr@50", "mrr")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventColumns:
    """Properties of each predicted event that use no later event; arrays are (N,).

    places: positions in the stream. nth: number of the item's streamed interactions so far, with this one. past_events,
    past_of_user: numbers of the item's and of the user's events before the split. predictable: whether the user has a
    state; other events are not counted.
    """

    items: IntArray
    places: IntArray
    nth: IntArray
    past_events: IntArray
    past_of_user: IntArray
    predictable: BoolArray


def columns(setting: StreamSetting, places: IntArray, predictable: BoolArray) -> EventColumns:
    """Return columns of the events at these places of the stream."""
    events, split = setting.interactions, setting.split
    streamed = events.items[split:].astype(np.int64)
    items, users = streamed[places], events.users[split:][places]
    return EventColumns(
        items=items,
        places=places,
        nth=_running_count(streamed)[places] + 1,
        past_events=np.bincount(events.items[:split], minlength=events.num_items)[items].astype(np.int64),
        past_of_user=np.bincount(events.users[:split], minlength=events.num_users)[users].astype(np.int64),
        predictable=predictable,
    )


def joined(parts: list[EventColumns]) -> EventColumns:
    """Return several seeds' columns, one after the other."""
    names = EventColumns.__dataclass_fields__
    return EventColumns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def kinds(table: EventColumns) -> dict[str, BoolArray]:
    """Return kind of event -> mask (N,): all, by a new item's age, and by whether training had the item or user."""
    every = table.predictable
    known = every & (table.past_events > 0)
    new = every & (table.past_events == 0)
    found = {
        "all": every,
        "new items, from their 3rd interaction": new & (table.nth >= 3),
        "new items": new,
        "items of the training": known,
        "users of the training": every & (table.past_of_user > 0),
        "users new in the stream": every & (table.past_of_user == 0),
        "new items and new users, from the 3rd": new & (table.nth >= 3) & (table.past_of_user == 0),
    }
    for low, high in _AGES:
        label = f"{low}-{high}" if high < _NO_END else f"{low} and later"
        found[f"new item's interaction {label}"] = new & (table.nth >= low) & (table.nth <= high)
    return found


def estimates(
    table: EventColumns, ranks: Mapping[str, IntArray], mask: BoolArray, *, minus: str | None = None, seed: int = 0
) -> dict[str, dict[str, Interval]]:
    """Return estimates by ranker and metric, or differences from `minus`; empty without an event."""
    kept = {name: found[mask] for name, found in ranks.items()}
    return intervals.estimates(kept, table.items[mask], METRICS, minus=minus, seed=seed)


def _running_count(items: IntArray) -> IntArray:
    order = np.argsort(items, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(items[order]) != 0]))
    within = np.arange(len(items)) - np.repeat(starts, np.diff(np.concatenate([starts, [len(items)]])))
    counts = np.empty(len(items), dtype=np.int64)
    counts[order] = within
    return counts

"""Select the events of a file that a bundle was not trained on.

A fingerprint recognises training data. It is split as in training, and its held-out events are predicted. In other
data, the events after the newest training event are predicted, and earlier events are only history.

Letters: N events, X items.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle
from services.offline.datasets import (
    Interactions,
    MeasuredSplit,
    TableOptions,
    global_time_split,
    leave_one_out_split,
    read_data,
)
from services.offline.evaluation.engine.ranked_events import counting, evenly
from services.offline.training.fit import LEAVE_ONE_OUT, TIME
from services.offline.training.sequences import IntArray

# At most this many events are predicted, evenly spread over the predictable ones.
MAX_EVENTS = 6_000

Data = str | Path | Interactions
_AS_USUAL = TableOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """split: the bundle's items come first, and `test_rows` are predicted. note: explains how they were selected."""

    split: MeasuredSplit
    note: str


def judged_by(
    bundles: Sequence[Bundle],
    data: Data,
    *,
    table: TableOptions = _AS_USUAL,
    say: Callable[[str], None] = lambda _: None,
) -> Judged:
    """Return positive events that no bundle was trained on. The bundles have one catalogue and one event schema.

    `table`: how to read a table. `say` gets its columns' roles and findings.
    Raises: ValueError without an event that is known to be outside the training, or if no such event is positive.
    """
    first = bundles[0]
    schema = first.event_schema
    if isinstance(data, Interactions):
        given = data
    else:
        reading = read_data(data, schema=schema, table=table)
        for line in reading.summary:
            say(line)
        given = reading.accepted()
    parts = [_part(one, given) for one in bundles]
    seen = given.seen(schema)
    events = _over_catalogue(given.select(seen), first)
    held_out = [np.searchsorted(seen, rows) for _, rows, _ in parts]
    # Intersect the fewest rows first.
    rows = held_out[int(np.argmin([len(one) for one in held_out]))]
    for one in held_out:
        rows = np.intersect1d(rows, one, assume_unique=True)
    note = " ".join(dict.fromkeys(text for _, _, text in parts))
    counted = counting(events, rows, schema)
    if not len(counted):
        names = ", ".join(events.type_names[:10])
        raise ValueError(
            f"{given.name}: none of the {len(rows):,} events to predict counts by the event schema (types: {names}); "
            f"allowed: at least one that somebody took. {note}"
        )
    learnt = np.searchsorted(seen, parts[0][0])
    return Judged(
        split=MeasuredSplit(
            name="not learnt",
            interactions=events,
            train_rows=learnt,
            valid_rows=rows[:0],
            test_rows=evenly(counted, MAX_EVENTS),
            refit_rows=learnt,
        ),
        note=note,
    )


def _part(bundle: Bundle, given: Interactions) -> tuple[IntArray, IntArray, str]:
    trained_on = bundle.manifest.data
    read = _rows_read(bundle, given)
    divided = _as_trained(trained_on, given.select(read))
    if divided is not None:
        learnt, held_out, what = divided
        return read[learnt], read[held_out], f"{given.name} is what model {bundle.model_version} was trained on: {what}"
    newest = trained_on.get("newest_time")
    if newest is None or not given.has_times:
        why = "has no times by the clock" if newest is not None else "the model does not record its newest event's time"
        raise ValueError(
            f"{given.name} is not the data that model {bundle.model_version} was trained on, and {why}; allowed: that "
            "data, where it was trained with --split leave-one-out or time, or data with times and a model that "
            "records its newest event's time"
        )
    first = int(np.searchsorted(given.timestamps, newest, side="right"))
    learnt, rest = read[: np.searchsorted(read, first)], np.arange(first, len(given), dtype=np.int64)
    if not len(rest):
        raise ValueError(
            f"all {len(given):,} events of {given.name} (the newest at {utc(given.timestamps[-1])}) overlap the "
            f"training data: model {bundle.model_version} has learnt up to {utc(newest)}; allowed: newer events, or "
            "the data that it was trained on, where it was trained with --split leave-one-out or time"
        )
    overlap = f"{first:,} earlier events may have been learnt and are history alone." if first else ""
    return (
        learnt,
        rest,
        f"Model {bundle.model_version} has learnt up to {utc(newest)}: judged by the events from "
        f"{utc(given.timestamps[first])} on. {overlap}".rstrip(),
    )


def _rows_read(bundle: Bundle, given: Interactions) -> IntArray:
    numbered = replace(given, timestamps=np.arange(len(given), dtype=np.int64))
    names = bundle.encoder.actions
    read = numbered.with_actions(bundle.event_schema, names)[0] if names else numbered.encoded(bundle.event_schema)
    return read.timestamps


def _as_trained(trained_on: dict[str, Any], read: Interactions) -> tuple[IntArray, IntArray, str] | None:
    """Return None if the bundle was trained on other data."""
    if trained_on.get("split") == LEAVE_ONE_OUT:
        parts = leave_one_out_split(read)
        learnt, held_out, what = parts.refit_rows, parts.test_rows, "judged by each user's last event."
    elif trained_on.get("split") == TIME and read.has_times:
        end = int(np.searchsorted(read.timestamps, global_time_split(read).split_time))
        learnt, held_out = np.arange(end, dtype=np.int64), np.arange(end, len(read), dtype=np.int64)
        what = f"judged by the last fifth of it, from {utc(read.timestamps[end])} on."
    else:
        return None
    return (learnt, held_out, what) if read.select(learnt).fingerprint() == trained_on.get("fingerprint") else None


def _over_catalogue(data: Interactions, bundle: Bundle) -> Interactions:
    """Put all of the bundle's items first, even if the data lacks them, because all items are ranked."""
    rows = [bundle.item_index.get(item_id, -1) for item_id in data.item_ids]
    new = [number for number, row in enumerate(rows) if row < 0]
    for place, number in enumerate(new, bundle.num_items):
        rows[number] = place
    return replace(
        data,
        items=np.array(rows, dtype=np.int32)[data.items],
        item_ids=[*bundle.item_ids, *(data.item_ids[number] for number in new)],
        titles=[*bundle.titles, *(data.titles[number] for number in new)],
        categories=[*map(tuple, bundle.categories), *(data.categories[number] for number in new)],
    )


def utc(seconds: Any) -> str:
    """Return a Unix time in words."""
    return f"{datetime.fromtimestamp(int(seconds), UTC):%Y-%m-%d %H:%M:%S} UTC"

"""Predict every streamed event from the events before it, and only then learn from it.

Batches are for speed alone: a ranker scores an event as if the earlier ones of its batch had been learnt. Seen items
are excluded for all rankers alike; a target without a score is missed.

Letters: B events of a batch, C of them predicted, N events predicted in all, X items of the whole vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.offline.datasets import Interactions, global_time_split
from services.offline.evaluation.engine.metrics import target_ranks

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSetting:
    """All events, oldest first; rows from `split` on are streamed.

    Shapes: withheld (X,), items drawn to have no event before the split; known (X,), items with one.
    """

    interactions: Interactions
    split: int
    withheld: BoolArray
    known: BoolArray

    @property
    def num_streamed(self) -> int:
        """Events to predict."""
        return len(self.interactions) - self.split

    @property
    def new_items(self) -> BoolArray:
        """Return the items (X,) that occur in the stream and not before it."""
        streamed = np.bincount(self.interactions.items[self.split :], minlength=self.interactions.num_items) > 0
        return streamed & ~self.known


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPart:
    """Training data at some moment, with the vocabularies of its events.

    Shapes: item_rows (X,) and user_rows (U,) map codes of the whole vocabulary to this part's, -1 for none.
    """

    interactions: Interactions
    item_rows: IntArray
    user_rows: IntArray


def stream_setting(
    interactions: Interactions, *, seed: int, withheld_share: float = 0.1, stream_share: float = 0.2
) -> StreamSetting:
    """Withhold `withheld_share` of the items from the first 1 - `stream_share` of the events.

    Raises: ValueError for shares outside [0, 1) and (0, 1), or if nothing is left to train on.
    """
    if not 0 <= withheld_share < 1:
        raise ValueError(f"withheld_share={withheld_share}; allowed: 0 to below 1")
    divided = global_time_split(interactions, 1 - stream_share)
    boundary = len(divided.train)
    withheld = np.zeros(interactions.num_items, dtype=bool)
    drawn = np.random.default_rng(seed).permutation(interactions.num_items)
    withheld[drawn[: round(withheld_share * interactions.num_items)]] = True
    happened = ~withheld[interactions.items]
    happened[boundary:] = True
    split = int(happened[:boundary].sum())
    if not split:
        raise ValueError(f"{interactions.name}: no event before the split is left; withheld_share={withheld_share}")
    kept = interactions.select(happened)
    known = np.bincount(kept.items[:split], minlength=interactions.num_items) > 0
    return StreamSetting(interactions=kept, split=split, withheld=withheld, known=known)


def training_part(interactions: Interactions, end: int) -> TrainingPart:
    """Return the first `end` events as training data with their own vocabularies."""
    past = interactions.select(slice(0, end))
    return TrainingPart(
        interactions=past.keep_frequent(), item_rows=_rows(past.item_counts()), user_rows=_rows(past.user_counts())
    )


def _rows(counts: IntArray) -> IntArray:
    present = counts > 0
    return np.where(present, np.cumsum(present) - 1, -1).astype(np.int64)


Scores = npt.NDArray[np.floating]
BATCH_EVENTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class EventBatch:
    """Streamed events in order.

    Shapes: places (B,), counted from the split; chosen (C,), rows to predict; excluded (C, X), items that these events'
    users have seen.
    """

    places: IntArray
    users: IntArray
    items: IntArray
    times: IntArray
    values: npt.NDArray[np.float32]
    chosen: IntArray
    excluded: BoolArray

    def __len__(self) -> int:
        return len(self.users)


class Ranker(Protocol):
    """Ranks items for a user's next event."""

    def step(self, batch: EventBatch) -> Mapping[str, Scores]:
        """Return scores (C, X) by name, -inf for items that it cannot answer with; then learn the whole batch.

        Each row is scored from the events before its event. Variants that share work return one entry each.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Walked:
    """Places (N,) of the predicted events, and each ranker's 0-based ranks (N,), X for a miss."""

    places: IntArray
    ranks: dict[str, IntArray]


def walk(
    setting: StreamSetting,
    rankers: Sequence[Ranker],
    *,
    predicted: BoolArray | None = None,
    batch_events: int = BATCH_EVENTS,
    progress: Callable[[int], None] = lambda done: None,
) -> Walked:
    """Predict the streamed events in `predicted` (N,), by default all; learn from all.

    Raises: ValueError if two rankers share a name.
    """
    predicted = np.ones(setting.num_streamed, dtype=bool) if predicted is None else predicted
    places: list[IntArray] = []
    ranks: dict[str, list[IntArray]] = {}
    for batch in _batches(setting, batch_events, predicted):
        targets = batch.items[batch.chosen]
        found: dict[str, Scores] = {}
        for ranker in rankers:
            for name, scores in ranker.step(batch).items():
                if name in found:
                    raise ValueError(f"ranker {name!r} appears twice; names must differ")
                found[name] = scores
                ranks.setdefault(name, []).append(ranks_of(scores, targets, batch.excluded))
        places.append(batch.places[batch.chosen])
        progress(int(batch.places[-1]) + 1)
    return Walked(places=np.concatenate(places), ranks={name: np.concatenate(parts) for name, parts in ranks.items()})


def _batches(setting: StreamSetting, batch_events: int, predicted: BoolArray) -> Iterator[EventBatch]:
    events = setting.interactions
    rows, offsets = events.select(slice(0, setting.split)).by_user()
    past = np.split(events.items[: setting.split][rows], offsets[1:-1])
    had = {int(user): past[user].tolist() for user in np.unique(events.users[setting.split :])}
    for first in range(0, setting.num_streamed, batch_events):
        places = np.arange(first, min(first + batch_events, setting.num_streamed))
        rows = setting.split + places
        users, items = events.users[rows].astype(np.int64), events.items[rows].astype(np.int64)
        chosen = np.flatnonzero(predicted[places])
        excluded = np.zeros((len(chosen), events.num_items), dtype=bool)
        row_of = {place: row for row, place in enumerate(chosen.tolist())}
        for place, (user, item) in enumerate(zip(users.tolist(), items.tolist(), strict=True)):
            if place in row_of:
                excluded[row_of[place], had[user]] = True
            had[user].append(item)
        yield EventBatch(
            places=places,
            users=users,
            items=items,
            times=events.timestamps[rows].astype(np.int64),
            values=events.values[rows],
            chosen=chosen,
            excluded=excluded,
        )


def ranks_of(scores: Scores, targets: IntArray, excluded: BoolArray) -> IntArray:
    """Return 0-based ranks (C,); X for a target that scores -inf or is excluded."""
    ranks, rows = target_ranks(scores, targets, excluded), np.arange(len(targets))
    missed = np.isneginf(scores[rows, targets]) | excluded[rows, targets]
    return np.where(missed, scores.shape[1], ranks)

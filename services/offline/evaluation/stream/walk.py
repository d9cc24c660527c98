"""Predict every streamed event from the events before it, and only then learn from it.

Seen items are excluded for all rankers. A target is a miss if it has no score or the user has seen it.

Letters: N predicted events, X items of the whole vocabulary, U users.
"""

from collections.abc import Callable, Mapping, Sequence
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

    Shapes: withheld (X,), items drawn to have no event before the split; known (X,), items with such an event.
    """

    interactions: Interactions
    split: int
    withheld: BoolArray
    known: BoolArray

    @property
    def num_streamed(self) -> int:
        """Number of streamed events."""
        return len(self.interactions) - self.split

    @property
    def new_items(self) -> BoolArray:
        """Return the items (X,) that occur in the stream and not before it."""
        streamed = np.bincount(self.interactions.items[self.split :], minlength=self.interactions.num_items) > 0
        return streamed & ~self.known


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPart:
    """Training data at some moment, with the vocabularies of its events.

    Shapes: item_rows (X,) and user_rows (U,) map codes of the whole vocabulary to this part's codes; -1
    if the part has none.
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
_PROGRESS_EVERY = 256


@dataclass(frozen=True, slots=True)
class Event:
    """A streamed event: its position after the split, user and item codes, and the items that the user had before."""

    place: int
    user: int
    item: int
    had: Sequence[int]


class Ranker(Protocol):
    """Ranks items for a user's next event."""

    def scores(self, event: Event) -> Mapping[str, Scores]:
        """Return scores (X,) by name from earlier events alone, -inf for items that it cannot answer with.

        Variants that share work return one entry each.
        """

    def learn(self, event: Event) -> None:
        """Learn the event; called after its prediction."""


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
    progress: Callable[[int], None] = lambda done: None,
) -> Walked:
    """Predict the streamed events in `predicted` (N,), by default all; learn from all.

    Raises: ValueError if two rankers share a name.
    """
    events, split = setting.interactions, setting.split
    rows, offsets = events.select(slice(0, split)).by_user()
    past = np.split(events.items[:split][rows], offsets[1:-1])
    had = {user: past[user].tolist() for user in np.unique(events.users[split:]).tolist()}
    places: list[int] = []
    ranks: dict[str, list[int]] = {}
    for place, (user, item) in enumerate(
        zip(events.users[split:].tolist(), events.items[split:].tolist(), strict=True)
    ):
        event = Event(place, user, item, had[user])
        if predicted is None or predicted[place]:
            places.append(place)
            for name, scores in (one for ranker in rankers for one in ranker.scores(event).items()):
                own = ranks.setdefault(name, [])
                if len(own) == len(places):
                    raise ValueError(f"ranker {name!r} appears twice; names must differ")
                own.append(_rank(scores, event))
        for ranker in rankers:
            ranker.learn(event)
        had[user].append(item)
        if (place + 1) % _PROGRESS_EVERY == 0:
            progress(place + 1)
    progress(setting.num_streamed)
    return Walked(places=np.array(places), ranks={name: np.array(found) for name, found in ranks.items()})


def _rank(scores: Scores, event: Event) -> int:
    if np.isneginf(scores[event.item]) or event.item in event.had:
        return len(scores)
    excluded = np.zeros((1, len(scores)), dtype=bool)
    excluded[0, event.had] = True
    return int(target_ranks(scores[None], np.array([event.item]), excluded)[0])

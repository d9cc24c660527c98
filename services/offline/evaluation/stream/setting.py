"""A stream to walk through: what training may see, what is withheld from it, and what comes afterwards, in order.

The first part of time is for training, the rest is streamed. A share of the catalogue, drawn at random, is withheld:
its earlier events never happened, so those items arrive in the stream as new ones do, known to nobody. It knows nothing
of models or scores.

Letters: N events, X items of the whole vocabulary, U users.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.offline.datasets import Interactions, global_time_split

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSetting:
    """`interactions`: every event that happened, oldest first; rows from `split` on are streamed.

    Shapes: withheld (X,) drawn to be withheld; known (X,) items with an event before the split.
    """

    interactions: Interactions
    split: int
    withheld: BoolArray
    known: BoolArray

    @property
    def num_streamed(self) -> int:
        """Events to predict, one after the other."""
        return len(self.interactions) - self.split

    @property
    def new_items(self) -> BoolArray:
        """Items that occur in the stream and not before it (X,): the withheld ones, and those that time brought."""
        streamed = np.bincount(self.interactions.items[self.split :], minlength=self.interactions.num_items) > 0
        return streamed & ~self.known


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPart:
    """What a training at some moment sees: vocabularies of what has occurred by then.

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


def before_the_stream(setting: StreamSetting) -> Interactions:
    """The training part alone, with the withheld items' events: what policies are chosen on, by walking its own end."""
    return setting.interactions.select(slice(0, setting.split))


def training_part(interactions: Interactions, end: int) -> TrainingPart:
    """The first `end` events as training data of their own."""
    past = interactions.select(slice(0, end))
    return TrainingPart(
        interactions=past.keep_frequent(), item_rows=_rows(past.item_counts()), user_rows=_rows(past.user_counts())
    )


def _rows(counts: IntArray) -> IntArray:
    present = counts > 0
    return np.where(present, np.cumsum(present) - 1, -1).astype(np.int64)

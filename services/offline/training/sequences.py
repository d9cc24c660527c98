"""Histories as training batches, with little padding.

Each epoch cuts histories into windows on the grid of the window rule (multiples of max_history / 4, at a new offset
per epoch); each event but a user's first is predicted once. (seed, epoch) determines everything, so training can
resume at any batch. Row 0, for unknown actions, replaces a tenth of the inputs' actions.

Letters: B windows in a batch, L longest window in it, N positions to predict.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.encoding.actions import STRIDE
from services.algorithms.encoding.history import window_start
from services.offline.datasets import Interactions
from services.offline.training.models.sequential import PADDING

IntArray = npt.NDArray[np.int64]

# Probability that an action is replaced by row 0.
_NO_ACTION = 0.1

# So many batches are sorted by length together: enough for little padding, few enough to mix lengths.
_BATCHES_PER_POOL = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Histories:
    """Every user's events, oldest first: user u's are [offsets[u], offsets[u + 1]).

    actions, outcomes (N,): see `Interactions`; or None.
    """

    items: IntArray
    times: IntArray
    offsets: IntArray
    actions: IntArray | None = None
    outcomes: IntArray | None = None

    @classmethod
    def of(cls, interactions: Interactions) -> "Histories":
        rows, offsets = interactions.by_user()
        return cls(
            items=interactions.items[rows].astype(np.int64),
            times=interactions.timestamps[rows].astype(np.int64),
            offsets=offsets.astype(np.int64),
            actions=None if interactions.actions is None else interactions.actions[rows].astype(np.int64),
            outcomes=None if interactions.outcomes is None else interactions.outcomes[rows].astype(np.int64),
        )

    def read(self, rows: IntArray) -> IntArray:
        """Return the encoder's input: items and actions as one number."""
        return self.items[rows] if self.actions is None else self.items[rows] + self.actions[rows] * STRIDE

    def gaps(self, rows: IntArray) -> IntArray:
        """Return seconds from the user's previous event to each of these."""
        return self.times[rows] - self.times[rows - 1]

    @property
    def num_positions(self) -> int:
        """Return the number of events to predict in one epoch: all but each user's first."""
        lengths = np.diff(self.offsets)
        return int((lengths - 1).clip(min=0).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One batch. Shapes: items (as `Histories.read`), times (B, L), left-aligned, items -1 beyond a window's end; users
    (B,); positions (N,), flat indices into (B, L) in random order; targets (N,), the next items; gaps (N,), seconds
    until the next event; outcomes (N,) of the next event, or None.
    """

    items: IntArray
    times: IntArray
    users: IntArray
    positions: IntArray
    targets: IntArray
    gaps: IntArray
    outcomes: IntArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedWindows:
    """Padded windows. items (B, L) as `Histories.read`, -1 beyond a window's end; times (B, L), where the last time
    is repeated; lengths (B,).
    """

    items: IntArray
    times: IntArray
    lengths: IntArray


def windows_before(histories: Histories, events: IntArray, users: IntArray, max_history: int) -> PaddedWindows:
    """Return the encoder's input before the positions `events` of users' histories, by the window rule.

    Every position must have an event before it; a user's end, offsets[u + 1], is allowed.
    """
    num_before = events - histories.offsets[users]
    starts = np.array([window_start(int(count), max_history) for count in num_before], dtype=np.int64)
    lengths = num_before - starts
    steps = np.arange(lengths.max())
    rows = (histories.offsets[users] + starts)[:, None] + np.minimum(steps, lengths[:, None] - 1)
    items = np.where(steps < lengths[:, None], histories.read(rows), PADDING)
    return PaddedWindows(items=items, times=histories.times[rows], lengths=lengths)


class EpochBatches:
    """The batches of one epoch, addressable by number."""

    def __init__(
        self,
        histories: Histories,
        *,
        max_history: int,
        batch_sequences: int,
        seed: int,
        epoch: int,
    ) -> None:
        self._histories, self._seed, self._epoch = histories, seed, epoch
        rng = np.random.default_rng([seed, epoch])
        self._starts, self._lengths, self._users = _windows(histories.offsets, max_history, rng)
        self._batches = _batches_by_length(self._lengths, batch_sequences, rng)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        chosen = self._batches[number]
        lengths, longest = self._lengths[chosen], int(self._lengths[chosen].max())
        steps = np.arange(longest)
        present = steps < lengths[:, None]
        # Padding repeats the last event's time, as in serving.
        rows = self._starts[chosen, None] + np.minimum(steps, lengths[:, None] - 1)
        positions = np.flatnonzero(present)
        rng = np.random.default_rng([self._seed, self._epoch, number])
        rng.shuffle(positions)
        items = self._histories.items[rows]
        if self._histories.actions is not None:
            with_action = rng.random(items.shape) >= _NO_ACTION
            items = items + with_action * self._histories.actions[rows] * STRIDE
        following = rows.ravel()[positions] + 1
        return Batch(
            items=np.where(present, items, PADDING),
            times=self._histories.times[rows],
            users=self._users[chosen],
            positions=positions,
            targets=self._histories.items[following],
            gaps=self._histories.gaps(following),
            outcomes=None if self._histories.outcomes is None else self._histories.outcomes[following],
        )


def _windows(offsets: IntArray, max_history: int, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
    """Return starts (rows of `Histories`), numbers of inputs, and users of one epoch's windows.

    The inputs [s, s + m) predict the events [s + 1, s + m].
    """
    predicted = (np.diff(offsets) - 1).clip(min=0)
    users = np.flatnonzero(predicted)
    step = max_history // 4
    # The first window may be short, so that later ones start at any multiple of max_history / 4.
    shift = rng.integers(0, 4, len(users)) * step
    shift[predicted[users] <= max_history] = 0
    counts = -(-(predicted[users] + shift) // max_history)
    owners = np.repeat(np.arange(len(users)), counts)
    number = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = (number * max_history - shift[owners]).clip(min=0)
    end = np.minimum((number + 1) * max_history - shift[owners], predicted[users][owners])
    return offsets[users][owners] + begin, end - begin, users[owners]


def _batches_by_length(lengths: IntArray, batch_sequences: int, rng: np.random.Generator) -> list[IntArray]:
    order = rng.permutation(len(lengths))
    pool = batch_sequences * _BATCHES_PER_POOL
    batches = []
    for begin in range(0, len(order), pool):
        members = order[begin : begin + pool]
        members = members[np.argsort(lengths[members], kind="stable")]
        batches += [members[first : first + batch_sequences] for first in range(0, len(members), batch_sequences)]
    rng.shuffle(batches)
    return batches

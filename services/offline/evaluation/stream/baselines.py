"""Baselines without a model, popularity and item neighbours, that learn from every event of the stream.

They start from the model's training events. Their settings, like PEFA's, are chosen on a held-out period.

Letters: X items.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.stream.walk import Event, IntArray, Scores, StreamSetting


class StreamingPopularity:
    """Scores an item by its interactions so far. A weight halves after `half_life_events` events; None means never."""

    def __init__(self, setting: StreamSetting, *, half_life_events: float | None, name: str = "popularity") -> None:
        past = setting.interactions.items[: setting.split]
        self.name = name
        self._fading = 1.0 if half_life_events is None else 0.5 ** (1.0 / half_life_events)
        weights = self._fading ** np.arange(len(past) - 1, -1, -1, dtype=np.float64)
        counts = np.bincount(past, weights=weights, minlength=setting.interactions.num_items)
        self._counts: npt.NDArray[np.float64] = counts.astype(np.float64)

    def scores(self, event: Event) -> Mapping[str, Scores]:
        return {self.name: np.where(self._counts > 0, self._counts, -np.inf)}

    def learn(self, event: Event) -> None:
        self._counts *= self._fading
        self._counts[event.item] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourSettings:
    """A user's last `window` items vote for items that users had within `window` events of them.

    score(x) = sum over those items y, r events ago, of recency^r * c_xy / (sqrt(n_y) * (n_x + shrink)^damping).
    """

    window: int
    recency: float
    damping: float
    shrink: float


class StreamingItemNeighbours:
    """Item-kNN by co-occurrence. c_xy counts pairs within a user's window; n_x counts events. Memory: 4 X^2 bytes."""

    def __init__(self, setting: StreamSetting, settings: NeighbourSettings, *, name: str = "item-kNN") -> None:
        num_items = setting.interactions.num_items
        self.name, self.settings = name, settings
        self._together = np.zeros((num_items, num_items), dtype=np.float32)
        self._counts = np.zeros(num_items, dtype=np.float32)
        self._weights = settings.recency ** np.arange(settings.window, dtype=np.float32)
        self._recent: dict[int, deque[int]] = {}
        self._learn_past(setting)
        # Cached (n_x + shrink)^damping: computing it for all items would be most of a score's cost.
        self._raised = (self._counts + np.float32(settings.shrink)) ** np.float32(settings.damping)

    def scores(self, event: Event) -> Mapping[str, Scores]:
        found = np.full(len(self._counts), -np.inf, dtype=np.float32)
        known = self._counts > 0
        items = np.fromiter(self._recent.get(event.user, ()), dtype=np.int64)  # newest first
        if not len(items):
            found[known] = self._counts[known] * np.float32(1e-9)
            return {self.name: found}
        weights = self._weights[: len(items)] / np.sqrt(self._counts[items])
        voted = weights @ self._together[items]
        # Popularity orders items that co-occur with none of the user's items.
        found[known] = (voted[known] + 1e-9 * self._counts[known]) / self._raised[known]
        return {self.name: found}

    def learn(self, event: Event) -> None:
        item, recent = event.item, self._recent.setdefault(event.user, deque(maxlen=self.settings.window))
        earlier = np.fromiter(recent, dtype=np.int64)
        # A window has distinct items; repeats would only weaken this baseline.
        self._together[item, earlier] += 1
        self._together[earlier, item] += 1
        self._counts[item] += 1
        one = self._counts[item : item + 1] + np.float32(self.settings.shrink)
        self._raised[item : item + 1] = one ** np.float32(self.settings.damping)
        recent.appendleft(item)

    def _learn_past(self, setting: StreamSetting) -> None:
        past = setting.interactions.select(slice(0, setting.split))
        rows, offsets = past.by_user()
        items = past.items[rows].astype(np.int64)
        users = past.users[rows]
        flat = self._together.reshape(-1)
        for distance in range(1, self.settings.window + 1):
            same = users[distance:] == users[:-distance]
            later, earlier = items[distance:][same], items[:-distance][same]
            np.add.at(flat, later * len(self._counts) + earlier, np.float32(1))
        self._together += self._together.T.copy()
        self._counts += past.item_counts().astype(np.float32)
        for user in np.flatnonzero(np.diff(offsets)).tolist():
            own: IntArray = items[max(offsets[user], offsets[user + 1] - self.settings.window) : offsets[user + 1]]
            self._recent[user] = deque(own[::-1].tolist(), maxlen=self.settings.window)

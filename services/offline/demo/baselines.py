"""Baselines for the streamed recommendations. They are evaluated after the stream, in the events' sending order.

Letters: X items, M predicted events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.scoring.states import QueryStates
from services.offline.datasets import Interactions
from services.offline.demo.plan import ReplayEvent
from services.offline.evaluation.stream.baselines import NeighbourSettings, StreamingItemNeighbours, StreamingPopularity
from services.offline.evaluation.stream.walk import Event, Ranker, Scores, StreamSetting, walk

RECENT_POPULARITY = "recent_popularity"
ITEM_KNN = "item_knn"
# Chosen by HR@10 on the last fifth of MovieLens-1M's training part, replayed by the demo's schedule. This half-life has
# .0610, 20,000 events .0608, 1,000 events .0548, no decay .0633. Item-kNN's settings are the best of about 45: .2992.
HALF_LIFE_EVENTS = 5_000
NEIGHBOURS = NeighbourSettings(window=5, recency=0.8, damping=0.4, shrink=100.0)
# Item-kNN needs 4 X^2 bytes of counts, and twice that while it learns the past, which is 0.8 GB.
MOST_ITEMS = 10_000


class AtTheSplit:
    """A Ranker that learns nothing: "popularity" by training counts, and "frozen_state", the model with the states at
    the split.

    A user without a state at the split gets popular items, as the system would return.
    """

    def __init__(self, bundle: Bundle, frozen: Mapping[str, QueryStates], train: Interactions) -> None:
        from services.algorithms.ops.mol_scores import MolScorer

        row_of = {item_id: row for row, item_id in enumerate(bundle.item_ids)}
        self._rows = np.array([row_of[item_id] for item_id in train.item_ids], dtype=np.int64)
        self._frozen = {code: frozen[user] for code, user in enumerate(train.user_ids) if user in frozen}
        self._scorer = MolScorer(bundle.item_states, bundle.pair_gate) if self._frozen else None
        # On equal counts, the smaller id comes first.
        best_first = np.lexsort((np.array(train.item_ids), -bundle.counts[self._rows]))
        self._popular = np.empty(len(self._rows))
        self._popular[best_first] = -np.arange(len(self._rows), dtype=np.float64)

    def scores(self, event: Event) -> Mapping[str, Scores]:
        own: Scores = self._popular
        if event.user in self._frozen:
            assert self._scorer is not None
            own = self._scorer.scores(self._frozen[event.user])[0][self._rows]
        return {"popularity": self._popular, "frozen_state": own}

    def learn(self, event: Event) -> None:
        pass


def streaming_baselines(setting: StreamSetting) -> list[Ranker]:
    """Return RECENT_POPULARITY, and ITEM_KNN for at most MOST_ITEMS items."""
    found: list[Ranker] = [StreamingPopularity(setting, half_life_events=HALF_LIFE_EVENTS, name=RECENT_POPULARITY)]
    if setting.interactions.num_items <= MOST_ITEMS:
        found.append(StreamingItemNeighbours(setting, NEIGHBOURS, name=ITEM_KNN))
    return found


def baseline_ranks(
    bundle: Bundle, frozen: Mapping[str, QueryStates], train: Interactions, events: Sequence[ReplayEvent]
) -> dict[str, npt.NDArray[np.int64]]:
    """Return the 0-based ranks (M,) of the predicted events' items by baseline; X means unranked.

    train: all events before the split, with the whole data's vocabularies; events: in sending order; frozen: states at
    the split. Cost: about 2 s for 24,000 events on 3,706 items.
    """
    setting = replayed(train, events)
    predicted = np.array([event.predicted for event in events], dtype=np.bool_)
    return walk(setting, [AtTheSplit(bundle, frozen, train), *streaming_baselines(setting)], predicted=predicted).ranks


def replayed(train: Interactions, events: Sequence[ReplayEvent]) -> StreamSetting:
    """Return the past followed by the replay's events in sending order.

    Timestamps are positions, because the replay is not sorted by time.
    """
    users = {user_id: code for code, user_id in enumerate(train.user_ids)}
    items = {item_id: code for code, item_id in enumerate(train.item_ids)}
    of_types = np.zeros(len(events), dtype=np.int16)
    whole = replace(
        train,
        users=np.append(train.users, np.array([users[event.user_id] for event in events], dtype=np.int32)),
        items=np.append(train.items, np.array([items[event.item_id] for event in events], dtype=np.int32)),
        values=np.append(train.values, np.array([event.value for event in events], dtype=np.float32)),
        types=np.append(train.types, of_types),
        timestamps=np.arange(len(train) + len(events), dtype=np.int64),
        has_times=False,
    )
    return StreamSetting(
        interactions=whole,
        split=len(train),
        withheld=np.zeros(train.num_items, dtype=np.bool_),
        known=train.item_counts() > 0,
    )

"""What the model is compared with beside the stream: recent popularity and item-kNN, which learn from every event.

Both start from the training part and are asked at each predicted event, before it happens: nothing later is known to
them. They get the events in the order in which the replay sends them, without any delay, so that they are as strong as
they can be made. Both leave out what the user has had, as the system does.

Letters: C predicted events of a batch, X items of the whole vocabulary.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from services.offline.datasets import Interactions
from services.offline.demo.baselines import seen_before
from services.offline.demo.measurement import HITS_AT
from services.offline.demo.plan import ReplayEvent
from services.offline.evaluation.stream.baselines import NeighbourSettings, StreamingItemNeighbours, StreamingPopularity
from services.offline.evaluation.stream.setting import StreamSetting
from services.offline.evaluation.stream.walk import EventBatch, Ranker

RECENT_POPULARITY = "recent_popularity"
ITEM_KNN = "item_knn"
# Both by HR@10 on the last fifth of MovieLens-1M's training part, replayed by the demo's own schedule. Half-lives:
# .0610 here, .0608 at 20,000, .0548 at 1,000 events (.0633 for ever). Item-kNN: the best of about 45 settings, .2992;
# windows of 10 gave .2965 at best, of 3 .2794.
HALF_LIFE_EVENTS = 5_000
NEIGHBOURS = NeighbourSettings(window=5, recency=0.8, damping=0.4, shrink=100.0)
# Item-kNN counts pairs of items in 4 X^2 bytes, and twice that while it learns the past: 0.8 GB here.
MOST_ITEMS = 10_000
_BATCH_EVENTS = 128


def streaming_answers(
    train: Interactions, events: Sequence[ReplayEvent], past: Mapping[str, set[str]]
) -> dict[str, list[list[str]]]:
    """Top tens of the predicted events, in sending order, by RECENT_POPULARITY and ITEM_KNN.

    `train`: what happened before the split, with the vocabularies of the whole data; `events`: the replay's, in
    sending order; `past`: what each user had before the split. Item-kNN is left out above MOST_ITEMS items.
    Cost: about 2 s for 24,000 events on 3,706 items.
    """
    setting = StreamSetting(
        interactions=train,
        split=len(train),
        withheld=np.zeros(train.num_items, dtype=np.bool_),
        known=train.item_counts() > 0,
    )
    baselines: list[Ranker] = [StreamingPopularity(setting, half_life_events=HALF_LIFE_EVENTS, name=RECENT_POPULARITY)]
    if train.num_items <= MOST_ITEMS:
        baselines.append(StreamingItemNeighbours(setting, NEIGHBOURS, name=ITEM_KNN))
    return walked_answers(train, baselines, events, past)


def walked_answers(
    train: Interactions, baselines: Sequence[Ranker], events: Sequence[ReplayEvent], past: Mapping[str, set[str]]
) -> dict[str, list[list[str]]]:
    """Each baseline's top tens of the predicted events, by the names that it gives."""
    user_codes = {user_id: code for code, user_id in enumerate(train.user_ids)}
    item_codes = {item_id: code for code, item_id in enumerate(train.item_ids)}
    predicted = seen_before(past, events)
    answers: dict[str, list[list[str]]] = {}
    for first in range(0, len(events), _BATCH_EVENTS):
        batch = _batch(events[first : first + _BATCH_EVENTS], first, user_codes, item_codes)
        scored = {name: rows for baseline in baselines for name, rows in baseline.step(batch).items()}
        for row, (_, seen) in enumerate(itertools.islice(predicted, len(batch.chosen))):
            left_out = np.array([item_codes[item] for item in seen if item in item_codes], dtype=np.int64)
            for name, rows in scored.items():
                best = top_rows(rows[row], left_out)
                answers.setdefault(name, []).append([train.item_ids[code] for code in best.tolist()])
    return answers


def top_rows(scores: npt.NDArray[np.floating], had: npt.NDArray[np.int64], *, k: int = HITS_AT) -> npt.NDArray[np.intp]:
    """The k items (at most) with the highest of `scores` (X,), `had` left out; of equals the first ones.

    A score of -inf is no answer.
    """
    left = scores.copy()
    left[had] = -np.inf
    if len(left) > k:
        least = np.partition(left, len(left) - k)[len(left) - k]
        rows = np.flatnonzero((left >= least) & ~np.isneginf(left))
    else:
        rows = np.flatnonzero(~np.isneginf(left))
    return rows[np.argsort(-left[rows], kind="stable")[:k]]


def _batch(
    events: Sequence[ReplayEvent], first: int, user_codes: Mapping[str, int], item_codes: Mapping[str, int]
) -> EventBatch:
    """Some of the replay's events, from position `first` on, as a batch of the walk."""
    chosen = np.flatnonzero([event.predicted for event in events])
    return EventBatch(
        places=np.arange(first, first + len(events)),
        users=np.array([user_codes[event.user_id] for event in events], dtype=np.int64),
        items=np.array([item_codes[event.item_id] for event in events], dtype=np.int64),
        times=np.array([event.time_s for event in events], dtype=np.int64),
        values=np.array([event.value for event in events], dtype=np.float32),
        chosen=chosen,
        # What a user has had is left out of the answers instead: neither baseline reads this.
        excluded=np.zeros((len(chosen), 0), dtype=np.bool_),
    )

"""What the streaming answers are compared with: popularity, and the same model with user states frozen at the split.

Both leave out what the user has had, by the same rule as the system: the training past and every event of the replay
before the predicted one. Both are computed after the stream, so they cost it nothing. What learns from the stream
without a model is below, asked event by event.

Letters: B users, X items, P_q components, d width.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.scoring.states import QueryStates
from services.offline.datasets import Interactions
from services.offline.demo.plan import HITS_AT, ReplayEvent
from services.offline.evaluation.engine.metrics import top_rows
from services.offline.evaluation.stream.baselines import NeighbourSettings, StreamingItemNeighbours, StreamingPopularity
from services.offline.evaluation.stream.walk import EventBatch, Ranker, StreamSetting


def top_k(order: Iterable[str], seen: set[str], *, k: int = HITS_AT) -> list[str]:
    """The first k items of `order` (best first) that are not in `seen`."""
    return list(itertools.islice((item_id for item_id in order if item_id not in seen), k))


def popularity_order(item_ids: Sequence[str], counts: npt.NDArray[np.integer]) -> list[str]:
    """Item ids by training count, most popular first; equal counts by item id."""
    descending = dict(zip(item_ids, (-counts).tolist(), strict=True))
    return sorted(item_ids, key=lambda item_id: (descending[item_id], item_id))


def seen_before(past: Mapping[str, set[str]], events: Sequence[ReplayEvent]) -> Iterator[tuple[ReplayEvent, set[str]]]:
    """Each predicted event with its user's seen items then (one live set: read it at once).

    `past` is what each user had before the split; `events` are the replay's, in sending order.
    """
    seen: dict[str, set[str]] = {}
    for event in events:
        known = seen.setdefault(event.user_id, set())
        if not known:
            known.update(past.get(event.user_id, ()))
        if event.predicted:
            yield event, known
        known.add(event.item_id)


def rankings(bundle: Bundle, states: Mapping[str, QueryStates], *, batch: int = 64) -> dict[str, npt.NDArray[np.int64]]:
    """Every item's dense index, best first, for each user's one query state (B = 1 each), by the full model."""
    from services.algorithms.ops.mol_scores import mol_scores

    users = list(states)
    ranked: dict[str, npt.NDArray[np.int64]] = {}
    for start in range(0, len(users), batch):
        some = users[start : start + batch]
        gates = [states[user].gate for user in some]
        queries = QueryStates(
            components=np.concatenate([states[user].components for user in some]),
            gate=None if gates[0] is None else np.concatenate([gate for gate in gates if gate is not None]),
        )
        scores = np.asarray(mol_scores(queries, bundle.item_states, bundle.pair_gate))
        ranked.update(zip(some, np.argsort(-scores, axis=1, kind="stable"), strict=True))
    return ranked


def baseline_answers(
    bundle: Bundle,
    past: Mapping[str, set[str]],
    frozen: Mapping[str, npt.NDArray[np.int64]],
    events: Sequence[ReplayEvent],
) -> dict[str, list[list[str]]]:
    """Top tens of the predicted events, in sending order, by popularity and by the frozen states.

    `past`: what each user had before the split; `frozen`: each user's ranking of the catalogue at the split (see
    `rankings`). A user without one has no state to freeze: the answer is the popular one, as the system's would be.
    """
    popular = popularity_order(bundle.item_ids, bundle.counts)
    answers: dict[str, list[list[str]]] = {"frozen_state": [], "popularity": []}
    for event, seen in seen_before(past, events):
        ranking = frozen.get(event.user_id)
        own = popular if ranking is None else (bundle.item_ids[index] for index in ranking)
        for name, order in (("popularity", popular), ("frozen_state", own)):
            answers[name].append(top_k(order, seen))
    return answers


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
                best = top_rows(rows[row], left_out, k=HITS_AT)
                answers.setdefault(name, []).append([train.item_ids[code] for code in best.tolist()])
    return answers


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

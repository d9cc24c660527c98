"""Item neighbours from training sequences, and their share of a score: 0 if they do not help (decision 039).

The cost is linear in events: seconds, where a model takes minutes.

Letters: X items, N neighbours of an item, B events.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy import sparse

from services.algorithms.bundles.event_schema import EventSchema
from services.algorithms.bundles.model_manifest import NeighbourShape
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.metrics import Ranks, gains, target_ranks
from services.offline.evaluation.engine.ranked_events import EventScorer, counting, held_out_batches
from services.offline.training.sequences import Histories, IntArray

# Validation NDCG@10 of co-occurrence alone. ml-latest-small: distances up to 30, weighted by the inverse of their root,
# .054 (up to 10, unweighted: .049); decay .7 .053 (.9: .050). Amazon Beauty: earlier items at half weight .067 (full
# weight: .060; without them both data sets are worse); counts to the power of a quarter .067 (halved roots: .057).
_MAX_DISTANCE = 30
_DISTANCE_POWER = 0.5
_EARLIER = 0.5
_COUNT_POWER = 0.25
_SHAPE = NeighbourShape(num_neighbours=64, decay=0.7, model_share=1.0)
# Candidates of the model's share; a long-trained dot product gets .95.
MODEL_SHARES = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2)
# The share is chosen on users' last events. They are few, because training excludes them.
_MAX_EVENTS, _MAX_SHARE, _MIN_EVENTS = 2_000, 0.01, 100
_BLOCK_PAIRS = 1 << 23


def learn_neighbours(interactions: Interactions) -> ItemNeighbours:
    """Return each item's N nearest. The weight is a sum over pairs of events of one user, g <= 30 positions apart, of
    g^-1/2, halved for the earlier item as the neighbour, over (n_x n_y)^1/4 of the items' numbers of events.

    `model_share` is 1. Cost: O(60 events) time, and 24 bytes a pair for 2^23 pairs, or one item's, at a time.
    """
    histories = Histories.of(interactions)
    users = np.repeat(np.arange(len(histories.offsets) - 1), np.diff(histories.offsets))
    num_items = interactions.num_items
    size = min(_SHAPE.num_neighbours, num_items)
    counts = interactions.item_counts()
    scale = (np.maximum(counts, 1) ** -_COUNT_POWER).astype(np.float32)
    items, weights = np.zeros((num_items, size), np.int32), np.zeros((num_items, size), np.float32)
    # Each block has items whose pairs fit into memory.
    places, ends = np.argsort(histories.items, kind="stable"), np.cumsum(counts)
    blocks = np.flatnonzero(np.diff(ends * 2 * _MAX_DISTANCE // _BLOCK_PAIRS, prepend=0)).tolist()
    for begin, end in pairwise([0, *(block for block in blocks if block), num_items]):
        here = places[ends[begin] - counts[begin] : ends[end - 1]]
        pairs = list(_pairs(histories.items, users, here))
        of, neighbour, weight = (np.concatenate(part) for part in zip(*pairs, strict=True))
        summed = sparse.csr_matrix((weight, (of - begin, neighbour)), shape=(end - begin, num_items), dtype=np.float32)
        of = np.repeat(np.arange(begin, end), np.diff(summed.indptr))
        near = np.where(of == summed.indices, np.float32(0), summed.data * scale[of] * scale[summed.indices])
        order = np.lexsort((summed.indices, -near, of))
        place = np.arange(len(of)) - np.repeat(summed.indptr[:-1], np.diff(summed.indptr))
        best = order[place < size]
        row, column = of[best], place[place < size]
        items[row, column], weights[row, column] = summed.indices[best], near[best]
    return ItemNeighbours(shape=replace(_SHAPE, num_neighbours=size), items=items, weights=weights)


def _pairs(
    items: IntArray, users: IntArray, here: IntArray
) -> Iterator[tuple[IntArray, IntArray, npt.NDArray[np.float32]]]:
    for distance in range(1, _MAX_DISTANCE + 1):
        for step, factor in ((distance, 1.0), (-distance, _EARLIER)):
            there = here + step
            is_one = (there >= 0) & (there < len(users))
            is_one[is_one] = users[there[is_one]] == users[here[is_one]]
            weight = np.float32(factor * distance**-_DISTANCE_POWER)
            yield items[here[is_one]], items[there[is_one]], np.full(int(is_one.sum()), weight)


def votes_before(
    neighbours: ItemNeighbours, histories: Histories, events: IntArray, users: IntArray
) -> npt.NDArray[np.float64]:
    """Return votes (B, X) of the events before position events[b] of users[b]; seen items get none."""
    votes = np.zeros((len(events), len(neighbours.items)))
    for row, (event, user) in enumerate(zip(events, users, strict=True)):
        seen = histories.items[histories.offsets[user] : event][::-1]
        distinct, newest = np.unique(seen, return_index=True)
        voted, values = neighbours.votes(seen[np.sort(newest)], distinct)
        votes[row, voted] = values
    return votes


@dataclass(frozen=True, kw_only=True, slots=True)
class WithNeighbours:
    """Scores as served: the model's scores, and the votes of the items before each event."""

    model: EventScorer
    neighbours: ItemNeighbours

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        share = self.neighbours.shape.model_share
        scores = share * np.asarray(self.model.scores(histories, events, users), dtype=np.float64)
        return scores + (1 - share) * votes_before(self.neighbours, histories, events, users)


def choosing_rows(interactions: Interactions, schema: EventSchema) -> IntArray:
    """Return rows that choose the model's share: last positive events, of users with three or more events and of items
    with other events; empty if there are too few.
    """
    rows, offsets = interactions.by_user()
    last = counting(interactions, np.sort(rows[offsets[1:][np.diff(offsets) >= 3] - 1]), schema)
    count = min(_MAX_EVENTS, int(_MAX_SHARE * len(interactions)), len(last))
    if count < _MIN_EVENTS:
        return np.zeros(0, dtype=np.int64)
    chosen = last[np.linspace(0, len(last) - 1, count).astype(np.int64)]
    left = interactions.item_counts() - np.bincount(interactions.items[chosen], minlength=interactions.num_items)
    return chosen[left[interactions.items[chosen]] > 0]


def with_share(neighbours: ItemNeighbours, model_share: float) -> ItemNeighbours:
    """Return the same neighbours with another model's share."""
    return replace(neighbours, shape=replace(neighbours.shape, model_share=model_share))


def ranks_by_share(
    model: EventScorer, learnt: ItemNeighbours, interactions: Interactions, rows: IntArray
) -> dict[float, Ranks]:
    """Return 0-based ranks (E,) by model's share.

    rows: events outside the training data of model and neighbours. Raises: the errors of `held_out_batches`.
    """
    found: dict[float, list[Ranks]] = {share: [] for share in MODEL_SHARES}
    for batch in held_out_batches(interactions, rows):
        asked = (batch.histories, batch.events, batch.users)
        scores, votes = np.asarray(model.scores(*asked), dtype=np.float64), votes_before(learnt, *asked)
        for share, ranks in found.items():
            ranks.append(target_ranks(share * scores + (1 - share) * votes, batch.targets, batch.seen))
    return {share: np.concatenate(ranks) for share, ranks in found.items()}


def shares_tried(
    model: EventScorer, learnt: ItemNeighbours, interactions: Interactions, rows: IntArray
) -> dict[float, float]:
    """Return NDCG@10 by model's share on the events of `ranks_by_share`."""
    ranks = ranks_by_share(model, learnt, interactions, rows)
    return {share: float(gains(found, "ndcg@10").mean()) for share, found in ranks.items()}

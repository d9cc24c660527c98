"""Rank the item of each held-out event in the whole catalogue, by the user's earlier events, also held-out ones.

Every scorer excludes the same seen items, so a model and its baselines answer the same questions.

Letters: E events to predict, B events of a batch, X items.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.event_schema import EventSchema
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.metrics import Ranks, target_ranks, top_rows
from services.offline.training.sequences import Histories, IntArray

_EVENTS_PER_BATCH = 256
_COVERAGE_DEPTH = 10


class EventScorer(Protocol):
    """A model or baseline that scores every item as a user's next one."""

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        """Return scores (B, X) of every item as the event at position events[b] of users[b]; higher is better.

        A score depends only on the user's earlier items and on the event's time.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutBatch:
    """B events to predict.

    Shapes: events (B,) positions in `histories`, users (B,), targets (B,), seen (B, X): items that are not ranked.
    """

    histories: Histories
    events: IntArray
    users: IntArray
    targets: IntArray
    seen: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedEvents:
    """Shapes: events (E,) positions in `Histories`, increasing; users (E,); ranks (E,), 0-based.

    coverage: the share of the catalogue among any event's first ten. first (E, 10): those ten, best first, -1 for none.
    """

    events: IntArray
    users: IntArray
    ranks: Ranks
    coverage: float
    first: IntArray | None = None


def counting(interactions: Interactions, rows: IntArray, schema: EventSchema) -> IntArray:
    """Return the positive rows: the events that training, evaluation and the retraining gate predict."""
    return rows[interactions.speaking_for(schema)[rows]]


def evenly(rows: IntArray, count: int) -> IntArray:
    """Return at most `count` of the rows, evenly spread."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)]


def held_out_batches(interactions: Interactions, rows: npt.NDArray[np.int64]) -> Iterator[HeldOutBatch]:
    """Yield the events in `rows` by batches, in the order of `Histories`, without users' first events.

    Raises: ValueError if no event is left.
    """
    histories = Histories.of(interactions)
    events, users = _predictable(interactions, rows, histories)
    if not len(events):
        raise ValueError(f"none of the {len(rows)} events to predict has an earlier event of its user")
    for begin in range(0, len(events), _EVENTS_PER_BATCH):
        chosen, owners = events[begin : begin + _EVENTS_PER_BATCH], users[begin : begin + _EVENTS_PER_BATCH]
        yield HeldOutBatch(
            histories=histories,
            events=chosen,
            users=owners,
            targets=histories.items[chosen],
            seen=_seen_before(histories, chosen, owners, interactions.num_items),
        )


def rank_events(scorer: EventScorer, interactions: Interactions, rows: npt.NDArray[np.int64]) -> RankedEvents:
    """Rank each event's item against the catalogue without the user's seen items. Raises: see `held_out_batches`."""
    batches, ranks, tops, shown = [], [], [], np.zeros(interactions.num_items, dtype=bool)
    for batch in held_out_batches(interactions, rows):
        scores = scorer.scores(batch.histories, batch.events, batch.users)
        ranks.append(target_ranks(scores, batch.targets, batch.seen))
        depth = min(_COVERAGE_DEPTH, scores.shape[1] - 1)
        first = np.argpartition(np.where(batch.seen, np.inf, -scores), depth, axis=1)
        shown[first[:, :_COVERAGE_DEPTH].ravel()] = True
        top = np.full((len(scores), _COVERAGE_DEPTH), -1, dtype=np.int64)
        for row, (own, seen) in enumerate(zip(scores, batch.seen, strict=True)):
            best = top_rows(own, np.flatnonzero(seen), k=_COVERAGE_DEPTH)
            top[row, : len(best)] = best
        tops.append(top)
        batches.append((batch.events, batch.users))
    events, users = (np.concatenate(part) for part in zip(*batches, strict=True))
    return RankedEvents(
        events=events,
        users=users,
        ranks=np.concatenate(ranks),
        coverage=float(shown.mean()),
        first=np.concatenate(tops),
    )


def _predictable(interactions: Interactions, rows: IntArray, histories: Histories) -> tuple[IntArray, IntArray]:
    order, _ = interactions.by_user()
    events = np.flatnonzero(np.isin(order, rows))
    users = np.searchsorted(histories.offsets, events, side="right") - 1
    later = events > histories.offsets[users]
    return events[later], users[later]


def _seen_before(histories: Histories, events: IntArray, users: IntArray, num_items: int) -> npt.NDArray[np.bool_]:
    seen = np.zeros((len(events), num_items), dtype=bool)
    for row, (event, user) in enumerate(zip(events, users, strict=True)):
        seen[row, histories.items[histories.offsets[user] : event]] = True
    return seen

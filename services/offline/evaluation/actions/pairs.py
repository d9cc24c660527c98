"""What one action on an item does to that item's nearest, for random people and items.

An item's nearest are those whose components are most alike by their mean cosine, component by component. A mean rank is
over all items of the catalogue by the model's own score: no votes of neighbours, nothing left out.

Letters: X items, n pairs of a person and an item.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.contribution import SCALE, Contributions
from services.algorithms.pefa.policy import DEFAULT_SHARE
from services.algorithms.pefa.refresh import refreshed, unit
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.contracts.stored_history import StoredEvent
from services.offline.evaluation.engine.served_states import Person, ServedStates

NEAREST = 20
# Types and values of the actions; by the default schema a rating of 5 weighs 1, of 1 weighs -1.
ACTIONS: Mapping[str, tuple[str, float]] = {
    "like": ("like", 1.0),
    "rating 5": ("rating", 5.0),
    "rating 1": ("rating", 1.0),
    "dislike": ("dislike", 1.0),
    "hide": ("hide", 1.0),
    "impression": ("impression", 1.0),
}
_AT_ONCE = 64
_AFTER_MS = 60_000

Ranks = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Mean ranks (n,) before and after; how many of the n states are the same bit for bit."""

    before: Ranks
    after: Ranks
    unchanged: int


def changes(
    bundle: Bundle, people: Sequence[Person], items: npt.NDArray[np.int64], *, learns: bool, nearest: int = NEAREST
) -> dict[str, Change]:
    """By action, the mean ranks of the nearest of each person's item (n,) before and after that action on it.

    `learns`: the item learns from the action, too (PEFA), as if one person's word were enough to publish it.
    """
    states = ServedStates(bundle)
    before, rows = states(people)
    people, items = [people[row] for row in rows.tolist()], items[rows]
    scorer = MolScorer(bundle.item_states, bundle.pair_gate)
    near = _nearest(bundle.item_states, items, nearest)
    ranks = _mean_ranks(scorer, before, near)
    found = {}
    for name, (kind, value) in ACTIONS.items():
        acted = [_with(one, bundle.item_ids[item], kind, value) for one, item in zip(people, items, strict=True)]
        after, _ = states(acted)
        same = (after.components == before.components).all(axis=(1, 2))
        weight = bundle.event_schema.feedback.weight(kind, value) if learns else 0.0
        learnt = _learnt(bundle, before, items, weight) if weight else None
        found[name] = Change(
            before=ranks, after=_mean_ranks(scorer, after, near, items, learnt), unchanged=int(same.sum())
        )
    return found


def _with(person: Person, item_id: str, kind: str, value: float) -> Person:
    newest = person.events[-1]
    at = newest.offset + 1
    event = StoredEvent(newest.event_time_ms + _AFTER_MS, 0, at, at, item_id, kind, value)
    return Person(person.user_id, [*person.events, event])


def _nearest(states: ItemStates, items: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The `count` nearest of each item (n, count), without itself."""
    vectors = unit(states.components).reshape(len(states), -1).astype(np.float32)
    alike = vectors[items] @ vectors.T
    alike[np.arange(len(items)), items] = -np.inf
    return np.argpartition(-alike, count, axis=1)[:, :count]


def _learnt(bundle: Bundle, queries: QueryStates, items: npt.NDArray[np.int64], weight: float) -> ItemStates:
    """The items' states (n,) after one interaction of this weight with these states before it."""
    leave_out = bundle.num_query_components - 1 if bundle.encoder.uses_user_index else None
    base = bundle.item_states.take(items)
    sums = Contributions(bundle.pair_gate, leave_out=leave_out)(queries, np.full(len(items), weight), base) / SCALE
    evidence, coherence = np.full(len(items), abs(weight)), np.ones(len(items))
    return refreshed(base, sums, DEFAULT_SHARE.model_share(evidence, coherence, np.zeros(len(items))))


def _mean_ranks(
    scorer: MolScorer,
    queries: QueryStates,
    near: npt.NDArray[np.int64],
    items: npt.NDArray[np.int64] | None = None,
    learnt: ItemStates | None = None,
) -> Ranks:
    """Mean of the ranks, from 1, of near (n, count). learnt (n,): states that `items` (n,) have instead."""
    found = np.empty(len(queries))
    for start in range(0, len(queries), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        asked = queries.take(part)
        scores = scorer.scores(asked)
        if items is not None and learnt is not None:
            own = MolScorer(learnt.take(part), scorer.pair_gate).scores(asked)
            scores[np.arange(len(asked)), items[part]] = own.diagonal()
        ranks = (-scores).argsort(axis=1, kind="stable").argsort(axis=1) + 1
        found[part] = np.take_along_axis(ranks, near[part], axis=1).mean(axis=1)
    return found

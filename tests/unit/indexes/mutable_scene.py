"""A naive catalogue to hold a mutable index against: which item has which of a fixed pool of states.

Scores of every (query, state) pair are computed once in float64 by the reference, so an expected answer is a lookup
and a sort. Items share states on purpose: equal scores must come in order of id.
"""

from collections.abc import Callable, Sequence

import numpy as np
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.mutable.index import Build as BuildAll
from services.algorithms.indexes.mutable.index import MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.snapshot import Snapshot
from services.algorithms.indexes.protocol import Index
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.attributes import Kind, Values
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates

CATEGORIES = ("a", "b", "c", "d", "e")
KINDS = {"price": Kind.NUMBER, "language": Kind.TAG}
MODEL = "model-1"
Build = Callable[[MolScorer], Index]


def restore(snapshot: Snapshot, pair_gate: PairGate | None, *, build: BuildAll) -> MutableIndex:
    """An index that goes on where the snapshot was taken."""
    said = snapshot.manifest
    return MutableIndex(
        snapshot.items, pair_gate, model_version=said.model_version, build=build, number=said.number, digest=said.digest
    )


class States:
    """A pool of item states and queries of one shape, with their exact scores."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        p_q: int,
        p_x: int,
        d: int,
        count: int = 300,
        num_queries: int = 24,
        spread: float = 0.3,
    ) -> None:
        self.items = make_items(rng, count, p_q, p_x, d, spread=spread)
        self.queries = make_queries(rng, num_queries, p_q, p_x, d)
        self.pair_gate = make_pair_gate(rng, p_q * p_x, 6) if p_q * p_x > 1 else None
        self.exact = mol_scores_reference(self.queries, self.items, self.pair_gate).numpy()

    def __len__(self) -> int:
        return len(self.items)

    def of(self, numbers: Sequence[int] | np.ndarray) -> ItemStates:
        rows = np.asarray(numbers, dtype=np.int64)
        gate = None if self.items.gate is None else self.items.gate[rows]
        return ItemStates(components=self.items.components[rows], gate=gate)

    def query(self, numbers: Sequence[int]) -> QueryStates:
        gate = None if self.queries.gate is None else self.queries.gate[list(numbers)]
        return QueryStates(components=self.queries.components[list(numbers)], gate=gate)


class Oracle:
    """A dictionary of a fixed universe of ids, as arrays in order of id."""

    def __init__(self, ids: Sequence[str], states: States) -> None:
        self.ids = np.array(sorted(ids), dtype=object)
        self.place = {item_id: place for place, item_id in enumerate(self.ids)}
        self.states = states
        self.state = np.full(len(ids), -1)
        self.categories = np.zeros((len(ids), len(CATEGORIES)), dtype=bool)
        self.attributes: list[Values] = [{} for _ in ids]

    def copy(self) -> "Oracle":
        other = Oracle(self.ids.tolist(), self.states)
        other.state, other.categories = self.state.copy(), self.categories.copy()
        other.attributes = self.attributes.copy()
        return other

    def __len__(self) -> int:
        return int((self.state >= 0).sum())

    def upsert(self, batch: ItemBatch, numbers: Sequence[int]) -> None:
        for row, (item_id, number) in enumerate(zip(batch.item_ids, numbers, strict=True)):
            place = self.place[item_id]
            if batch.categories is not None:
                self.categories[place] = [name in batch.categories[row] for name in CATEGORIES]
            elif self.state[place] < 0:
                self.categories[place] = False
            if batch.attributes is not None:
                self.attributes[place] = batch.attributes.of_row(row)
            elif self.state[place] < 0:
                self.attributes[place] = {}
            self.state[place] = number

    def remove(self, item_ids: Sequence[str]) -> list[str]:
        """Remove items and say which were not there."""
        unknown = [item_id for item_id in item_ids if self.state[self.place[item_id]] < 0]
        self.state[[self.place[item_id] for item_id in item_ids]] = -1
        return unknown

    def passing(self, wanted: ItemFilter | None) -> np.ndarray:
        alive = self.state >= 0
        if wanted is None:
            return alive
        if wanted.allow_item_ids:
            alive &= self._named(wanted.allow_item_ids)
        alive &= ~self._named(wanted.deny_item_ids)
        if wanted.exclude_seen:
            alive &= ~self._named(wanted.seen_item_ids)
        if wanted.allow_categories:
            alive &= self._in(wanted.allow_categories)
        for one in wanted.where:
            alive &= np.array([one.holds(values.get(one.name)) for values in self.attributes])
        return alive & ~self._in(wanted.deny_categories)

    def top(self, query: int, k: int, wanted: ItemFilter | None) -> tuple[list[str], np.ndarray]:
        """The expected ids and scores; scores within 1e-12 are ties."""
        places = np.flatnonzero(self.passing(wanted))
        scores = self.states.exact[query, self.state[places]]
        order = np.argsort(-scores, kind="stable")
        group = np.cumsum(np.concatenate([[0], np.diff(-scores[order]) > 1e-12]))[: len(order)]
        order = order[np.lexsort((places[order], group))][:k]
        return self.ids[places[order]].tolist(), scores[order]

    def _named(self, item_ids: Sequence[str]) -> np.ndarray:
        named = np.zeros(len(self.ids), dtype=bool)
        named[[self.place[item_id] for item_id in item_ids if item_id in self.place]] = True
        return named

    def _in(self, names: Sequence[str]) -> np.ndarray:
        chosen = [name in names for name in CATEGORIES]
        return self.categories[:, chosen].any(axis=1)

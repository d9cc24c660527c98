"""Random interactions for the PEFA tests: query states as the wire holds them, items with states, users, times."""

from dataclasses import dataclass

import numpy as np
from retrieval_scene import half, make_items, make_pair_gate, make_queries

from services.algorithms.pefa.contribution import Contributions
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates


@dataclass(frozen=True, kw_only=True)
class Scene:
    """n interactions: row i is user `users[i]` with item `item_ids[i]`, after query state i."""

    queries: QueryStates
    items: ItemStates
    pair_gate: PairGate | None
    item_ids: list[str]
    users: list[str]
    weights: np.ndarray
    seconds: np.ndarray
    contributions: np.ndarray
    leave_out: int | None

    def __len__(self) -> int:
        return len(self.item_ids)

    def entries(self) -> list[MemoryEntry]:
        return [
            MemoryEntry(
                entry_id=f"{row % 3}-{row}",
                item_id=self.item_ids[row],
                components=self.queries.components[row].astype(np.float16),
                weight=float(self.weights[row]),
                interaction_type="rating",
                event_seconds=int(self.seconds[row]),
            )
            for row in range(len(self))
        ]


def take(states: QueryStates | ItemStates, rows: object) -> QueryStates | ItemStates:
    """Some rows of states."""
    gate = None if states.gate is None else states.gate[rows]
    return type(states)(components=states.components[rows], gate=gate)


def make_scene(
    seed: int,
    count: int,
    *,
    p_q: int = 3,
    p_x: int = 2,
    d: int = 8,
    num_items: int = 5,
    num_users: int = 4,
    leave_out: int | None = None,
) -> Scene:
    rng = np.random.default_rng(seed)
    pairs = p_q * p_x
    catalogue = make_items(rng, num_items, p_q, p_x, d)
    rows = rng.integers(0, num_items, count)
    queries = half(make_queries(rng, count, p_q, p_x, d))
    pair_gate = make_pair_gate(rng, pairs, 6) if pairs > 1 else None
    items = take(catalogue, rows)
    weights = rng.choice([-1.0, -0.5, 0.5, 1.0, 0.3], count)
    return Scene(
        queries=queries,
        items=items,
        pair_gate=pair_gate,
        item_ids=[f"item-{row}" for row in rows],
        users=[f"user-{user}" for user in rng.integers(0, num_users, count)],
        weights=weights,
        seconds=rng.integers(0, 40 * 86400, count),
        contributions=Contributions(pair_gate, leave_out=leave_out)(queries, weights, items),
        leave_out=leave_out,
    )

"""What a retrieval benchmark runs on: items, queries, the pair gate that scores them, and a label per query."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.states import ItemStates, PairGate, QueryStates

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """X items and B queries with labels (B,): the row of the item that each query's answer should contain."""

    name: str
    items: ItemStates
    queries: QueryStates
    pair_gate: PairGate | None
    labels: IntArray

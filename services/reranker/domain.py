"""What a rerank asks and answers, in dataclasses: no Protobuf, no scoring."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.protocol import Certificate
from services.algorithms.states import QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class RerankQuery:
    """One rerank. `query` holds one state.

    `bound`: no allowed item outside the pool has s above it; -inf when nothing was left out, None without proof.
    `max_per_category`: 0 is no limit. `diversity`: weight of unlikeness, 0-1.
    """

    query: QueryStates
    model_version: str
    candidate_item_ids: Sequence[str]
    bound: float | None
    k: int
    filter: ItemFilter
    max_per_category: int = 0
    diversity: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """The chosen items, in the order to show them, with s. The certificate speaks of s before rules and diversity."""

    item_ids: list[str]
    scores: list[float]
    certificate: Certificate
    dropped_items: int
    rerank_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RerankAnswer:
    """An answer with its provenance; times in seconds."""

    ranked: Ranked
    model_version: str
    queue_s: float

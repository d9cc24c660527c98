"""Requests and answers of the reranker as dataclasses."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.indexes.protocol import Certificate
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.algorithms.scoring.states import QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class RerankQuery:
    """A request to rerank a pool.

    bound: no allowed item outside the pool has a higher s (-inf if there is none, None without a proof).
    max_per_category: 0 means no limit. diversity: weight of dissimilarity, 0-1. index_version, position: the version
    that made the pool; "" and None if unknown. votes: one per item, or empty. model_share: the model's weight against
    votes (lambda). discounts: subtracted from final scores, at least 0, one per item, or empty.
    """

    query: QueryStates
    model_version: str
    candidate_item_ids: Sequence[str]
    bound: float | None
    k: int
    filter: ItemFilter
    max_per_category: int = 0
    diversity: float = 0.0
    index_version: str = ""
    position: int | None = None
    votes: Sequence[float] = ()
    model_share: float = 1.0
    discounts: Sequence[float] = ()
    rules: Sequence[Rule] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """The chosen items in display order. A score is s, or with votes model_share * s + (1 - model_share) * vote, minus
    the discount, plus the rules' boosts. certificate: certifies the ranking before rules and diversity. rules: for each
    item the rules that changed its score or position.
    """

    item_ids: list[str]
    scores: list[float]
    certificate: Certificate
    dropped_items: int
    rerank_s: float
    index_version: str
    rules: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainQuery:
    """A request to explain a score. max_pairs: 0 means all."""

    query: QueryStates
    model_version: str
    item_id: str
    max_pairs: int = 0
    rules: Sequence[Rule] = ()

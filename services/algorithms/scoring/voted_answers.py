"""Answers and pools with votes (of PEFA-XL's memory or item neighbours), and their certificates.

final = share * s + (1 - share) * vote. Every voted item that passes the filter is added with its own s. So an omitted
item scores at most share * U if its s is at most U: certificates and bounds stay valid.

Letters: n items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.lookup import find_items, score_error
from services.algorithms.indexes.protocol import Certificate, Scores, certificate
from services.algorithms.indexes.rescoring import order_by_score_then_id
from services.algorithms.items.live_catalogue import LiveCatalogue, Served
from services.algorithms.pefa.votes import with_votes
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import QueryStates

Votes = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredItems:
    """Item ids with scores (n,), best first, ties by id; an answer's certificate, None for a pool."""

    item_ids: list[str]
    scores: Scores
    certificate: Certificate | None = None


def joined_answer(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    query: int,
    found: tuple[Sequence[str], Scores, Certificate],
    votes: Votes,
    *,
    k: int,
    wanted: ItemFilter,
    model_share: float,
) -> ScoredItems:
    """The top `k` of the final scores, from the top of s (n' items with scores and certificate) and the votes.

    The top of s must have `k` items without a negative vote, or all allowed items. If it is exact, so is the answer.
    """
    ids, scores, proof = found
    joining = _joining(catalogue, served, queries, query, ids, votes, wanted)
    all_ids = [*ids, *joining.item_ids]
    final = with_votes(np.concatenate([scores, joining.scores]), all_ids, votes, model_share)
    error = model_share * score_error(served.version, queries, query)
    order, ordered = order_by_score_then_id(final, id_ranks(all_ids), tolerance=2 * error)
    if proof.gap:
        kth = float(ordered[k - 1]) - 2 * error if len(ordered) >= k else None
        bound = float(np.nextafter(model_share * (float(scores[-1]) + proof.gap), np.inf))
        proof = certificate(bound=bound, kth_score=kth)
    return ScoredItems(item_ids=[all_ids[row] for row in order[:k].tolist()], scores=ordered[:k], certificate=proof)


def joined_pool(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    query: int,
    found: tuple[Sequence[str], Scores],
    votes: Votes,
    *,
    wanted: ItemFilter,
) -> ScoredItems:
    """A first-stage pool and the voted items that pass, with s; it may exceed the requested size."""
    ids, scores = found
    joining = _joining(catalogue, served, queries, query, ids, votes, wanted)
    all_ids = [*ids, *joining.item_ids]
    order, ordered = order_by_score_then_id(np.concatenate([scores, joining.scores]), id_ranks(all_ids), tolerance=0.0)
    return ScoredItems(item_ids=[all_ids[row] for row in order.tolist()], scores=ordered)


def num_negative(votes: Iterable[Votes]) -> int:
    """The extra items an answer needs because of negative votes."""
    return max((sum(vote < 0 for vote in one.values()) for one in votes), default=0)


def _joining(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    query: int,
    ids: Sequence[str],
    votes: Votes,
    wanted: ItemFilter,
) -> ScoredItems:
    there = frozenset(ids)
    others = [item_id for item_id in votes if item_id not in there]
    if not wanted.is_open:
        passes = catalogue.passing(wanted, others)
        others = [item_id for item_id, one in zip(others, passes.tolist(), strict=True) if one]
    items = find_items(served.version, others)
    return ScoredItems(item_ids=list(items.item_ids), scores=items.scores(queries, query))


def id_ranks(item_ids: Sequence[str]) -> np.ndarray:
    ranks = np.empty(len(item_ids), dtype=np.int64)
    ranks[sorted(range(len(item_ids)), key=item_ids.__getitem__)] = np.arange(len(item_ids))
    return ranks

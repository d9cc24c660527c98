"""Answers and pools with votes (of PEFA-XL's memory or item neighbours), and their certificates.

final = share * s + (1 - share) * vote. Every voted item that passes the filter is added with its own s. So an omitted
item whose s is at most U scores at most share * U, and certificates and bounds stay valid.

Letters: n items.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.lookup import find_items, score_error
from services.algorithms.indexes.protocol import Certificate, Pass, Scores, certificate
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


def voted_answers(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    k: int,
    filters: Sequence[ItemFilter],
    votes: Sequence[Votes] | None,
    algorithm: str | None = None,
    *,
    model_share: float = 1.0,
    max_gap: float = 0.0,
) -> tuple[list[ScoredItems], tuple[Pass, ...]]:
    """Each query's top `k` of the final scores, and the search's passes. If the top by s is exact, so is the answer.

    filters, votes: one per query; votes is None if nothing votes. Raises as `Version.search`.
    """
    # The search must return `k` items without a negative vote.
    more = max((sum(vote < 0 for vote in one.values()) for one in votes or ()), default=0)
    top = served.version.search(queries, k + more, filters, algorithm, max_gap)
    found = []
    for query, (ids, scores, proof) in enumerate(zip(top.item_ids, top.scores, top.certificates, strict=True)):
        one = ScoredItems(item_ids=list(ids), scores=scores[: len(ids)], certificate=proof)
        if votes is not None:
            joined = _joined(catalogue, served, queries, query, one, votes[query], filters[query])
            one = _final(joined, served, queries, query, one, votes[query], k, model_share)
        found.append(one)
    return found, top.passes


def voted_pools(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    size: int,
    filters: Sequence[ItemFilter],
    votes: Sequence[Votes] | None,
    algorithm: str | None = None,
) -> tuple[list[ScoredItems], list[float | None], tuple[Pass, ...]]:
    """Each query's first-stage pool plus the voted items that pass, with s; bounds on other items; and the passes.

    A pool may exceed `size`. Arguments and errors are those of `voted_answers`.
    """
    pool = served.version.first_stage(queries, size, filters, algorithm)
    found = []
    for query, (ids, scores) in enumerate(zip(pool.item_ids, pool.scores, strict=True)):
        one = ScoredItems(item_ids=list(ids), scores=scores[: len(ids)])
        if votes is not None and votes[query]:
            one = _joined(catalogue, served, queries, query, one, votes[query], filters[query])
            order, ordered = order_by_score_then_id(one.scores, id_ranks(one.item_ids), tolerance=0.0)
            one = ScoredItems(item_ids=[one.item_ids[row] for row in order.tolist()], scores=ordered)
        found.append(one)
    return found, [None if np.isnan(bound) else float(bound) for bound in pool.bounds], pool.passes


def _joined(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    query: int,
    found: ScoredItems,
    votes: Votes,
    wanted: ItemFilter,
) -> ScoredItems:
    """The found items, then the other voted ones that pass, with s."""
    there = frozenset(found.item_ids)
    others = [item_id for item_id in votes if item_id not in there]
    if not wanted.is_open:
        passes = catalogue.passing(wanted, others)
        others = [item_id for item_id, one in zip(others, passes.tolist(), strict=True) if one]
    items = find_items(served.version, others)
    scores = np.concatenate([found.scores, items.scores(queries, query)])
    return ScoredItems(item_ids=[*found.item_ids, *items.item_ids], scores=scores)


def _final(
    joined: ScoredItems,
    served: Served,
    queries: QueryStates,
    query: int,
    found: ScoredItems,
    votes: Votes,
    k: int,
    model_share: float,
) -> ScoredItems:
    """The top `k` of the joined items by final score. found: the top by s."""
    final = with_votes(joined.scores, joined.item_ids, votes, model_share)
    error = model_share * score_error(served.version, queries, query)
    order, ordered = order_by_score_then_id(final, id_ranks(joined.item_ids), tolerance=2 * error)
    proof = found.certificate
    if proof is not None and proof.gap:
        kth = float(ordered[k - 1]) - 2 * error if len(ordered) >= k else None
        bound = float(np.nextafter(model_share * (float(found.scores[-1]) + proof.gap), np.inf))
        proof = certificate(bound=bound, kth_score=kth)
    ids = [joined.item_ids[row] for row in order[:k].tolist()]
    return ScoredItems(item_ids=ids, scores=ordered[:k], certificate=proof)


def id_ranks(item_ids: Sequence[str]) -> np.ndarray:
    ranks = np.empty(len(item_ids), dtype=np.int64)
    ranks[sorted(range(len(item_ids)), key=item_ids.__getitem__)] = np.arange(len(item_ids))
    return ranks

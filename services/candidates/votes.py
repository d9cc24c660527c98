"""The memory's part of an answer (PEFA-XL): votes for a query, and answers and pools with the voted items in them.

final = share * s + (1 - share) * vote. Every voted item that passes the filter joins, with its own s, so whatever is
left out has no vote and its final score is at most share * U when its s is at most U: certificates and bounds survive.
Which interactions are remembered is the refresher's business.

Letters: B queries, K results, N pool size, n voted items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from services.algorithms.filters import ItemFilter, passing
from services.algorithms.indexes.mutable.lookup import find_items
from services.algorithms.indexes.protocol import Certificate, Scores, certificate
from services.algorithms.indexes.ranking import order_by_score_then_id
from services.algorithms.live_catalogue import LiveCatalogue, Served
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.votes import VotingIndex, with_votes
from services.algorithms.states import QueryStates
from services.candidates.domain import ItemVotes, VotingInteractions
from services.common.index_deltas import MemoryDelta

Votes = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Item ids with scores (n,), best first, ties by id; the certificate of an answer, None of a pool."""

    item_ids: list[str]
    scores: Scores
    certificate: Certificate | None = None


class RememberedVotes:
    """Asks the `neighbours` nearest remembered interactions; `model_share` is lambda."""

    def __init__(self, index: VotingIndex, *, neighbours: int, model_share: float) -> None:
        self.index, self.neighbours, self.model_share = index, neighbours, model_share
        self._newest_event_s = 0

    def __len__(self) -> int:
        return len(self.index)

    def apply(self, changes: Sequence[MemoryDelta]) -> int:
        """Take what entered the memory and what left it; return how many do not fit the model.

        Raises: IndexFullError, and then nothing has changed.
        """
        shape = (self.index.num_components, self.index.width)
        entering = [one for one in changes if not one.dropped]
        fitting = [one for one in entering if one.components.shape == shape]
        if removals := [one.entry_id for one in changes if one.dropped]:
            self.index.apply(removals=removals)
        if fitting:
            self.index.apply(upserts=[_entry(one) for one in fitting])
            self._newest_event_s = max(self._newest_event_s, *(one.event_time_ms // 1000 for one in fitting))
        return len(entering) - len(fitting)

    def clear(self) -> None:
        """Remember nothing."""
        order = self.index.index.version.in_order(lambda: None)
        places = zip(order.source.tolist(), order.row.tolist(), strict=True)
        self.index.apply(removals=[order.sources[source].segment.rows.ids[row] for source, row in places])

    def of(self, queries: QueryStates) -> list[dict[str, float]]:
        """Each query's votes by item."""
        return self.index.votes(queries, self.neighbours)

    def explain(self, query: QueryStates, item_id: str, index_version: str) -> ItemVotes:
        """Who of a query's neighbours voted for an item, gathered by kind: they name no user."""
        voters = [one for one in self.index.neighbours(query, self.neighbours)[0] if one.item_id == item_id]
        voters.sort(key=lambda one: one.interaction_type)
        kinds = []
        for kind, group in groupby(voters, key=lambda one: one.interaction_type):
            members = list(group)
            times = [one.event_seconds for one in members]
            kinds.append(
                VotingInteractions(
                    type=kind,
                    count=len(members),
                    newest_age_s=max(0, self._newest_event_s - max(times)),
                    oldest_age_s=max(0, self._newest_event_s - min(times)),
                    vote=sum(one.vote for one in members),
                )
            )
        return ItemVotes(
            vote=sum(kind.vote for kind in kinds),
            num_neighbours=self.neighbours,
            model_share=self.model_share,
            voters=kinds,
            index_version=index_version,
        )


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
) -> Joined:
    """The top `k` of the final scores, from the top of s (n' items with scores and certificate) and the votes.

    That top must hold `k` items beside those with a negative vote, or all that are allowed: then what it left out by s
    cannot belong to the answer where it was exact.
    """
    ids, scores, proof = found
    joining = _joining(catalogue, served, queries, query, ids, votes, wanted)
    all_ids = [*ids, *joining.item_ids]
    final = with_votes(np.concatenate([scores, joining.scores]), all_ids, votes, model_share)
    error = model_share * find_items(served.version, all_ids).error(queries, query)
    order, ordered = order_by_score_then_id(final, _ranks(all_ids), tolerance=2 * error)
    if proof.gap:
        kth = float(ordered[k - 1]) - 2 * error if len(ordered) >= k else None
        bound = float(np.nextafter(model_share * (float(scores[-1]) + proof.gap), np.inf))
        proof = certificate(bound=bound, kth_score=kth)
    return Joined(item_ids=[all_ids[place] for place in order[:k].tolist()], scores=ordered[:k], certificate=proof)


def joined_pool(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    query: int,
    found: tuple[Sequence[str], Scores],
    votes: Votes,
    *,
    wanted: ItemFilter,
) -> Joined:
    """A first-stage pool with the voted items that pass in it, so it may be larger than was asked for.

    Those that join come with s.
    """
    ids, scores = found
    joining = _joining(catalogue, served, queries, query, ids, votes, wanted)
    all_ids = [*ids, *joining.item_ids]
    order, ordered = order_by_score_then_id(np.concatenate([scores, joining.scores]), _ranks(all_ids), tolerance=0.0)
    return Joined(item_ids=[all_ids[place] for place in order.tolist()], scores=ordered)


def num_negative(votes: Iterable[Votes]) -> int:
    """How many more items an answer must look at, so that items with negative votes push nothing out unseen."""
    return max((sum(vote < 0 for vote in one.values()) for one in votes), default=0)


def _joining(
    catalogue: LiveCatalogue,
    served: Served,
    queries: QueryStates,
    query: int,
    ids: Sequence[str],
    votes: Votes,
    wanted: ItemFilter,
) -> Joined:
    """The voted items that are not there yet, pass, and have a state in this version, with s."""
    there = frozenset(ids)
    others = [item_id for item_id in votes if item_id not in there]
    passes = passing(wanted, others, [catalogue.categories_of(item_id) for item_id in others])
    items = find_items(served.version, [item_id for item_id, one in zip(others, passes, strict=True) if one])
    return Joined(item_ids=list(items.item_ids), scores=items.scores(queries, query))


def _ranks(item_ids: Sequence[str]) -> np.ndarray:
    ranks = np.empty(len(item_ids), dtype=np.int64)
    ranks[sorted(range(len(item_ids)), key=item_ids.__getitem__)] = np.arange(len(item_ids))
    return ranks


def _entry(change: MemoryDelta) -> MemoryEntry:
    return MemoryEntry(
        entry_id=change.entry_id,
        item_id=change.item_id,
        components=change.components.astype(np.float16),
        weight=change.weight,
        interaction_type=change.type,
        event_seconds=change.event_time_ms // 1000,
    )

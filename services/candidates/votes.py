"""Votes in a search: of remembered interactions (PEFA-XL), of item neighbours, or of both. `algorithms/scoring` defines
how neighbours vote (`neighbours.py`), and how votes change an answer (`voted_answers.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from services.algorithms.items.catalogue import Catalogue
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.scoring.neighbours import WINDOW
from services.algorithms.scoring.states import QueryStates
from services.candidates.domain import SearchQuery, VotesQuery
from services.contracts.topics.index_deltas import MemoryDelta
from services.contracts.wire import ItemVotes, VotingInteractions


class RememberedVotes:
    """Votes of the `neighbours` nearest remembered interactions. model_share: lambda, the model's weight."""

    def __init__(self, index: VotingIndex, *, neighbours: int, model_share: float) -> None:
        self.index, self.neighbours, self.model_share = index, neighbours, model_share
        self._newest_event_s = 0

    def __len__(self) -> int:
        return len(self.index)

    def apply(self, changes: Sequence[MemoryDelta]) -> int:
        """Apply changes of the memory; return how many do not fit the model.

        Raises: IndexFullError; then only removals are applied.
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
        order = self.index.index.version.in_order()
        rows = zip(order.source.tolist(), order.row.tolist(), strict=True)
        self.index.apply(removals=[order.sources[source].segment.rows.ids.strings[row] for source, row in rows])

    def of(self, queries: QueryStates) -> list[dict[str, float]]:
        return self.index.votes(queries, self.neighbours)

    def explain(self, query: QueryStates, item_id: str, index_version: str) -> ItemVotes:
        """Return the votes of a query's neighbours for an item, by interaction type."""
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
                    newest_age_seconds=max(0, self._newest_event_s - max(times)),
                    oldest_age_seconds=max(0, self._newest_event_s - min(times)),
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


class Voting:
    """Merges the votes of memory and neighbours: final = n * (m * s + (1 - m) * remembered) + (1 - n) * near.

    m and n are the lambdas of memory and neighbours, 1 if absent. The merged vote satisfies final = model_share * s +
    (1 - model_share) * vote.
    """

    def __init__(self, base: Catalogue, memory: RememberedVotes | None) -> None:
        self.memory, self._base = memory, base
        # A list, since reading strings from columns would take .4 ms a call: searches vote for some thousand items.
        self._item_ids = [] if base.neighbours is None else list(base.rows)
        # Each model item's row in this shard, -1 for an item of another shard.
        self._own = np.full(0 if base.neighbours is None else len(base.voting), -1, np.int32)
        if base.neighbours is not None:
            self._own[base.voting.rows_of(base.rows)] = np.arange(len(base.rows))
        near = 1.0 if base.neighbours is None else base.neighbours.shape.model_share
        remembered = 1.0 if memory is None else memory.model_share
        self.model_share = near * remembered
        rest = 1 - self.model_share or 1.0
        self._of_memory, self._of_neighbours = near * (1 - remembered) / rest, (1 - near) / rest

    @property
    def neighbours_nbytes(self) -> int:
        return 0 if self._base.neighbours is None else self._base.neighbours.nbytes

    @property
    def num_asked(self) -> int:
        neighbours = self._base.neighbours
        asked = 0 if neighbours is None else WINDOW * neighbours.shape.num_neighbours
        return asked + (0 if self.memory is None else len(self.memory))

    def of(self, queries: QueryStates, searches: Sequence[SearchQuery]) -> list[dict[str, float]] | None:
        """Return each query's votes by item; None if nothing can vote."""
        if self.memory is None and self._base.neighbours is None:
            return None
        all_votes = [{}] * len(searches) if self.memory is None else self.memory.of(queries)
        return [
            self._merged(votes, one.filter.seen_item_ids, one.turned_down_item_ids, one.filter.exclude_seen)
            for votes, one in zip(all_votes, searches, strict=True)
        ]

    def explain(self, asked: VotesQuery, index_version: str) -> ItemVotes:
        """Return the item's vote in a search that excludes the other seen items, and the remembered voters."""
        found = ItemVotes(vote=0.0, num_neighbours=0, model_share=1.0, voters=(), index_version=index_version)
        if self.memory is not None:
            found = self.memory.explain(asked.query, asked.item_id, index_version)
        seen, against = asked.seen_item_ids, asked.turned_down_item_ids
        votes = self._merged({asked.item_id: found.vote}, seen, against, leaves_out=True, but=asked.item_id)
        voters = [replace(one, vote=one.vote * self._of_memory) for one in found.voters]
        return replace(found, vote=votes[asked.item_id], voters=voters, model_share=self.model_share)

    def _merged(
        self, found: Mapping[str, float], seen: Sequence[str], against: Sequence[str], leaves_out: bool, but: str = ""
    ) -> dict[str, float]:
        """Add the neighbours' votes to `found`, the memory's votes. seen: newest first; if `leaves_out`, `but` is the
        only seen item that receives votes. against: seen items that add no votes.
        """
        votes = {item_id: self._of_memory * vote for item_id, vote in found.items()}
        neighbours, rows = self._base.neighbours, self._base.voting
        if neighbours is None:
            return votes
        known = [row for row in rows.find(list(dict.fromkeys(seen))).tolist() if row >= 0]
        kept = rows.get(but)
        left_out = [row for row in known if row != kept] if leaves_out else []
        silent = set(rows.find(list(against)).tolist())
        voted, near = neighbours.votes([row for row in known if row not in silent], left_out)
        for row, vote in zip(self._own[voted].tolist(), near.tolist(), strict=True):
            if row < 0:
                continue
            item_id = self._item_ids[row]
            votes[item_id] = votes.get(item_id, 0.0) + self._of_neighbours * vote
        return votes


def _entry(change: MemoryDelta) -> MemoryEntry:
    return MemoryEntry(
        entry_id=change.entry_id,
        item_id=change.item_id,
        components=change.components.astype(np.float16),
        weight=change.weight,
        interaction_type=change.type,
        event_seconds=change.event_time_ms // 1000,
    )

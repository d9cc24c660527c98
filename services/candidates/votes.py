"""The memory that votes (PEFA-XL), as this process holds it: what enters and leaves it, and who voted for an item.

Which interactions are remembered is the refresher's business; how votes join an answer is `voted_answers.py`'s.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.states import QueryStates
from services.candidates.domain import ItemVotes, VotingInteractions
from services.common.stream.topics.index_deltas import MemoryDelta


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
        rows = zip(order.source.tolist(), order.row.tolist(), strict=True)
        self.index.apply(removals=[order.sources[source].segment.rows.ids[row] for source, row in rows])

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


def _entry(change: MemoryDelta) -> MemoryEntry:
    return MemoryEntry(
        entry_id=change.entry_id,
        item_id=change.item_id,
        components=change.components.astype(np.float16),
        weight=change.weight,
        interaction_type=change.type,
        event_seconds=change.event_time_ms // 1000,
    )

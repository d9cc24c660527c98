"""The text source: learned similarity over a language model's components, and feedback from clicks.

A click moves its item's state towards its query (PEFA-XS), and votes for the item at similar queries (PEFA-XL). An
item without a document is found after its first click, since the bundle has no document encoder.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.exact.cheapest import Exact, carry_over
from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import only
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.pefa.policy import NEW_ITEM_SHARE, PAPER
from services.algorithms.pefa.query_feedback import Click, Encode, QueryFeedback, SourcePosition
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.scoring.states import FloatArray, QueryStates
from services.algorithms.scoring.voted_answers import voted_answers
from services.contracts.topics.attributions import ForgetUpTo, Undo
from services.contracts.topics.index_deltas import ItemDelta
from services.contracts.topics.items import CatalogueItem
from services.contracts.topics.search_clicks import ClickRecord, SearchClick
from services.generator.domain.requests import Asked, Scored

# Queries (B,) to components (B, P_q, d), and which of them have a word (B,).
EncodeAll = Callable[[Sequence[str]], tuple[FloatArray, npt.NDArray[np.bool_]]]


# k and lambda of PEFA-XL, chosen on MedQuAD's held-out queries (docs/benchmarks/pefa.md).
NEIGHBOURS, MODEL_SHARE = 8, 0.7
MAX_REMEMBERED = 65_536


class TextMol:
    """Answers queries while one thread applies clicks and another applies descriptions. base: the text bundle's
    documents with their states.
    """

    def __init__(
        self,
        base: Catalogue,
        *,
        encode_all: EncodeAll,
        encode: Encode,
        num_query_components: int,
    ) -> None:
        self.live = LiveCatalogue(base, build=carry_over(only(Exact)))
        self._encode_all, self._encode = encode_all, encode
        self._num_query_components = num_query_components
        self._feedback = self._no_feedback()
        self._votes = VotingIndex(
            num_components=num_query_components,
            width=base.states.components.shape[2],
            model_version=base.model_version,
        )
        self._voters: set[str] = set()
        self.merges = [BackgroundMerge(self.live.index), BackgroundMerge(self._votes.index)]

    @property
    def num_documents(self) -> int:
        return self.live.index.num_items

    @property
    def num_bytes(self) -> int:
        return self.live.index.memory.total + self._votes.memory.total + self._feedback.nbytes

    @property
    def num_clicks(self) -> int:
        return len(self._feedback)

    @property
    def clicks(self) -> int:
        """Offset of the first record of `search-clicks` that answers do not reflect."""
        return self.live.served.position + 1

    def digest(self) -> str:
        """Return a hash (32 hex digits) of the counted clicks and their effect."""
        return self._feedback.digest()

    def start(self) -> None:
        for merge in self.merges:
            merge.start()

    def close(self) -> None:
        """Stop merging. Raises: a merge's error."""
        for merge in self.merges:
            merge.close()

    def find(self, asked: Sequence[Asked]) -> list[Scored]:
        """Return each query's top k by lambda * s + (1 - lambda) * vote; nothing for a query without a word."""
        states, has_words = self._encode_all([one.query for one in asked])
        served = self.live.served
        answers = [Scored(item_ids=[], scores=[])] * len(asked)
        kinds: dict[int, list[int]] = {}
        for position in np.flatnonzero(has_words).tolist():
            kinds.setdefault(asked[position].k, []).append(position)
        for k, positions in kinds.items():
            queries = QueryStates(components=states[positions])
            votes = self._votes.votes(queries, NEIGHBOURS)
            filters = [asked[position].filter for position in positions]
            share = MODEL_SHARE if len(self._votes) else 1.0
            found, _ = voted_answers(self.live, served, queries, k, filters, votes, model_share=share)
            for position, one in zip(positions, found, strict=True):
                answers[position] = Scored(item_ids=one.item_ids, scores=one.scores.tolist())
        return answers

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        self.live.describe(items)

    def apply(self, records: Iterable[ClickRecord], *, next_offset: int) -> None:
        """Apply records of `search-clicks` before `next_offset`."""
        feedback = self._feedback
        clicks: list[Click] = []
        undone: list[SourcePosition] = []
        for record in records:
            match record:
                case SearchClick():
                    clicks.append(_click(record))
                case Undo():
                    undone.append(record.undoes)
                case ForgetUpTo():
                    feedback.forget(record.user_pseudonym, record.up_to)
        # Undone and forgotten clicks do not count, in whatever order the records arrive.
        feedback.undo(undone)
        feedback.add(clicks)
        self._serve(next_offset - 1)

    def reset(self) -> None:
        """Forget all clicks: the topic was recreated."""
        self._feedback = self._no_feedback()
        self._votes.apply(removals=sorted(self._voters))
        self._voters.clear()
        self.live.reset()

    def _serve(self, position: int) -> None:
        changes = self._feedback.take_changes()
        upserts, removals = changes.memory.entered, changes.memory.left
        if upserts or removals:
            self._votes.apply(upserts=upserts, removals=removals)
            self._voters.difference_update(removals)
            self._voters.update(entry.entry_id for entry in upserts)
        item_ids = list(changes.item_ids)
        sums = self._feedback.sums_of(item_ids)
        states = self._feedback.states_of(item_ids, share=PAPER, new_share=NEW_ITEM_SHARE)
        refreshed = [
            ItemDelta(item_id=item_id, components=components, num_interactions=int(count), dropped=not count)
            for item_id, components, count in zip(item_ids, states.components, sums.counts, strict=True)
        ]
        self.live.apply(position, refreshed)

    def _no_feedback(self) -> QueryFeedback:
        base = self.live.base
        return QueryFeedback(
            self._encode,
            states=base.states,
            index=base.rows,
            pair_gate=base.pair_gate,
            num_query_components=self._num_query_components,
            capacity=MAX_REMEMBERED,
        )


def _click(record: SearchClick) -> Click:
    # The click's time is the broker's, so producers' clocks do not matter.
    return Click(
        (record.partition, record.offset),
        record.query,
        record.item_id,
        record.user_pseudonym,
        record.recorded_ms // 1000,
    )

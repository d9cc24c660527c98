"""PEFA-XL: the remembered interactions nearest to a query vote for their items, while the memory changes.

The similarity of two query states is their components' mean cosine without the user-id component. It is a dot product
of concatenated components, so a mutable index of vectors suffices.

Letters: B queries, k neighbours, P_q query components, d component width, n entries.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable.index import Memory, MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Cells
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.refresh import unit
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates

# 8-bit codes of all coordinates in few cells are used. On 33,000 states of the 8x4x64 model of MovieLens-1M (width 448,
# k 64, one core of a busy machine), a query takes 0.9 ms and the build 0.3 s. `default_cells` (4 bits of half the
# width, 227 cells) take 14 ms and 5 s; a scan of all vectors 23 ms. On 4,000 states a query takes 0.13 ms.
_CELLS = 64
_SCANNED = 512  # up to this many vectors, scanning all is as fast
_OBJECT_BYTES = 340  # bytes of an entry's Python objects; measured: 320
_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Voter:
    """A remembered interaction. Among a query's k nearest it has a vote: weight * similarity / k."""

    entry_id: str
    item_id: str
    interaction_type: str
    event_seconds: int
    weight: float
    similarity: float = 0.0
    vote: float = 0.0


class VotingIndex:
    def __init__(
        self,
        *,
        num_components: int,
        width: int,
        model_version: str,
        leave_out: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Make an empty index for states of P_q components of width d. One writer at a time; any number of readers.

        leave_out: the user-id component, if any. max_bytes: limit of the vectors' memory; `apply` raises IndexFullError
        beyond it.
        """
        if leave_out is not None and not 0 <= leave_out < num_components:
            raise ValueError(f"leave_out={leave_out} allowed: 0 to {num_components - 1}, or None")
        kept = [component for component in range(num_components) if component != leave_out]
        if not kept:
            raise ValueError(f"num_components={num_components} with leave_out={leave_out} leaves none; allowed: 1 more")
        self.num_components, self.width, self._kept = num_components, width, kept
        nothing = ItemStates(components=np.empty((0, 1, len(kept) * width), dtype=np.float32))
        self.index = MutableIndex(
            ItemBatch(item_ids=(), states=nothing),
            None,
            model_version=model_version,
            build=_build,
            max_bytes=max_bytes,
        )
        self._voters: dict[str, Voter] = {}

    def __len__(self) -> int:
        return self.index.num_items

    @property
    def version(self) -> str:
        return self.index.version.name

    @property
    def memory(self) -> Memory:
        """The vectors' memory. `bytes_per_entry` also counts other data."""
        return self.index.memory

    @property
    def bytes_per_entry(self) -> int:
        """A remembered query's bytes: its vector in float32 and 8-bit codes, and 340 for ids, item and time."""
        return 5 * len(self._kept) * self.width + _OBJECT_BYTES

    def apply(self, *, upserts: Sequence[MemoryEntry] = (), removals: Sequence[str] = ()) -> str:
        """Add and remove entries as one version; return its name. Unknown removals are ignored.

        Raises: ValueError for other shapes and repeated ids, IndexFullError; then nothing has changed.
        """
        for entry in upserts:
            if entry.components.shape != (self.num_components, self.width):
                raise ValueError(
                    f"entry {entry.entry_id!r} has components {entry.components.shape}; "
                    f"this memory holds {(self.num_components, self.width)}"
                )
        batch = None
        if upserts:
            vectors = self._vectors(np.stack([entry.components for entry in upserts]))
            batch = ItemBatch(
                item_ids=[entry.entry_id for entry in upserts], states=ItemStates(components=vectors[:, None])
            )
        # A voter is added before its vector and removed after it; `_nearest` retries if a search finds a removed one.
        before = {entry.entry_id: self._voters.get(entry.entry_id) for entry in upserts}
        self._voters.update({entry.entry_id: _voter(entry) for entry in upserts})
        try:
            change = self.index.apply(upserts=batch, removals=removals)
        except ValueError:
            for entry_id, old in before.items():
                if old is None:
                    del self._voters[entry_id]
                else:
                    self._voters[entry_id] = old
            raise
        for entry_id in removals:
            self._voters.pop(entry_id, None)
        return change.version

    def neighbours(self, queries: QueryStates, k: int) -> list[list[Voter]]:
        """Each query's k nearest entries, nearest first, ties by entry id.

        vote: the entry's part of equation 6, divided by k even if fewer were found. Raises: ValueError for k below 1 or
        other shapes.
        """
        return [
            [replace(voter, similarity=score, vote=voter.weight * score / k) for voter, score in found]
            for found in self._nearest(queries, k)
        ]

    def votes(self, queries: QueryStates, k: int) -> list[dict[str, float]]:
        """Each query's votes by item, from its k nearest entries: (1/k) sum of weight * similarity, in similarity
        units.

        Raises as `neighbours`. Source: arXiv:2312.02429, equation 6 with D_ii = 1/k (section 3.1).
        """
        votes: list[dict[str, float]] = []
        for found in self._nearest(queries, k):
            of_query: dict[str, float] = {}
            for voter, score in found:
                of_query[voter.item_id] = of_query.get(voter.item_id, 0.0) + voter.weight * score / k
            votes.append(of_query)
        return votes

    def _nearest(self, queries: QueryStates, k: int) -> list[list[tuple[Voter, float]]]:
        if k < 1:
            raise ValueError(f"k={k} allowed: at least 1")
        _, num_components, width = queries.components.shape
        if (num_components, width) != (self.num_components, self.width):
            raise ValueError(
                f"queries have {num_components} components of width {width}; "
                f"this memory holds {self.num_components} of {self.width}"
            )
        vectors = QueryStates(components=self._vectors(queries.components)[:, None])
        for _ in range(_ATTEMPTS):
            answer = self.index.version.search(vectors, k)
            found = [
                [
                    (voter, score)
                    for entry_id, score in zip(ids, scores, strict=False)
                    if (voter := self._voters.get(entry_id)) is not None
                ]
                for ids, scores in zip(answer.item_ids, answer.scores.tolist(), strict=True)
            ]
            if sum(map(len, found)) == sum(map(len, answer.item_ids)):
                break
            # An entry has been removed since, so search the newest version.
        return found

    def _vectors(self, components: npt.NDArray[np.floating]) -> FloatArray:
        """(n, P_q, d) -> (n, P' d): concatenated unit components, so that dot products are mean cosines."""
        kept = unit(components[:, self._kept]) / np.sqrt(len(self._kept))
        return np.asarray(kept.reshape(len(kept), len(self._kept) * self.width).astype(np.float32))


def with_votes(
    scores: npt.NDArray[np.floating], item_ids: Sequence[str], votes: Mapping[str, float], share: float
) -> npt.NDArray[np.float64]:
    """Final scores (n,) of n items from the model's (n,) and one query's votes: share * s + (1 - share) * vote.

    Raises: ValueError for a share outside [0, 1]. Source: arXiv:2312.02429, equation 6.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} allowed: 0 to 1")
    given = np.array([votes.get(item_id, 0.0) for item_id in item_ids])
    return np.asarray(share * np.asarray(scores, dtype=np.float64) + (1 - share) * given)


def _voter(entry: MemoryEntry) -> Voter:
    # Entries share interned strings, because they have few types and items.
    return Voter(
        entry_id=entry.entry_id,
        item_id=sys.intern(entry.item_id),
        interaction_type=sys.intern(entry.interaction_type),
        event_seconds=entry.event_seconds,
        weight=entry.weight,
    )


def _build(items: MolScorer) -> Mapping[str, Index]:
    """Build an exact index, which scans every vector or uses codes with a proven bound."""
    if items.num_items <= _SCANNED:
        return {"nearest": BruteForce(items)}
    return {"nearest": Quantized(items, cells=Cells(num_cells=min(_CELLS, items.num_items // 16), bits=8))}

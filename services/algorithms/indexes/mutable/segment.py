"""A segment: immutable items in order of their ids, and a log of later deaths.

A reader's version has the segment and the log's length, so it needs no lock. A version's first search makes its mask
from the latest one, so an update costs nothing per item. Ids are found by hash in sorted arrays: rebuilding a large
dictionary would block searches by the interpreter lock.

Letters: n rows, m requested ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import Index, Indices, Mask
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.item_table.categories import CategoryLists
from services.algorithms.item_table.ids import Hashes, ItemIds, hash_ids
from services.algorithms.lazy import lazy_property
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import RowCodes
from services.algorithms.rules.attributes import Codes, Columns, Condition, mask_of
from services.algorithms.scoring.states import ItemStates, PairGate


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """n items in order of their ids."""

    ids: ItemIds
    states: ItemStates
    categories: CategoryLists
    attributes: Columns

    def __len__(self) -> int:
        return len(self.ids)


class Segment:
    """n >= 1 rows, their scorer, and the algorithms over them, by name."""

    def __init__(self, rows: Rows, pair_gate: PairGate | None) -> None:
        self.rows = rows
        self._pair_gate = pair_gate
        self.indexes: Mapping[str, Index] = {}
        self._log = np.empty(16, dtype=np.int32)
        self.num_dead = 0
        self._is_dead = np.zeros(len(rows), dtype=bool)  # the writer's view, which is newer than any reader's
        self._latest: tuple[int, Mask] = (0, np.ones(len(rows), dtype=bool))

    def __len__(self) -> int:
        return len(self.rows)

    @lazy_property
    def scorer(self) -> MolScorer:
        return MolScorer(self.rows.states, self._pair_gate)

    @property
    def nbytes(self) -> int:
        """Bytes of states, algorithms or scorer, ids, categories, attributes, masks and the log."""
        rows = self.rows
        # Each algorithm counts the shared scorer.
        shared = self.scorer.nbytes
        searchable = shared + sum(index.nbytes - shared for index in self.indexes.values())
        ids = rows.ids.strings.nbytes + rows.ids.nbytes
        categories = 2 * rows.categories.codes.nbytes + rows.categories.offsets.nbytes
        attributes = sum(column.nbytes for column in rows.attributes.values())
        return searchable + ids + categories + attributes + 2 * len(rows) + self._log.nbytes

    @property
    def codes(self) -> dict[str, RowCodes]:
        coded = [index.row_codes for index in self.indexes.values() if isinstance(index, ScoredIndex)]
        return {key: codes for one in coded for key, codes in one.items()}

    # -- the writer, one at a time ----------------------------------------------------------------------------------

    def kill(self, rows: Indices) -> None:
        """Append distinct living rows to the death log, for the next version."""
        end = self.num_dead + len(rows)
        if end > len(self._log):
            longer = np.empty(max(end, 2 * len(self._log)), dtype=np.int32)
            longer[: self.num_dead] = self._log[: self.num_dead]
            self._log = longer  # the old log still has all entries of its readers
        self._log[self.num_dead : end] = rows
        self._is_dead[rows] = True
        self.num_dead = end

    def find_living(self, item_ids: Sequence[str], hashes: Hashes) -> Indices:
        """Rows (m,) of the ids, -1 if missing or dead for the writer."""
        rows = self.find(item_ids, hashes)
        rows[(rows >= 0) & self._is_dead[rows]] = -1
        return rows

    # -- readers, any number, with the count of deaths of their version ---------------------------------------------

    def died(self, start: int, end: int) -> Indices:
        """Rows of entries `start` to `end` of the death log."""
        return self._log[start:end].astype(np.int64)

    def alive(self, num_dead: int) -> Mask | None:
        """Which rows live after `num_dead` deaths: (n,), read-only; None if all do."""
        if not num_dead:
            return None
        known, mask = self._latest
        if known == num_dead:
            return mask
        if known < num_dead:
            mask = mask.copy()
            mask[self._log[known:num_dead]] = False
            mask.flags.writeable = False
            self._latest = (num_dead, mask)  # racing searches write nearly equal masks; each uses its own
            return mask
        mask = np.ones(len(self), dtype=bool)  # the version is older than that of the latest search
        mask[self._log[:num_dead]] = False
        return mask

    def find(self, item_ids: Sequence[str], hashes: Hashes) -> Indices:
        """Rows (m,) of the ids, living or dead, -1 for unknown ones."""
        return self.rows.ids.find(item_ids, hashes)

    @lazy_property
    def _by_category(self) -> tuple[npt.NDArray[np.int32], Indices]:
        categories = self.rows.categories
        rows = np.repeat(np.arange(len(self)), categories.offsets[1:] - categories.offsets[:-1])
        order = np.argsort(categories.codes, kind="stable")
        return categories.codes[order], rows[order]

    def members(self, code: int) -> Indices:
        """A category's rows, living or dead."""
        codes, rows = self._by_category
        return rows[np.searchsorted(codes, code) : np.searchsorted(codes, code, side="right")]

    def prepare(self) -> None:
        """Compute lazy parts."""
        self.scorer  # noqa: B018
        self.rows.ids.prepare()
        self._by_category  # noqa: B018


@dataclass(frozen=True, slots=True)
class SegmentItems:
    """A segment's rows, living or dead, for filters. codes: codes of categories. tags: codes of each attribute's
    tags.
    """

    segment: Segment
    codes: Mapping[str, int]
    tags: Codes

    def __len__(self) -> int:
        return len(self.segment)

    def named(self, item_ids: Sequence[str]) -> Mask:
        rows = self.segment.find(item_ids, hash_ids(item_ids))
        mask = np.zeros(len(self), dtype=bool)
        mask[rows[rows >= 0]] = True
        return mask

    def of_categories(self, names: Sequence[str]) -> Mask:
        mask = np.zeros(len(self), dtype=bool)
        for name in names:
            if name in self.codes:
                mask[self.segment.members(self.codes[name])] = True
        return mask

    def meeting(self, where: Sequence[Condition]) -> Mask:
        return mask_of(where, self.segment.rows.attributes, self.tags)


def rows_of(ids: ItemIds, states: ItemStates, categories: CategoryLists, attributes: Columns) -> Rows:
    """Sort n items by id; sorted ones are not copied."""
    if ids.strings.is_ascending():
        return Rows(ids=ids, states=states, categories=categories, attributes=attributes)
    item_ids = list(ids)
    order = np.array(sorted(range(len(ids)), key=item_ids.__getitem__))  # code points: the byte order of UTF-8
    return Rows(
        ids=ItemIds(ids.strings.taken(order), ids.hashes[order]),
        states=states.take(order),
        categories=categories.take(order),
        attributes={name: column[order] for name, column in attributes.items()},
    )

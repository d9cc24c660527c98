"""Each item's sum of contributions, in integers: any order of additions and removals gives the same bits.

So a forgotten user leaves no trace, and two processes can compare digests of 16 bytes. The caller rejects interactions
that arrive after their removal.

Letters: n interactions or requested items, P_x item components, d component width.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.contribution import SCALE, SCALE_BITS, FixedPoint
from services.algorithms.pefa.exact_floats import Doubles

Arrays = dict[str, npt.NDArray[np.generic]]

MAX_TOTAL_WEIGHT = 2**31
"""Limit of the sum of |weights| of one item."""

_GROWTH = 2
_FIRST_ROWS = 64
_ROW_OBJECT_BYTES = 216  # an item's Python objects
_MOST = 1 << 62  # twice `MAX_TOTAL_WEIGHT` in fixed point; a batch's larger weights and totals are set to this


@dataclass(slots=True)
class _Item:
    """hash: the item's part of the digest, as last computed; 0 until it is computed."""

    row: int
    hash: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SumsOf:
    """The sums of n items, zero for an item without interactions.

    Shapes: sums (n, P_x, d); evidence (n,) = sum |w|; coherence (n,) = sum_px ||sum_px|| / evidence in [0, 1]: 1 when
    all interactions point in one direction, 0 when they cancel; counts (n,) interactions.
    """

    sums: Doubles
    evidence: Doubles
    coherence: Doubles
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Delta:
    """A batch, added up by row: distinct rows (r,), sums (r, P_x, d), weights (r,) and counts (r,)."""

    rows: FixedPoint
    sums: FixedPoint
    weights: FixedPoint
    counts: FixedPoint

    @classmethod
    def of(cls, rows: FixedPoint, contributions: FixedPoint, weights: FixedPoint) -> "_Delta":
        """Add up each row's interactions; `rows` (n,) may repeat."""
        if not len(rows):
            return cls(rows, contributions, weights, np.zeros(0, dtype=np.int64))
        order = np.argsort(rows, kind="stable")
        distinct, starts = np.unique(rows[order], return_index=True)
        sums = np.add.reduceat(contributions[order], starts, axis=0)
        totals = np.add.reduceat(weights[order], starts)
        # A total that may have overflowed becomes `_MOST`, which is above every allowed total.
        totals[np.add.reduceat(weights[order].astype(np.float64), starts) > _MOST] = _MOST
        return cls(distinct, sums, totals, np.diff(np.append(starts, len(rows))))


class ItemSums:
    """Fixed-point sums of P_x components of width d by item id. Not safe for concurrent writers."""

    def __init__(self, *, num_components: int, width: int) -> None:
        for name, value in (("num_components", num_components), ("width", width)):
            if value < 1:
                raise ValueError(f"{name}={value} allowed: at least 1")
        self.num_components, self.width = num_components, width
        self._items: dict[str, _Item] = {}
        self._sums = np.zeros((_FIRST_ROWS, num_components, width), dtype=np.int64)
        self._weights = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._counts = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._free: list[int] = []
        self._used = 0
        # The sum of the items' hashes, and the items to hash again.
        self._mix = 0
        self._unhashed: set[str] = set()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    @property
    def bytes_per_item(self) -> int:
        return 8 * self.num_components * self.width + 16 + _ROW_OBJECT_BYTES

    @property
    def nbytes(self) -> int:
        arrays = self._sums.nbytes + self._weights.nbytes + self._counts.nbytes
        return arrays + self._used * _ROW_OBJECT_BYTES

    def add(self, item_ids: Sequence[str], contributions: FixedPoint, weights: npt.NDArray[np.float64]) -> None:
        """Add n interactions, all or none.

        contributions (n, P_x, d): what `Contributions` returned for these weights (n,). Raises: ValueError for shapes
        that disagree, or a total weight of an item above `MAX_TOTAL_WEIGHT`.
        """
        fixed = self._checked(item_ids, contributions, weights)
        rows = np.fromiter(map(self._row, item_ids), np.int64, len(item_ids))
        delta = _Delta.of(rows, contributions, fixed)
        full = self._weights[delta.rows] > MAX_TOTAL_WEIGHT * SCALE - delta.weights
        if full.any():
            item_id = item_ids[int(np.flatnonzero(rows == delta.rows[full][0])[0])]
            self._release(item_ids)
            raise ValueError(f"item {item_id!r}: weights add up to more than {MAX_TOTAL_WEIGHT}")
        self._sums[delta.rows] += delta.sums
        self._weights[delta.rows] += delta.weights
        self._counts[delta.rows] += delta.counts
        self._unhashed.update(item_ids)

    def remove(self, item_ids: Sequence[str], contributions: FixedPoint, weights: npt.NDArray[np.float64]) -> None:
        """Remove n interactions, exactly as added; all or none. The caller ensures that they were added.

        Raises: ValueError if shapes disagree, an item has fewer interactions, or removing an item's last interaction
        leaves a remainder.
        """
        fixed = self._checked(item_ids, contributions, weights)
        unknown = next((item_id for item_id in item_ids if item_id not in self._items), None)
        if unknown is not None:
            raise ValueError(f"item {unknown!r} has no (further) interaction to remove")
        rows = np.fromiter((self._items[item_id].row for item_id in item_ids), np.int64, len(item_ids))
        delta = _Delta.of(rows, contributions, fixed)
        sums, total = self._sums[delta.rows] - delta.sums, self._weights[delta.rows] - delta.weights
        counts = self._counts[delta.rows] - delta.counts
        if (counts < 0).any():
            item_id = item_ids[int(np.flatnonzero(rows == delta.rows[counts < 0][0])[0])]
            raise ValueError(f"item {item_id!r} has no (further) interaction to remove")
        left_over = (counts == 0) & ((total != 0) | (sums != 0).any(axis=(1, 2)))
        if left_over.any():
            item_id = item_ids[int(np.flatnonzero(rows == delta.rows[left_over][0])[0])]
            raise ValueError(f"item {item_id!r}: what is to be removed is not what had been added")
        self._sums[delta.rows], self._weights[delta.rows], self._counts[delta.rows] = sums, total, counts
        self._unhashed.update(item_ids)
        self._release(item_ids)

    def drop(self, item_id: str) -> None:
        """Remove an item, as if it had never been seen."""
        row = self._items[item_id].row
        self._counts[row] = self._sums[row] = self._weights[row] = 0
        self._release([item_id])

    def of(self, item_ids: Sequence[str]) -> SumsOf:
        """The sums of these items (n,), known or not."""
        num = len(item_ids)
        sums, weights = np.zeros((num, self.num_components, self.width)), np.zeros(num)
        counts = np.zeros(num, dtype=np.int64)
        found = [self._items.get(item_id) for item_id in item_ids]
        positions = [position for position, item in enumerate(found) if item is not None]
        rows = [item.row for item in found if item is not None]
        sums[positions], weights[positions], counts[positions] = (
            self._sums[rows],
            self._weights[rows],
            self._counts[rows],
        )
        sums, weights = np.ldexp(sums, -SCALE_BITS), np.ldexp(weights, -SCALE_BITS)
        lengths = np.sqrt((sums * sums).sum(axis=2)).sum(axis=1)
        coherence = np.divide(lengths, weights, out=np.zeros(num), where=weights > 0)
        return SumsOf(sums=sums, evidence=weights, coherence=np.minimum(coherence, 1), counts=counts)

    def counts(self, item_ids: Sequence[str]) -> list[int]:
        """The interactions of each of these items, which must be here."""
        return [int(self._counts[self._items[item_id].row]) for item_id in item_ids]

    def digest(self) -> str:
        """32 hex digits of the content, independent of order.

        Cost: hashing the items changed since `hash_some` or the last digest.
        """
        while not self.hash_some():
            pass
        digest = hashlib.blake2b(repr((self.num_components, self.width)).encode(), digest_size=16)
        digest.update((self._mix % (1 << 128)).to_bytes(16, "little"))
        return digest.hexdigest()

    def hash_some(self, num_bytes: int = 1 << 18) -> bool:
        """Hash about `num_bytes` of changed items for the next digest; return True when none is left.

        The default takes a millisecond or two, so a caller can release its lock between calls.
        """
        while self._unhashed and num_bytes > 0:
            item_id = self._unhashed.pop()
            item = self._items.get(item_id)
            if item is not None:
                before, item.hash = item.hash, self._hash(item_id, item)
                self._mix += item.hash - before
                num_bytes -= 8 * self.num_components * self.width
        return not self._unhashed

    def _hash(self, item_id: str, item: _Item) -> int:
        encoded = item_id.encode()
        numbers = (len(encoded), int(self._weights[item.row]), int(self._counts[item.row]))
        digest = hashlib.blake2b(np.array(numbers, dtype=np.int64).tobytes() + encoded, digest_size=16)
        digest.update(self._sums[item.row].data)
        return int.from_bytes(digest.digest(), "little")

    def pick(self, item_ids: Sequence[str]) -> Arrays:
        """Copy items that are here, without ids, for a checkpoint."""
        rows = [self._items[item_id].row for item_id in item_ids]
        return {"sums": self._sums[rows], "weights": self._weights[rows], "counts": self._counts[rows]}

    def put(self, item_ids: Sequence[str], arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Insert new items from `pick`. Raises: ValueError for inconsistent arrays."""
        counts, sums = np.asarray(arrays["counts"], dtype=np.int64), np.asarray(arrays["sums"], dtype=np.int64)
        if len({len(item_ids), *map(len, (counts, sums, arrays["weights"]))}) > 1:
            raise ValueError(f"arrays disagree on the number of items: {len(counts)} counts, {len(sums)} sums")
        if (counts < 1).any() or sums.shape[1:] != (self.num_components, self.width):
            raise ValueError(f"sums has shape {sums.shape}, and counts begin at {counts.min(initial=1)}")
        start = self._used
        if start + len(sums) > len(self._sums):
            self._grow(start + len(sums))
        self._used += len(sums)
        into = slice(start, self._used)
        self._sums[into], self._weights[into], self._counts[into] = sums, arrays["weights"], counts
        self._items.update((item_id, _Item(row)) for row, item_id in enumerate(item_ids, start))
        self._unhashed.update(item_ids)

    def _checked(
        self, item_ids: Sequence[str], contributions: FixedPoint, weights: npt.NDArray[np.float64]
    ) -> FixedPoint:
        num, wanted = len(item_ids), (len(item_ids), self.num_components, self.width)
        if contributions.shape != wanted or contributions.dtype != np.int64:
            raise ValueError(
                f"contributions has shape {contributions.shape} of {contributions.dtype}; expected {wanted} of int64"
            )
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != (num,):
            raise ValueError(f"weights {weights.shape}; expected ({num},)")
        if not np.isfinite(weights).all():
            raise ValueError("weights holds NaN or infinite values; every value must be finite")
        return np.asarray(np.rint(np.minimum(np.abs(weights), _MOST / SCALE) * SCALE).astype(np.int64))

    def _row(self, item_id: str) -> int:
        item = self._items.get(item_id)
        if item is None:
            if not self._free:
                if self._used == len(self._counts):
                    self._grow()
                self._free.append(self._used)
                self._used += 1
            item = self._items[item_id] = _Item(self._free.pop())
        return item.row

    def _grow(self, least: int = 0) -> None:
        size = max(_FIRST_ROWS, _GROWTH * self._used, least)
        for name in ("_sums", "_weights", "_counts"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), dtype=np.int64)
            new[: self._used] = old[: self._used]
            setattr(self, name, new)

    def _release(self, item_ids: Sequence[str]) -> None:
        """Drop items without interactions."""
        for item_id in dict.fromkeys(item_ids):
            item = self._items[item_id]
            if not self._counts[item.row]:
                self._free.append(item.row)
                self._mix -= item.hash
                del self._items[item_id]

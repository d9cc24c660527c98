"""Find the N best items of each of many query vectors in one pass, without storing the dot products.

It replaces the library call per component pair of arXiv:2407.15462 (Algorithm 2, line 8). One pass multiplies every
query vector by every item component, with a rising threshold per pair.

Letters: B queries, Q vectors per query (P_q), X items, S item components (P_x), d width, N results per pair.
"""

import ctypes
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels
from services.algorithms.native.threads import compute_threads

__all__ = ["GroupedBest", "GroupedTopK", "Storage", "from_bfloat16", "to_bfloat16"]

FloatArray = npt.NDArray[np.float32]
Storage = Literal["rows", "float32", "bfloat16"]
_PANEL = 64  # items whose floats are adjacent, as in cpu.cpp
_BUFFER_BYTES = 64 << 20  # of candidates: queries are processed in groups below it


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedBest:
    """The N best of each (query vector, item component), best first, equal scores by row.

    Shapes: rows (B, Q, S, N') int64 and scores (B, Q, S, N') float32 with N' = min(N, X), padded with -1 and -inf;
    following (B, Q, S): the best omitted score, -inf without one.
    """

    rows: npt.NDArray[np.int64]
    scores: FloatArray
    following: FloatArray


class GroupedTopK:
    """Item vectors prepared for grouped top-N. Thread-safe.

    Cost: B Q S X d float32 multiply-adds, and about N log(X / N) candidates written per (query vector, component).
    Memory besides the answer: at most 64 MB of candidates, or one query's candidates if more.
    """

    def __init__(self, items: FloatArray, *, storage: Storage = "rows") -> None:
        """Prepare items (X, S, d).

        storage: "rows" keeps a view of `items`; "float32" copies them into panels, so that the scan need not transpose;
        "bfloat16" also rounds them, and scores are of the rounded vectors. Raises: ValueError for another shape, no
        items, or 2**32 items and more.
        """
        if items.ndim != 3 or not 0 < len(items) < 2**32 or 0 in items.shape:
            raise ValueError(f"items has shape {items.shape}; expected (X, S, d) with 1 <= X < 2**32, S and d >= 1")
        self.num_items, self.num_groups, self.width = items.shape
        self.storage: Storage = storage
        self._items: npt.NDArray[np.generic] = np.ascontiguousarray(items, dtype=np.float32)
        if storage != "rows":
            self._items = _panels(items, storage)

    @property
    def nbytes(self) -> int:
        """Bytes of prepared items; a view of `items` counts 0."""
        return 0 if self.storage == "rows" else self._items.nbytes

    def vectors_of(self, rows: npt.NDArray[np.int64]) -> FloatArray:
        """Some items' vectors as stored: rows (...) -> (..., S, d) float32."""
        if self.storage == "rows":
            return np.asarray(self._items[rows], dtype=np.float32)
        found = self._items[rows // _PANEL, :, :, rows % _PANEL]
        return from_bfloat16(found) if self.storage == "bfloat16" else np.asarray(found, dtype=np.float32)

    def search(
        self,
        queries: FloatArray,
        size: int,
        allowed: npt.NDArray[np.bool_] | None = None,
        *,
        kernels: ctypes.CDLL | None = None,
    ) -> GroupedBest:
        """The `size` best allowed items of each query vector and item component.

        Shapes, which the caller checks: queries (B, Q, d), allowed (X,) or (B, X) or None for all. kernels: library to
        use, by default this processor's.
        """
        num_queries, num_vectors, _ = queries.shape
        size = min(size, self.num_items)
        shape = (num_queries, num_vectors, self.num_groups)
        best = GroupedBest(
            rows=np.full((*shape, size), -1, dtype=np.int64),
            scores=np.full((*shape, size), -np.inf, dtype=np.float32),
            following=np.full(shape, -np.inf, dtype=np.float32),
        )
        if not num_queries or not num_vectors:
            return best
        library = kernels or load_kernels("grouped_top_k")
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        mask = None if allowed is None else np.ascontiguousarray(allowed).view(np.uint8)
        threads = compute_threads()
        per_query = num_vectors * self.num_groups * threads * 8 * (2 * (size + 1) + _PANEL)
        step = max(1, _BUFFER_BYTES // per_query)
        whole = ctypes.c_int64
        for start in range(0, num_queries, step):
            some = slice(start, start + step)
            is_shared = mask is None or mask.ndim == 1
            library.freshet_grouped_top_k(
                address(self._items),
                ctypes.c_int(("rows", "float32", "bfloat16").index(self.storage)),
                *map(whole, (self.num_items, self.num_groups, self.width)),
                address(queries[some]),
                *map(whole, queries[some].shape[:2]),
                address(mask if mask is None or is_shared else mask[some]),
                whole(0 if is_shared else self.num_items),
                whole(size),
                *(address(array[some]) for array in (best.rows, best.scores, best.following)),
                ctypes.c_int(threads),
            )
        return best


def _panels(items: FloatArray, storage: Storage) -> npt.NDArray[np.generic]:
    """Items (X, S, d) as (ceil(X / 64), S, d, 64), the last panel padded with zeros."""
    num_items, num_groups, width = items.shape
    num_panels = -(-num_items // _PANEL)
    out: npt.NDArray[np.generic] = np.zeros(
        (num_panels, num_groups, width, _PANEL), dtype=np.float32 if storage == "float32" else np.int16
    )
    step = 1024
    for panel in range(0, num_panels, step):
        some = items[panel * _PANEL : (panel + step) * _PANEL].astype(np.float32)
        whole: npt.NDArray[np.generic] = np.zeros(
            (-(-len(some) // _PANEL) * _PANEL, num_groups, width), dtype=out.dtype
        )
        whole[: len(some)] = some if storage == "float32" else to_bfloat16(some)
        out[panel : panel + step] = whole.reshape(-1, _PANEL, num_groups, width).transpose(0, 2, 3, 1)
    return out


def from_bfloat16(bits: npt.NDArray[np.generic]) -> FloatArray:
    return (bits.astype(np.int32) << 16).view(np.float32)


def to_bfloat16(values: FloatArray) -> npt.NDArray[np.int16]:
    """The 16 bits of finite values' nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).view(np.int16)

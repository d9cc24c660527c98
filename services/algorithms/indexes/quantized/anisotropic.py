"""A first stage that searches tangents in score-aware product codes by FAISS, with half the bits of scalar codes.

Tangents (tangents.py) are searched among item vectors. A vector is coded as its cell and a product-quantized residual:
after a rotation, 16 codewords for every two coordinates, learned under the loss that preserves high scores
(arXiv:1908.10396; offline/training/codebooks). FAISS's fast scan adds up 8-bit tables, 32 items at a time, and filters
inside the scan. Its rounding has no useful bound, so the certificate is "estimate". The index needs FAISS (extra
bench-cpu or bench-gpu) and a bundle's codebooks. Measurements: decision 058.

Letters: X items, M query vectors, m codewords an item, N pool size. Memory: m / 2 + 8 bytes per item, plus the cells.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import Indices, Mask
from services.algorithms.indexes.quantized.codebooks import Codebooks, InvertedCodes
from services.algorithms.indexes.quantized.tangents import TangentIndex, VectorScan
from services.algorithms.native.threads import compute_threads
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import CellAnswer, Visit, codes_key
from services.algorithms.ops.top_rows import count_passing
from services.algorithms.scoring.states import FloatArray


class Anisotropic(TangentIndex):
    """A `TangentIndex` over product codes."""

    name = "anisotropic"

    def __init__(self, items: MolScorer, *, codebooks: Codebooks | None, **options: Any) -> None:
        """Prepare like `TangentIndex`. Raises: ValueError also without codebooks, or if their width differs."""
        self._codebooks = codebooks
        if codebooks is not None and codebooks.gate_scale is not None:
            self._gate_scale = codebooks.gate_scale.astype(np.float64)
        super().__init__(items, **options)

    def _scan(self) -> VectorScan:
        codebooks = self._codebooks
        if codebooks is None:
            raise ValueError(
                "anisotropic needs codebooks, and the bundle has none; `freshet train` and `freshet index` write them"
            )
        codebooks.check_width(self._slopes.width)
        part, shape = f"{self.name}-slopes", (self.num_items, self._slopes.width)
        scan = FastScan(self._coder(part, self._slopes.vectors, shape, cells=codebooks, seed=0))
        self._parts[codes_key(part, codebooks, 0)] = scan.codes
        self._bytes_of_codes += scan.nbytes
        return scan


class FastScan:
    """X vectors in FAISS's inverted file of 4-bit product codes. Thread-safe."""

    def __init__(self, codes: InvertedCodes) -> None:
        faiss = imported_faiss()
        self.num_cells, self._num_items = codes.num_cells, codes.num_points
        index = inverted_fast_scan(codes)
        # The rotation is applied here: only FAISS's inner index accepts parameters of a single search.
        self._whole, self._file = index, faiss.downcast_index(faiss.extract_index_ivf(index))
        self._rotation, self._width = codes.rotation, codes.width
        self._empty = codes.take(np.zeros(0, dtype=np.int64))
        self._sizes = np.bincount(codes.cells, minlength=codes.num_cells)
        # In FAISS an id has 8 bytes, and codes are padded to blocks of 32 items.
        blocks = int((-(-self._sizes // 32) * 32).sum())
        self.nbytes = blocks * -(-codes.num_subspaces // 2) + 8 * codes.num_points + codes.centres.nbytes

    def codes(self) -> InvertedCodes:
        """The codes, read from FAISS, which takes 0.3 s per million items."""
        return replace(self._empty, **inverted_lists(self._file, self._empty))

    def pool(self, queries: FloatArray, size: int, *, visit: Visit, allowed: Mask | None = None) -> CellAnswer:
        """The `size` best allowed items by code, with their scores, padded with -1 and -inf.

        allowed: (X,). Bounds are NaN. More cells than `visit` are visited if these have too few allowed items.
        """
        size = min(size, self._num_items)
        wanted = min(size, int(count_passing(allowed, 1, self._num_items)[0]))
        queries = np.pad(queries, ((0, 0), (0, self._width - queries.shape[1])))
        vectors = queries if self._rotation is None else queries @ self._rotation
        probes = min(visit.probes, self.num_cells)
        while True:
            answer = self._searched(np.ascontiguousarray(vectors), size, probes, allowed)
            if np.count_nonzero(answer.rows >= 0, axis=1).min(initial=size) >= wanted:
                return answer
            if probes == self.num_cells:
                return _filled(answer, wanted, np.arange(self._num_items) if allowed is None else allowed.nonzero()[0])
            probes = min(4 * probes, self.num_cells)

    def _searched(self, vectors: FloatArray, size: int, probes: int, allowed: Mask | None) -> CellAnswer:
        faiss = imported_faiss()
        faiss.omp_set_num_threads(compute_threads())  # OpenMP's setting is per thread
        selector = None if allowed is None else faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        settings = faiss.SearchParametersIVF(nprobe=probes, sel=selector)
        found, rows = self._file.search(vectors, size, params=settings)
        touched = np.full((len(vectors), 2), self._num_items)
        if probes < self.num_cells:
            touched[:, 0] = self._sizes[self._file.quantizer.search(vectors, probes)[1]].sum(axis=1)
        return CellAnswer(
            rows=rows.astype(np.int64),
            scores=np.where(rows >= 0, found.astype(np.float64), -np.inf),
            bounds=np.full(len(vectors), np.nan),
            touched=touched,
        )


def _filled(answer: CellAnswer, wanted: int, allowed: Indices) -> CellAnswer:
    """Add allowed rows up to `wanted`: FAISS omits a row whose codewords are all the worst (integer score 0)."""
    for rows, scores in zip(answer.rows, answer.scores, strict=True):
        found = np.count_nonzero(rows >= 0)
        rows[found:wanted] = np.setdiff1d(allowed, rows)[: wanted - found]
        scores[found:wanted] = scores[:found].min(initial=0.0)
    return answer


def inverted_fast_scan(codes: InvertedCodes) -> Any:
    """A faiss.IndexIVFPQFastScan of our codebooks and codes; ids are 0..X-1.

    It accepts ID selectors; its inner products, from 8-bit tables, are coarse. For rotated codes it is inside an
    IndexPreTransform, which rotates queries; `faiss.extract_index_ivf` returns the inner index.

    Raises: ValueError for 8-bit codes, or without FAISS.
    """
    if codes.code_bits != 4:
        raise ValueError(f"code_bits is {codes.code_bits}; FAISS's fast scan reads 4-bit codes only")
    faiss = imported_faiss()
    return rotating(codes, faiss.IndexIVFPQFastScan(inverted_index(codes)))


def inverted_lists(index: Any, codes: InvertedCodes) -> dict[str, npt.NDArray[Any]]:
    """The cells (X,) and codes (X, m) of an `inverted_fast_scan` of `codes`. Searches may run meanwhile."""
    faiss = imported_faiss()
    cells = np.empty(index.ntotal, dtype=np.int32)
    unpacked = np.empty((index.ntotal, codes.num_subspaces), dtype=np.uint8)
    lists = index.orig_invlists = faiss.ArrayInvertedLists(codes.num_cells, -(-codes.num_subspaces // 2))
    index.reconstruct_orig_invlists()
    for cell in range(codes.num_cells):
        if size := lists.list_size(cell):
            rows = faiss.rev_swig_ptr(lists.get_ids(cell), size)
            packed = faiss.rev_swig_ptr(lists.get_codes(cell), size * lists.code_size).reshape(size, -1)
            cells[rows] = cell
            unpacked[rows] = np.stack([packed & 15, packed >> 4], axis=2).reshape(size, -1)[:, : codes.num_subspaces]
    index.orig_invlists = None
    return {"cells": cells, "codes": unpacked}


def imported_faiss() -> Any:
    """The FAISS module. Raises: ValueError that names the extra if FAISS is not installed."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise ValueError("FAISS is not installed; it comes with the extra bench-cpu, or bench-gpu") from error
    return faiss


def inverted_index(codes: InvertedCodes) -> Any:
    """A faiss.IndexIVFPQ of the rotated vectors, which scores by float tables. Raises: ValueError without FAISS."""
    faiss = imported_faiss()
    coarse = faiss.IndexFlatIP(codes.width)
    coarse.add(np.ascontiguousarray(codes.centres))
    index: Any = faiss.IndexIVFPQ(
        coarse, codes.width, codes.num_cells, codes.num_subspaces, codes.code_bits, faiss.METRIC_INNER_PRODUCT
    )
    # `add` would encode by plain l2.
    faiss.copy_array_to_vector(np.ascontiguousarray(codes.codebooks).ravel(), index.pq.centroids)
    index.is_trained = True
    packed = codes.packed()
    order = np.argsort(codes.cells, kind="stable")
    bounds = np.searchsorted(codes.cells[order], np.arange(codes.num_cells + 1))
    for cell in np.flatnonzero(np.diff(bounds)):
        rows = np.ascontiguousarray(order[bounds[cell] : bounds[cell + 1]])
        block = np.ascontiguousarray(packed[rows])
        index.invlists.add_entries(int(cell), len(rows), faiss.swig_ptr(rows), faiss.swig_ptr(block))
    index.ntotal = codes.num_points
    return index


def rotating(codes: InvertedCodes, index: Any) -> Any:
    """An index that rotates queries by the codes' rotation, if any."""
    if codes.rotation is None:
        return index
    faiss = imported_faiss()
    turn: Any = faiss.LinearTransform(codes.width, codes.width, False)
    # FAISS multiplies from the left.
    faiss.copy_array_to_vector(np.ascontiguousarray(codes.rotation.T).ravel(), turn.A)
    turn.is_trained = True
    turn.is_orthonormal = True
    return faiss.IndexPreTransform(turn, index)

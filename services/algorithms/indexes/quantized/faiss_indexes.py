"""FAISS inverted files filled with our codebooks and codes.

Centroids and packed codes are copied in, because `add` would encode by plain l2. Rotated codes become an
IndexPreTransform, which rotates queries (`faiss.extract_index_ivf` finds the inner index). FAISS is optional, so
functions import it. All indexes score by inner product; ids are 0..X-1.

Letters: X points, m subspaces.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.quantized.inverted_codes import InvertedCodes


def inverted_fast_scan(codes: InvertedCodes) -> Any:
    """A faiss.IndexIVFPQFastScan: it accepts ID selectors; scores, from 8-bit tables, are coarse.

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
    """The module. Raises: ValueError, with the extra, if it is not installed."""
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

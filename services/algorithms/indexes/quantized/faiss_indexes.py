"""Our codebooks and codes inside FAISS's inverted files, which scan them faster than anything written here would.

Centroids and packed codes are copied in; `add` is never called, for it would encode again by plain l2 and undo the
anisotropy. Codes with a rotation become an IndexPreTransform around the same index, which rotates queries
(`faiss.extract_index_ivf` finds what is inside). FAISS is optional: it is imported when a function is called. All
indexes score by inner product; ids are 0 .. X - 1.

Letters: X points, C cells, m subspaces.
"""

from typing import Any

import numpy as np

from services.algorithms.indexes.quantized.inverted_codes import InvertedCodes


def inverted_fast_scan(codes: InvertedCodes) -> Any:
    """faiss.IndexIVFPQFastScan: it takes ID selectors, and its scores, from 8-bit tables, are coarse.

    Raises: ValueError for 8-bit codes, and where FAISS is not installed.
    """
    if codes.code_bits != 4:
        raise ValueError(f"code_bits is {codes.code_bits}; FAISS's fast scan reads 4-bit codes only")
    faiss = imported_faiss()
    return _rotating(codes, faiss.IndexIVFPQFastScan(_inverted_index(codes)))


def inverted_index(codes: InvertedCodes) -> Any:
    """faiss.IndexIVFPQ, which scores by float tables. Raises: ValueError where FAISS is not installed."""
    return _rotating(codes, _inverted_index(codes))


def imported_faiss() -> Any:
    """The module. Raises: ValueError, naming the extra, where it is not installed."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise ValueError("FAISS is not installed; it comes with the extra bench-cpu, or bench-gpu") from error
    return faiss


def _inverted_index(codes: InvertedCodes) -> Any:
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
        held = np.ascontiguousarray(packed[rows])
        index.invlists.add_entries(int(cell), len(rows), faiss.swig_ptr(rows), faiss.swig_ptr(held))
    index.ntotal = codes.num_points
    return index


def _rotating(codes: InvertedCodes, index: Any) -> Any:
    if codes.rotation is None:
        return index
    faiss = imported_faiss()
    turn: Any = faiss.LinearTransform(codes.width, codes.width, False)
    # FAISS multiplies from the left.
    faiss.copy_array_to_vector(np.ascontiguousarray(codes.rotation.T).ravel(), turn.A)
    turn.is_trained = True
    turn.is_orthonormal = True
    return faiss.IndexPreTransform(turn, index)

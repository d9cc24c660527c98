"""Our codebooks and codes inside FAISS's indexes, which scan them faster than anything written here would.

Centroids and packed codes are copied in; `add` is never called, for it would encode again by plain l2 and undo the
anisotropy. Fast-scan indexes are made from these by FAISS's own constructors; their scores come from 8-bit tables and
are coarse. A quantizer with a rotation becomes an IndexPreTransform around the same index, which rotates queries
(`faiss.extract_index_ivf` finds what is inside). FAISS is optional: it is imported when a function is called. All
indexes score by inner product.

Letters: X points, d width, C cells, m subspaces.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.quantization.inverted_file import InvertedFileQuantizer
from services.algorithms.quantization.product_quantizer import CodeArray, ProductQuantizer


def packed_codes(codes: CodeArray, code_bits: int) -> CodeArray:
    """FAISS's layout (X, ceil(m * bits / 8)) of codes (X, m): two 4-bit codes a byte, the first in its low half."""
    if code_bits == 8:
        return np.ascontiguousarray(codes)
    even, odd = codes[:, 0::2], codes[:, 1::2]
    packed = even.copy()
    packed[:, : odd.shape[1]] |= odd << 4
    return packed


def product_index(quantizer: ProductQuantizer, codes: CodeArray) -> Any:
    """faiss.IndexPQ over codes (X, m), ids 0 .. X - 1."""
    return _rotating(quantizer, _product_index(quantizer, codes))


def _product_index(quantizer: ProductQuantizer, codes: CodeArray) -> Any:
    import faiss

    _check_codes(quantizer, codes)
    index = faiss.IndexPQ(quantizer.width, quantizer.num_subspaces, quantizer.code_bits, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.ascontiguousarray(quantizer.codebooks).ravel(), index.pq.centroids)
    faiss.copy_array_to_vector(packed_codes(codes, quantizer.code_bits).ravel(), index.codes)
    index.ntotal = len(codes)
    index.is_trained = True
    return index


def product_fast_scan(quantizer: ProductQuantizer, codes: CodeArray) -> Any:
    """faiss.IndexPQFastScan over 4-bit codes (X, m); scores are within its uint8 tables' error of the decoded ones.

    It rejects ID selectors. Raises: ValueError for 8-bit codes.
    """
    import faiss

    _check_four_bits(quantizer)
    return _rotating(quantizer, faiss.IndexPQFastScan(_product_index(quantizer, codes)))


def inverted_index(
    quantizer: InvertedFileQuantizer,
    cells: npt.NDArray[np.int64],
    codes: CodeArray,
    ids: npt.NDArray[np.int64] | None = None,
) -> Any:
    """faiss.IndexIVFPQ over cells (X,) and codes (X, m); ids (X,) default to 0 .. X - 1."""
    return _rotating(quantizer.residuals, _inverted_index(quantizer, cells, codes, ids))


def _inverted_index(
    quantizer: InvertedFileQuantizer,
    cells: npt.NDArray[np.int64],
    codes: CodeArray,
    ids: npt.NDArray[np.int64] | None,
) -> Any:
    import faiss

    residuals, centres = quantizer.residuals, np.ascontiguousarray(quantizer.cells.centres)
    if residuals.rotation is not None:
        centres = centres @ residuals.rotation
    _check_codes(residuals, codes)
    if cells.shape != (len(codes),) or (len(cells) and not 0 <= cells.min() <= cells.max() < len(centres)):
        raise ValueError(f"cells must be {len(codes)} numbers from 0 to {len(centres) - 1}")
    names = np.arange(len(codes), dtype=np.int64) if ids is None else np.ascontiguousarray(ids, dtype=np.int64)
    if names.shape != (len(codes),):
        raise ValueError(f"ids has shape {names.shape}; expected ({len(codes)},)")
    coarse = faiss.IndexFlatIP(residuals.width)
    coarse.add(centres)
    index: Any = faiss.IndexIVFPQ(
        coarse,
        residuals.width,
        len(centres),
        residuals.num_subspaces,
        residuals.code_bits,
        faiss.METRIC_INNER_PRODUCT,
    )
    faiss.copy_array_to_vector(np.ascontiguousarray(residuals.codebooks).ravel(), index.pq.centroids)
    index.is_trained = True
    packed = packed_codes(codes, residuals.code_bits)
    order = np.argsort(cells, kind="stable")
    bounds = np.searchsorted(cells[order], np.arange(len(centres) + 1))
    for cell in np.flatnonzero(np.diff(bounds)):
        rows = order[bounds[cell] : bounds[cell + 1]]
        cell_ids, cell_codes = np.ascontiguousarray(names[rows]), np.ascontiguousarray(packed[rows])
        index.invlists.add_entries(int(cell), len(rows), faiss.swig_ptr(cell_ids), faiss.swig_ptr(cell_codes))
    index.ntotal = len(codes)
    return index


def inverted_fast_scan(
    quantizer: InvertedFileQuantizer,
    cells: npt.NDArray[np.int64],
    codes: CodeArray,
    ids: npt.NDArray[np.int64] | None = None,
) -> Any:
    """faiss.IndexIVFPQFastScan over 4-bit codes, as `inverted_index`; takes ID selectors. ValueError for 8 bits."""
    import faiss

    _check_four_bits(quantizer.residuals)
    index = faiss.IndexIVFPQFastScan(_inverted_index(quantizer, cells, codes, ids))
    return _rotating(quantizer.residuals, index)


def _rotating(quantizer: ProductQuantizer, index: Any) -> Any:
    if quantizer.rotation is None:
        return index
    import faiss

    turn: Any = faiss.LinearTransform(quantizer.width, quantizer.width, False)
    # FAISS multiplies from the left.
    faiss.copy_array_to_vector(np.ascontiguousarray(quantizer.rotation.T).ravel(), turn.A)
    turn.is_trained = True
    turn.is_orthonormal = True
    return faiss.IndexPreTransform(turn, index)


def _check_codes(quantizer: ProductQuantizer, codes: CodeArray) -> None:
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.shape[1] != quantizer.num_subspaces:
        raise ValueError(
            f"codes are {codes.dtype} of shape {codes.shape}; expected uint8 of shape (X, {quantizer.num_subspaces})"
        )
    if codes.size and int(codes.max()) >= quantizer.codebooks.shape[1]:
        raise ValueError(f"codes holds {int(codes.max())}; there are {quantizer.codebooks.shape[1]} codewords")


def _check_four_bits(quantizer: ProductQuantizer) -> None:
    if quantizer.code_bits != 4:
        raise ValueError(f"code_bits is {quantizer.code_bits}; FAISS's fast scan reads 4-bit codes only")

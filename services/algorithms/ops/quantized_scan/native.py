"""The compiled scan of `cpu.cpp`: its arguments as C structures, and the call. Knows memory layouts only."""

import ctypes

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address
from services.algorithms.ops.quantized_scan.cells import LANES, CellCodes, FloatMatrix
from services.algorithms.ops.quantized_scan.question import CellAnswer, CellQuestion

_INT64, _FLOAT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_void_p


class _Cells(ctypes.Structure):
    _fields_ = (
        *((name, _INT64) for name in ("num_items", "num_cells", "width", "coded_width", "num_groups", "bits")),
        *((name, _POINTER) for name in ("centres", "spreads", "radii", "scales", "errors", "code_norms")),
        *((name, _POINTER) for name in ("counts", "starts", "rows", "codes", "ranks", "vectors", "projection")),
        *((name, _DOUBLE) for name in ("largest_error", "largest_code_norm", "largest_centre_norm")),
    )


class _Search(ctypes.Structure):
    _fields_ = (
        *((name, _INT64) for name in ("num_queries", "k", "pool", "probes", "prove", "rescore")),
        ("reach", _FLOAT),
        *((name, _POINTER) for name in ("queries", "tolerances", "allowed")),
        ("allowed_stride", _INT64),
        *((name, _POINTER) for name in ("out_rows", "out_scores")),
        ("out_stride", _INT64),
        *((name, _POINTER) for name in ("bounds", "num_allowed", "touched")),
    )


class NativeCells:
    """Coded cells as the compiled scan reads them. Keeps its arrays alive."""

    def __init__(
        self, library: ctypes.CDLL, codes: CellCodes, vectors: FloatMatrix | None, ranks: npt.NDArray[np.int64]
    ) -> None:
        self._search = library.freshet_search_cells
        self._search.argtypes = (_POINTER, _POINTER, _INT64)
        self._search.restype = None
        padded = -(-codes.num_cells // LANES) * LANES
        centres = np.zeros((padded, codes.width), dtype=np.float32)
        centres[: codes.num_cells] = codes.centres
        self._centres = np.ascontiguousarray(centres.reshape(-1, LANES, codes.width).transpose(0, 2, 1))
        spreads, radii = (np.pad(array, (0, padded - codes.num_cells)) for array in (codes.spreads, codes.radii))
        self._alive = (codes, vectors, ranks, spreads, radii)
        sizes = (codes.num_items, codes.num_cells, codes.width, codes.coded_width, codes.codes.shape[1], codes.bits)
        arrays: tuple[npt.NDArray[np.generic] | None, ...]
        arrays = (self._centres, spreads, radii, codes.scales, codes.errors, codes.code_norms, codes.counts)
        arrays += (codes.starts, codes.rows, codes.codes, ranks, vectors, codes.projection)
        largest_centre_norm = np.linalg.norm(codes.centres.astype(np.float64), axis=1).max()
        largest = (float(codes.errors.max()), float(codes.code_norms.max()), float(largest_centre_norm))
        self._cells = _Cells(*sizes, *map(address, arrays), *largest)
        self._cells_address = ctypes.addressof(self._cells)

    def search(self, question: CellQuestion, answer: CellAnswer, threads: int) -> None:
        """Fill the answer."""
        allowed = question.allowed
        search = _Search(
            len(question.queries),
            question.k,
            question.pool,
            question.visit.probes,
            question.prove,
            question.rescore,
            question.visit.reach,
            question.queries.ctypes.data,
            question.tolerances.ctypes.data,
            None if allowed is None else allowed.ctypes.data,
            0 if allowed is None or allowed.ndim == 1 else allowed.shape[1],
            answer.rows.ctypes.data,
            answer.scores.ctypes.data,
            answer.rows.shape[1],
            answer.bounds.ctypes.data,
            question.num_allowed.ctypes.data,
            answer.touched.ctypes.data,
        )
        self._search(self._cells_address, ctypes.addressof(search), threads)

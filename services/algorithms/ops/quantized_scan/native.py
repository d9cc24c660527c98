"""The compiled scan of `cpu.cpp`."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address
from services.algorithms.ops.quantized_scan.cells import LANES, CellCodes, FloatMatrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A search's extent: the `probes` nearest cells (more until the pool is full).

    reach: cells are visited by <q, centre> + reach ||q|| times the cell's root mean square residual, until that is
    below the pool's worst score. 0: all `probes` cells, by <q, centre>.
    """

    probes: int
    reach: float = 0.0

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise ValueError(f"probes={self.probes} allowed: at least 1")
        if not 0 <= self.reach < 100:
            raise ValueError(f"reach={self.reach} allowed: 0 up to 100")


@dataclass(slots=True)
class CellQuestion:
    """B queries (B, d); allowed (X,) or (B, X), None for all, and their counts (B,); products within tolerances (B,)
    are equal.

    prove: bounds, not `visit`, decide which cells are scanned; rescore: the pool gets exact products. Arrays are
    C-contiguous. Not frozen, to save one microsecond of a query's hundred.
    """

    queries: npt.NDArray[np.float32]
    allowed: npt.NDArray[np.bool_] | None
    num_allowed: npt.NDArray[np.int64]
    tolerances: npt.NDArray[np.float64]
    k: int
    pool: int
    visit: Visit
    prove: bool
    rescore: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CellAnswer:
    """The best of B queries, best first, ties by rank.

    Shapes: rows (B, n), scores (B, n), padded with -1 and -inf; bounds (B,): no allowed item outside the pool scores
    above it, -inf if none was omitted; touched (B, 2): items scanned, exact products.
    """

    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    bounds: npt.NDArray[np.float64]
    touched: npt.NDArray[np.int64]


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
    """Coded cells for the compiled scan. References its arrays."""

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

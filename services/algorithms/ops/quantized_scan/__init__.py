"""The best of X vectors by dot product, from small integer codes in cells.

`cells.py` defines the format; `cpu.cpp` searches it in one native call, since a query takes only 0.1 ms.

Letters: B queries, X items, C cells, d width, h coded width.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels
from services.algorithms.native.threads import compute_threads
from services.algorithms.ops.quantized_scan.cells import (
    LANES,
    CellCodes,
    FloatMatrix,
    assign,
    encode,
    principal_directions,
    train_centres,
)
from services.algorithms.ops.top_rows import count_passing

__all__ = [
    "CellAnswer",
    "CellCodes",
    "CellScan",
    "Cells",
    "Coder",
    "Coding",
    "RowCodes",
    "Visit",
    "codes_key",
    "default_cells",
    "vectors_coded",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """The format of codes: C cells, 4 or 8 bits per coded dimension, h coded dimensions, None for all d."""

    num_cells: int
    bits: int
    coded_width: int | None = None

    def __post_init__(self) -> None:
        if self.num_cells < 1:
            raise ValueError(f"num_cells={self.num_cells} allowed: at least 1")
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits} allowed: 4, 8")
        if self.coded_width is not None and self.coded_width < 1:
            raise ValueError(f"coded_width={self.coded_width} allowed: at least 1")

    @property
    def text(self) -> str:
        """The format, except the number of cells."""
        return f"{self.coded_width or 'all'} dimensions in {self.bits} bits"

    @property
    def kind(self) -> type[CellCodes]:
        return CellCodes

    def coded(self, vectors: FloatMatrix, *, seed: int) -> CellCodes:
        """Train on a sample and code vectors (X, d) float32. Equal seeds make equal codes.

        Raises: ValueError for no vectors or a coded_width above d.
        """
        num_items, width = vectors.shape
        if num_items < 1:
            raise ValueError("the index is empty: num_items=0 allowed: at least 1")
        if self.coded_width is not None and self.coded_width > width:
            raise ValueError(f"coded_width={self.coded_width} allowed: 1 to {width}, the vectors' width")
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        centres = train_centres(vectors, self.num_cells, seed=seed)
        owner = assign(vectors, centres)
        projection = None
        if self.coded_width is not None and self.coded_width < width:
            projection = principal_directions(vectors, centres, owner, width=self.coded_width, seed=seed)
        return encode(vectors, centres, owner, bits=self.bits, projection=projection)


def default_cells(num_items: int, width: int) -> Cells:
    """The best format in measurements: 1.25 sqrt(X) cells, but at most one per 16 items.

    Vectors of up to 64 dimensions have 8 bits per dimension; wider ones have 4 bits for half the dimensions.
    """
    num_cells = max(1, min(round(1.25 * num_items**0.5), num_items // 16))
    return (
        Cells(num_cells=num_cells, bits=8)
        if width <= 64
        else Cells(num_cells=num_cells, bits=4, coded_width=width // 2)
    )


class RowCodes(Protocol):
    """Coded vectors: a dataclass of arrays, whole numbers and None."""

    def take(self, rows: npt.NDArray[np.int64], /) -> Self:
        """Codes of some ascending rows, numbered from 0."""

    def check_fits(self, num_vectors: int, width: int, /) -> None:
        """Raise ValueError with both values unless the codes are of `num_vectors` vectors of `width`."""


Codes = TypeVar("Codes", bound=RowCodes)
CodesMade = TypeVar("CodesMade", bound=RowCodes, covariant=True)


class Coding(Protocol[CodesMade]):
    """A way to code vectors, such as `Cells`."""

    @property
    def text(self) -> str:
        """Text that identifies the coding."""

    @property
    def kind(self) -> type[CodesMade]: ...

    def coded(self, vectors: FloatMatrix, *, seed: int) -> CodesMade:
        """Train on vectors (X, d) float32 and code them. Equal seeds make equal codes."""


class Coder(Protocol):
    """Codes the vectors (X, d) of `part`, or returns existing codes."""

    def __call__(
        self,
        part: str,
        vectors: Callable[[], FloatMatrix],
        shape: tuple[int, int],
        /,
        *,
        cells: Coding[Codes],
        seed: int,
    ) -> Codes: ...


def codes_key(part: str, cells: Coding[Codes], seed: int) -> str:
    """Equal keys mean equal codes of equal vectors, except for the number of cells."""
    return f"{part}, {cells.text}, seed {seed}"


def vectors_coded(
    part: str, vectors: Callable[[], FloatMatrix], shape: tuple[int, int], /, *, cells: Coding[Codes], seed: int
) -> Codes:
    """A `Coder` that always computes codes."""
    return cells.coded(vectors(), seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """Which cells a search visits: the `probes` nearest, and more until the pool is full.

    reach: cells are visited in descending order of <q, centre> + reach ||q|| times the cell's root mean square
    residual, until it is below the pool's worst score. 0: all `probes` cells, in order of <q, centre>.
    """

    probes: int
    reach: float = 0.0

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise ValueError(f"probes={self.probes} allowed: at least 1")
        if not 0 <= self.reach < 100:
            raise ValueError(f"reach={self.reach} allowed: 0 up to 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class CellAnswer:
    """The best of B queries, best first, ties by row.

    Shapes: rows (B, n), scores (B, n), padded with -1 and -inf; bounds (B,): no allowed item outside the pool scores
    above it, -inf if none was omitted; touched (B, 2): numbers of scanned items and of exact products.
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
        *((name, _POINTER) for name in ("counts", "starts", "rows", "codes", "vectors", "projection")),
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


class CellScan:
    """X vectors in coded cells. Thread-safe."""

    def __init__(
        self,
        codes: CellCodes,
        *,
        vectors: FloatMatrix | None = None,
        kernels: ctypes.CDLL | None = None,
    ) -> None:
        """Prepare the scan. vectors: the uncoded vectors (X, d), without which only `pool` works. kernels: library, by
        default this processor's.
        """
        self.codes = codes
        vectors = None if vectors is None else np.ascontiguousarray(vectors, dtype=np.float32)
        self._can_rescore = vectors is not None
        self._function = (kernels or load_kernels("quantized_scan")).freshet_search_cells
        self._function.argtypes = (_POINTER, _POINTER, _INT64)
        self._function.restype = None
        padded = -(-codes.num_cells // LANES) * LANES
        centres = np.zeros((padded, codes.width), dtype=np.float32)
        centres[: codes.num_cells] = codes.centres
        centres = np.ascontiguousarray(centres.reshape(-1, LANES, codes.width).transpose(0, 2, 1))
        spreads, radii = (np.pad(array, (0, padded - codes.num_cells)) for array in (codes.spreads, codes.radii))
        sizes = (codes.num_items, codes.num_cells, codes.width, codes.coded_width, codes.codes.shape[1], codes.bits)
        arrays: tuple[npt.NDArray[np.generic] | None, ...]
        arrays = (centres, spreads, radii, codes.scales, codes.errors, codes.code_norms, codes.counts)
        arrays += (codes.starts, codes.rows, codes.codes, vectors, codes.projection)
        self._alive = arrays  # C code refers to these by address
        largest_centre_norm = np.linalg.norm(codes.centres.astype(np.float64), axis=1).max()
        largest = (float(codes.errors.max()), float(codes.code_norms.max()), float(largest_centre_norm))
        self._cells = _Cells(*sizes, *map(address, arrays), *largest)
        self._cells_address = ctypes.addressof(self._cells)

    @property
    def num_items(self) -> int:
        return self.codes.num_items

    @property
    def num_cells(self) -> int:
        return self.codes.num_cells

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def best(
        self,
        queries: FloatMatrix,
        k: int,
        *,
        pool: int,
        visit: Visit,
        allowed: npt.NDArray[np.bool_] | None = None,
        tolerances: npt.NDArray[np.float64] | None = None,
    ) -> CellAnswer:
        """The `k` best by exact product among the `pool` best by code, in float64.

        Shapes: queries (B, d), allowed (X,) or (B, X). Products within `tolerances` (B,) are equal.
        """
        return self._search(
            queries, allowed, tolerances, k=k, pool=max(k, pool), visit=visit, prove=False, rescore=True
        )

    def proven(
        self,
        queries: FloatMatrix,
        k: int,
        *,
        allowed: npt.NDArray[np.bool_] | None = None,
        tolerances: npt.NDArray[np.float64] | None = None,
    ) -> CellAnswer:
        """The exact `k` best. Bounds on the codes' errors, and cells' radii, exclude the other items. This pays with 8
        bits and h = d, where bounds are tight.
        """
        visit = Visit(probes=self.num_cells)
        return self._search(queries, allowed, tolerances, k=k, pool=k, visit=visit, prove=True, rescore=True)

    def pool(
        self, queries: FloatMatrix, size: int, *, visit: Visit, allowed: npt.NDArray[np.bool_] | None = None
    ) -> CellAnswer:
        """The `size` best by code, with their scores by code."""
        return self._search(queries, allowed, None, k=size, pool=size, visit=visit, prove=False, rescore=False)

    def _search(
        self,
        queries: FloatMatrix,
        allowed: npt.NDArray[np.bool_] | None,
        tolerances: npt.NDArray[np.float64] | None,
        *,
        k: int,
        pool: int,
        visit: Visit,
        prove: bool,
        rescore: bool,
    ) -> CellAnswer:
        """prove: choose cells by bounds, not by `visit`. rescore: evaluate the pool exactly."""
        if rescore and not self._can_rescore:
            raise ValueError("exact products need the vectors")
        num_queries, num_items = len(queries), self.num_items
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        k, pool = min(k, num_items), min(pool, num_items)
        allowed = None if allowed is None else np.ascontiguousarray(allowed)
        num_allowed = count_passing(allowed, num_queries, num_items)
        slack = np.zeros(num_queries) if tolerances is None else np.ascontiguousarray(tolerances, dtype=np.float64)
        answer = CellAnswer(
            rows=np.full((num_queries, k), -1),
            scores=np.full((num_queries, k), -np.inf),
            bounds=np.empty(num_queries),
            touched=np.zeros((num_queries, 2), dtype=np.int64),
        )
        search = _Search(
            num_queries,
            k,
            pool,
            visit.probes,
            prove,
            rescore,
            visit.reach,
            queries.ctypes.data,
            slack.ctypes.data,
            None if allowed is None else allowed.ctypes.data,
            0 if allowed is None or allowed.ndim == 1 else allowed.shape[1],
            answer.rows.ctypes.data,
            answer.scores.ctypes.data,
            answer.rows.shape[1],
            answer.bounds.ctypes.data,
            num_allowed.ctypes.data,
            answer.touched.ctypes.data,
        )
        self._function(self._cells_address, ctypes.addressof(search), compute_threads())
        return answer

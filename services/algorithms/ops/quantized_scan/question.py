"""What is asked of coded cells and what comes back. Knows only arrays.

Letters: B queries, X items, d width, K results, N pool size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """How far a search goes: the `probes` nearest cells (more until the pool is full).

    `reach`: cells are taken in order of <q, centre> + reach ||q|| (the cell's root mean square residual) and left
    unvisited once that is below the worst of the pool; 0: by <q, centre> alone, all `probes`.
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
    """B queries (B, d); allowed (X,) or (B, X), None for all, and how many (B,); products within tolerances (B,) of
    each other are equal. `prove`: bounds instead of `visit` say which cells are scanned; `rescore`: exact products of
    the pool. Arrays are C-contiguous. Not frozen: making one takes a microsecond less of a query's hundred.
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

    Shapes: rows (B, n), scores (B, n), -1 and -inf beyond a shorter answer; bounds (B,): no allowed item left out of
    the pool scores above it, -inf when nothing was left out; touched (B, 2): items scanned, exact products.
    """

    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    bounds: npt.NDArray[np.float64]
    touched: npt.NDArray[np.int64]

"""Vectors as small integer codes in cells: k-means cells, and per item its residual in 8 or 4 bits per dimension.

A cell's residuals x - centre share one step (scale). A score is base + step * (an integer dot product), so the scan
compares integers. For wide vectors, only the residuals' leading principal directions are coded, rotated at random so
that one step fits all h coordinates. A block has 16 items, with 4 dimensions of all 16 in 64 bytes, which suits integer
dot products.

Letters: X items, C cells, d width, h coded width.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

FloatMatrix = npt.NDArray[np.float32]
LANES = 16
_CHUNK_FLOATS = 1 << 22
_SUMMED_ROWS = 1_024  # in one call
_ROUND_UP = 1 + 2.0**-12  # norms are in float32, rounded up


@dataclass(frozen=True, kw_only=True, slots=True)
class CellCodes:
    """X coded vectors in C cells. After coding, no cell is empty.

    Shapes: centres (C, d); projection (d, h) with orthonormal columns, None for the identity; scales, errors (largest
    ||residual - decoded||), code_norms (largest ||decoded||), radii (largest ||residual||), spreads (root mean square
    of ||residual||), counts of items: (C,) each; starts (C + 1,) in blocks of 16; rows (16 * blocks,), -1 in empty
    slots; codes (blocks, groups, 64) uint8.
    """

    bits: int
    width: int
    num_items: int
    centres: FloatMatrix
    projection: FloatMatrix | None
    scales: npt.NDArray[np.float32]
    errors: npt.NDArray[np.float32]
    code_norms: npt.NDArray[np.float32]
    radii: npt.NDArray[np.float32]
    spreads: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    codes: npt.NDArray[np.uint8]

    @property
    def num_cells(self) -> int:
        return len(self.centres)

    @property
    def zero(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nbytes(self) -> int:
        arrays = (self.centres, self.scales, self.errors, self.code_norms, self.radii, self.spreads)
        projection = 0 if self.projection is None else self.projection.nbytes
        return projection + sum(array.nbytes for array in (*arrays, self.counts, self.starts, self.rows, self.codes))

    @property
    def coded_width(self) -> int:
        return self.width if self.projection is None else self.projection.shape[1]

    def check_fits(self, num_vectors: int, width: int) -> None:
        """Raise ValueError with both values unless the codes are of `num_vectors` vectors of `width`."""
        if (self.num_items, self.width) != (num_vectors, width):
            found = f"codes of {self.num_items} vectors {self.width} wide"
            raise ValueError(f"{found}; allowed: {num_vectors} vectors {width} wide")

    def take(self, rows: npt.NDArray[np.int64]) -> "CellCodes":
        """Codes of some ascending rows, numbered from 0. Slots of other rows become empty; bounds of cells stay."""
        numbers = np.full(self.num_items + 1, -1, dtype=np.int32)  # the last number, -1, is for empty slots
        numbers[rows] = np.arange(len(rows))
        kept = numbers[self.rows]
        counts = np.bincount(self.cell_of_slots()[kept >= 0], minlength=self.num_cells)
        return replace(self, num_items=len(rows), rows=kept, counts=counts)

    def cell_of_slots(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(self.num_cells), LANES * np.diff(self.starts))

    def integers(self) -> npt.NDArray[np.int32]:
        """Codes minus `zero`, one row per slot: (16 * blocks, h)."""
        blocks, groups, _ = self.codes.shape
        parts = self.codes.reshape(blocks, groups, LANES, 4)
        if self.bits == 4:
            parts = np.stack([parts & 15, parts >> 4], axis=2).reshape(blocks, 2 * groups, LANES, 4)
        flat = parts.transpose(0, 2, 1, 3).reshape(blocks * LANES, -1)[:, : self.coded_width]
        return flat.astype(np.int32) - self.zero


def encode(
    vectors: FloatMatrix,
    centres: FloatMatrix,
    cells: npt.NDArray[np.int64],
    *,
    bits: int,
    projection: FloatMatrix | None = None,
) -> CellCodes:
    """Code the residuals of X vectors (X, d) from the centres (C, d) of their cells (X,), without empty cells.

    projection (d, h): the coded directions (`principal_directions`), None for all coordinates. With 8 bits, a cell's
    step is its largest residual coordinate / 127. With 4 bits, it is 0.335 of the coordinates' root mean square, the
    best step for normally distributed values and 16 levels (Max 1960); larger values are clipped. Memory: 16 MB chunks.
    Raises: ValueError for bits other than 4 and 8.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits} allowed: 4, 8")
    used, cells = np.unique(cells, return_inverse=True)
    centres = np.ascontiguousarray(centres[used])
    num_items, width = vectors.shape
    counts = np.bincount(cells, minlength=len(used))
    order = np.argsort(cells, kind="stable")
    blocks = -(-counts // LANES)
    starts = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    sorted_cells = cells[order]
    slots = starts[sorted_cells] * LANES + np.arange(num_items) - first[sorted_cells]
    rows = np.full(starts[-1] * LANES, -1, dtype=np.int32)
    rows[slots] = order

    chunk = max(1, _CHUNK_FLOATS // width)
    largest, squares, kept_squares, radii = (np.zeros(len(used)) for _ in range(4))
    for start in range(0, num_items, chunk):
        residuals, owner = _residuals(vectors, centres, order, sorted_cells, slice(start, start + chunk))
        square = (residuals**2).sum(axis=1, dtype=np.float64)
        squares += np.bincount(owner, square, minlength=len(used))
        np.maximum.at(radii, owner, np.sqrt(square))
        kept = residuals if projection is None else residuals @ projection
        kept_squares += np.bincount(owner, (kept**2).sum(axis=1), minlength=len(used))
        np.maximum.at(largest, owner, np.abs(kept).max(axis=1))
    coded_width = width if projection is None else projection.shape[1]
    steps = largest / 127 if bits == 8 else 0.335 * np.sqrt(kept_squares / (counts * coded_width))
    scales = np.where(steps > 0, steps, 1).astype(np.float32)

    zero, top = 1 << (bits - 1), (1 << bits) - 1
    per_byte = 8 // bits
    groups = -(-coded_width // (4 * per_byte))
    padded = np.full((starts[-1] * LANES, groups * 4 * per_byte), zero, dtype=np.uint8)
    errors, code_norms = np.zeros(len(used)), np.zeros(len(used))
    for start in range(0, num_items, chunk):
        residuals, owner = _residuals(vectors, centres, order, sorted_cells, slice(start, start + chunk))
        kept = residuals if projection is None else residuals @ projection
        codes = np.clip(np.rint(kept / scales[owner, None]) + zero, 0, top)
        decoded = (codes - zero) * scales[owner, None]
        np.maximum.at(code_norms, owner, np.linalg.norm(decoded, axis=1))
        whole = decoded if projection is None else decoded @ projection.T
        np.maximum.at(errors, owner, np.linalg.norm(residuals - whole, axis=1))
        padded[slots[start : start + chunk], :coded_width] = codes.astype(np.uint8)
    # The rounding errors of decoding and subtracting in float32 are at most this.
    roundings = (width + 16) * 2.0**-24 * radii * (1 if projection is None else coded_width**0.5)
    parts = padded.reshape(-1, LANES, groups, per_byte, 4).transpose(0, 2, 3, 1, 4).reshape(-1, groups, per_byte, 64)
    packed = parts[:, :, 0] if bits == 8 else parts[:, :, 0] | (parts[:, :, 1] << 4)
    return CellCodes(
        bits=bits,
        width=width,
        num_items=num_items,
        centres=centres,
        projection=projection,
        scales=scales,
        errors=_rounded_up(errors + roundings),
        code_norms=_rounded_up(code_norms),
        radii=_rounded_up(radii),
        spreads=np.sqrt(squares / counts).astype(np.float32),
        counts=counts,
        starts=starts,
        rows=rows,
        codes=np.ascontiguousarray(packed),
    )


def train_centres(
    vectors: FloatMatrix, num_cells: int, *, seed: int, sample_per_cell: int = 64, rounds: int = 10
) -> FloatMatrix:
    """Centres (C, d) of `num_cells` cells, at most one per vector, by Lloyd's k-means on a sample.

    Equal seeds give equal centres. The centre of an empty cell becomes a random point of the sample.
    """
    generator = np.random.default_rng(seed)
    count = min(len(vectors), sample_per_cell * num_cells)
    chosen = np.sort(generator.choice(len(vectors), size=count, replace=False))
    sample = np.ascontiguousarray(vectors[chosen])
    num_cells = min(num_cells, count)
    centres = sample[np.sort(generator.choice(count, size=num_cells, replace=False))]
    for _ in range(rounds):
        cells = nearest(sample, centres)
        sums, counts = sums_of_groups(sample, cells, num_cells)
        lost = np.flatnonzero(counts == 0)
        centres = sums / np.maximum(counts, 1).astype(np.float32)[:, None]
        if len(lost):
            centres[lost] = sample[generator.choice(count, size=len(lost))]
    return centres


def sums_of_groups(
    rows: FloatMatrix, groups: npt.NDArray[np.int64], num_groups: int
) -> tuple[FloatMatrix, npt.NDArray[np.int64]]:
    """Sums (C, d) of the rows (n, d) of each group (n,), added in order, and counts (C,)."""
    counts = np.bincount(groups, minlength=num_groups)
    used = np.flatnonzero(counts)
    order = np.argsort(groups, kind="stable")
    starts = np.cumsum(counts) - counts
    sums = np.zeros((num_groups, rows.shape[1]), dtype=np.float32)
    # `reduceat` blocks the interpreter lock: in slices, a concurrent search waits less than a millisecond.
    for part in np.split(used, np.searchsorted(starts[used], np.arange(_SUMMED_ROWS, len(rows), _SUMMED_ROWS))):
        if len(part):
            first = starts[part[0]]
            summed = rows[order[first : first + counts[part].sum()]]
            sums[part] = np.add.reduceat(summed, starts[part] - first, axis=0)
    return sums, counts


def principal_directions(
    vectors: FloatMatrix, centres: FloatMatrix, cells: npt.NDArray[np.int64], *, width: int, seed: int
) -> FloatMatrix:
    """The `width` directions of largest variance of residuals, rotated at random among themselves: (d, width).

    Up to 65,536 residuals are used. The best 300 by code have this share of the exact top 100 (135k MiniLM vectors, d
    384, 384 cells, 4 bits): all 384 coordinates .9946 in 192 bytes; 192 principal directions .9929, rotated .9965, in
    96.
    """
    generator = np.random.default_rng(seed)
    count = min(len(vectors), 1 << 16)
    chosen = np.sort(generator.choice(len(vectors), size=count, replace=False))
    residuals = (vectors[chosen] - centres[cells[chosen]]).astype(np.float64)
    _, directions = np.linalg.eigh(residuals.T @ residuals)
    turn = np.linalg.qr(generator.standard_normal((width, width)))[0]
    return np.ascontiguousarray((directions[:, ::-1][:, :width] @ turn).astype(np.float32))


def assign(vectors: FloatMatrix, centres: FloatMatrix) -> npt.NDArray[np.int64]:
    cells = np.empty(len(vectors), dtype=np.int64)
    step = max(1, _CHUNK_FLOATS // vectors.shape[1])
    for start in range(0, len(vectors), step):
        cells[start : start + step] = nearest(np.asarray(vectors[start : start + step]), centres)
    return cells


def nearest(vectors: FloatMatrix, centres: FloatMatrix) -> npt.NDArray[np.int64]:
    """Index (n,) of the nearest centre (C, d) of each vector (n, d)."""
    half_squares = np.float32(0.5) * (centres * centres).sum(axis=1)
    step = max(1, (16 << 20) // (4 * len(centres)))
    space = np.empty((min(step, len(vectors)), len(centres)), dtype=np.float32)  # reused: freeing takes the lock
    parts = []
    for start in range(0, len(vectors), step):
        part = vectors[start : start + step]
        products = np.matmul(part, centres.T, out=space[: len(part)])
        products -= half_squares
        parts.append(products.argmax(axis=1))
    return np.concatenate(parts)


def _residuals(
    vectors: FloatMatrix,
    centres: FloatMatrix,
    order: npt.NDArray[np.int64],
    cells: npt.NDArray[np.int64],
    chunk: slice,
) -> tuple[FloatMatrix, npt.NDArray[np.int64]]:
    owner = cells[chunk]
    return vectors[order[chunk]] - centres[owner], owner


def _rounded_up(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return (values * _ROUND_UP).astype(np.float32)

"""Codebooks learned from one catalogue's vectors. They can code new vectors, too.

`freshet train` and `freshet index` store them in the bundle. A code is the nearest centre and, for each subspace of the
residual, one codeword, chosen under the loss that preserves high scores (arXiv:1908.10396, section 4.1, step 2). One
number couples the subspaces: the component of the error (residual minus codewords) along the vector. Per vector, two
tables have this component and the squared error of each codeword. So replacing one codeword costs O(k), a sweep O(m k).

Letters: X vectors, n of them, w width, C cells, m subspaces, k codewords each, P pairs.
"""

import hashlib
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.quantized_scan.cells import nearest
from services.algorithms.scoring.states import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class InvertedCodes:
    """X coded points. Each is the sum of its cell's centre and one codeword per subspace.

    Shapes: centres (C, d) and codebooks (m, k, d / m) float32, k = 16 (4-bit codes) or 256 (8-bit codes), of vectors
    rotated by rotation (d, d), if any; cells (X,) int32; codes (X, m) uint8, one per byte.

    Raises: ValueError for inconsistent arrays.
    """

    centres: FloatArray
    codebooks: FloatArray
    rotation: FloatArray | None
    cells: npt.NDArray[np.int32]
    codes: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        num_subspaces, num_codewords, part = self.codebooks.shape
        if self.codes.dtype != np.uint8 or self.codes.shape != (self.num_points, num_subspaces):
            raise ValueError(
                f"codes are {self.codes.dtype} of shape {self.codes.shape}; "
                f"expected uint8 of shape {(self.num_points, num_subspaces)}"
            )
        if self.codes.size and int(self.codes.max()) >= num_codewords:
            raise ValueError(f"codes holds {int(self.codes.max())}; there are {num_codewords} codewords")
        if self.num_points and not 0 <= self.cells.min() <= self.cells.max() < len(self.centres):
            raise ValueError(f"cells must be numbers from 0 to {len(self.centres) - 1}")
        width = num_subspaces * part
        if self.centres.shape[1] != width or (self.rotation is not None and self.rotation.shape != (width, width)):
            raise ValueError(f"centres and rotation must be {width} wide, as the codebooks are")

    def check_fits(self, num_vectors: int, width: int) -> None:
        """Raise ValueError unless these are codes of `num_vectors` vectors of `width`, padded to whole codewords."""
        if self.num_points != num_vectors or not 0 <= self.width - width < self.codebooks.shape[2]:
            found = f"codes of {self.num_points} vectors {self.width} wide"
            raise ValueError(f"{found}; allowed: {num_vectors} vectors {width} wide, padded to whole codewords")

    def take(self, rows: npt.NDArray[np.int64]) -> "InvertedCodes":
        return replace(self, cells=self.cells[rows], codes=self.codes[rows])

    @property
    def num_points(self) -> int:
        return len(self.cells)

    @property
    def num_cells(self) -> int:
        return len(self.centres)

    @property
    def width(self) -> int:
        return int(self.centres.shape[1])

    @property
    def num_subspaces(self) -> int:
        """The number m of codes per point."""
        return len(self.codebooks)

    @property
    def code_bits(self) -> int:
        """Bits per code, 4 or 8."""
        return int(self.codebooks.shape[1]).bit_length() - 1

    def packed(self) -> npt.NDArray[np.uint8]:
        """Codes in FAISS's layout (X, ceil(m * bits / 8)): a byte has two 4-bit codes, the first in the low half."""
        if self.code_bits == 8:
            return np.ascontiguousarray(self.codes)
        even, odd = self.codes[:, 0::2], self.codes[:, 1::2]
        packed = even.copy()
        packed[:, : odd.shape[1]] |= odd << 4
        return packed

    def decoded(self) -> FloatArray:
        """The decoded points (X, d)."""
        words = self.codebooks[np.arange(self.num_subspaces), self.codes].reshape(self.num_points, self.width)
        words = words + self.centres[self.cells]
        return words if self.rotation is None else words @ self.rotation.T


_CHUNK = 8192
_TABLE_BYTES = 8 << 20  # 1,024 vectors with 64 subspaces of 16 codewords; 4,096 take twice the time per vector
_MAX_SWEEPS = 10
# The stiffness has a pole at |x| = T. Near this pole, costs in float32 would lose the error across the vector.
_MAX_STIFFNESS = 1e4


@dataclass(frozen=True, kw_only=True, slots=True)
class Codebooks:
    """Centres and codewords.

    Shapes: centres (C, w) and codebooks (m, k, w / m), k = 16 (4-bit codes) or 256 (8-bit codes), float32, both after
    rotation (w, w) if any. shortest (1,): T, the length up to which a vector is coded by plain l2. stiffness (s,): the
    weight of the error along a vector relative to the error across it, as (eta - 1) (1 - c^2) at even steps of c = T /
    |x| from 0 to 1. gate_scale (P,): divisor of item gates before coding, None without gates. Raises: ValueError for
    inconsistent arrays or non-finite values.
    """

    centres: FloatArray
    codebooks: FloatArray
    rotation: FloatArray | None = None
    shortest: npt.NDArray[np.floating]
    stiffness: npt.NDArray[np.floating]
    gate_scale: npt.NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        arrays = self.arrays
        for name, dimensions in (("centres", 2), ("codebooks", 3), ("shortest", 1), ("stiffness", 1)):
            if arrays[name].ndim != dimensions or not arrays[name].size:
                raise ValueError(f"{name} has shape {arrays[name].shape}; expected {dimensions} axes, none empty")
        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating) or not np.isfinite(array).all():
                raise ValueError(f"{name} holds {array.dtype} values; allowed: finite floating-point numbers")
        if self.codebooks.shape[1] not in (16, 256):
            raise ValueError(f"codebooks has shape {self.codebooks.shape}; expected (m, 16 or 256, w / m)")
        width = self.width
        if self.centres.shape[1] != width or (self.rotation is not None and self.rotation.shape != (width, width)):
            raise ValueError(f"centres and rotation must be {width} wide, as the codebooks are")

    @property
    def arrays(self) -> dict[str, npt.NDArray[np.floating]]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: array for name, array in values.items() if array is not None}

    @property
    def width(self) -> int:
        """The width w."""
        return int(self.codebooks.shape[0] * self.codebooks.shape[2])

    @property
    def text(self) -> str:
        """The name: a hash of the content."""
        digest = hashlib.sha256()
        for name, array in self.arrays.items():
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return f"product-{digest.hexdigest()[:8]}"

    @property
    def kind(self) -> type[InvertedCodes]:
        return InvertedCodes

    def coded(self, vectors: FloatArray, *, seed: int = 0) -> InvertedCodes:
        """The codes of vectors (X, at most w), which are padded with 0 to width w; `seed` is not used.

        Raises: ValueError as `check_width`. Cost: 20,000 vectors per second and core (m = 64, k = 16).
        """
        self.check_width(vectors.shape[1])
        num_vectors, missing = len(vectors), self.width - vectors.shape[1]
        cells = np.empty(num_vectors, dtype=np.int32)
        codes = np.empty((num_vectors, len(self.codebooks)), dtype=np.uint8)
        for start in range(0, num_vectors, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            points = np.pad(vectors[chunk], ((0, 0), (0, missing)))
            turned = points if self.rotation is None else points @ self.rotation
            cells[chunk] = nearest(turned, self.centres)
            lengths = np.linalg.norm(turned.astype(np.float64), axis=1)
            directions = np.divide(turned, lengths[:, None], out=np.zeros_like(turned), where=lengths[:, None] > 0)
            residuals = turned - self.centres[cells[chunk]]
            codes[chunk] = encoded(residuals, directions, self._stiffness(lengths), self.codebooks)
        return InvertedCodes(
            centres=self.centres, codebooks=self.codebooks, rotation=self.rotation, cells=cells, codes=codes
        )

    def check_width(self, width: int) -> None:
        """Raise ValueError unless this width, padded by less than one codeword, is w."""
        if not 0 <= self.width - width < self.codebooks.shape[2]:
            raise ValueError(f"vectors are {width} wide; these codebooks code {self.width}")

    def _stiffness(self, lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """eta - 1 for vectors of these lengths (n,), 0 for those that no unit query scores above T."""
        shortest = float(self.shortest[0])
        ratio = np.divide(shortest, lengths, out=np.zeros_like(lengths), where=lengths > shortest)
        ratio = np.minimum(ratio, 1 - 1e-12)
        found = np.interp(ratio, np.linspace(0, 1, len(self.stiffness)), self.stiffness) / (1 - ratio**2)
        return np.asarray(np.minimum(found, _MAX_STIFFNESS), dtype=np.float32)


def encoded(
    residuals: FloatArray,
    directions: FloatArray,
    stiffness: npt.NDArray[np.float32],
    codebooks: FloatArray,
    start: npt.NDArray[np.integer] | None = None,
) -> npt.NDArray[np.uint8]:
    """Choose codes (n, m) for residuals (n, w) of vectors with unit directions (n, w), by coordinate descent.

    The descent starts from `start` (n, m), or from the nearest codewords by l2, and never increases the loss. A
    codeword is replaced only by a better one; of equally good ones, the smallest number is chosen.
    """
    num_subspaces, num_codewords, _ = codebooks.shape
    codes = np.empty((len(residuals), num_subspaces), dtype=np.uint8)
    size = max(1, _TABLE_BYTES // (8 * num_subspaces * num_codewords))
    for first in range(0, len(residuals), size):
        block = slice(first, first + size)
        present = None if start is None else start[block]
        codes[block] = _encoded(residuals[block], directions[block], stiffness[block], codebooks, present)
    return codes


def _encoded(
    residuals: FloatArray,
    directions: FloatArray,
    stiffness: npt.NDArray[np.float32],
    codebooks: FloatArray,
    start: npt.NDArray[np.integer] | None,
) -> npt.NDArray[np.int64]:
    num_subspaces, _, width = codebooks.shape
    shape = (len(residuals), num_subspaces, width)
    parts, along_parts = (
        np.ascontiguousarray(rows.reshape(shape).transpose(1, 2, 0)) for rows in (residuals, directions)
    )
    # Each codeword's squared error minus the residual's squared length, and its error along the direction: (m, k, n).
    cost = np.matmul(codebooks, parts)
    cost *= -2
    cost += np.square(codebooks).sum(axis=2)[:, :, None]
    along = np.matmul(codebooks, along_parts)
    np.subtract((parts * along_parts).sum(axis=1)[:, None], along, out=along)
    codes = cost.argmin(axis=1) if start is None else np.array(start.T, dtype=np.int64)
    every = np.arange(len(residuals))
    total = np.take_along_axis(along, codes[:, None], axis=1)[:, 0].sum(axis=0)
    cost += along * along * stiffness
    weighed = np.empty_like(cost[0])
    for _ in range(_MAX_SWEEPS):
        changed = False
        for table, own_cost, present in zip(along, cost, codes, strict=True):
            rest = total - table[present, every]
            np.multiply(table, 2 * stiffness * rest, out=weighed)
            weighed += own_cost
            best = weighed.argmin(axis=0)
            better = np.flatnonzero(weighed[best, every] < weighed[present, every])
            if len(better):
                changed = True
                present[better] = best[better]
                total = rest + table[present, every]
        if not changed:
            break
    return np.asarray(codes.T)

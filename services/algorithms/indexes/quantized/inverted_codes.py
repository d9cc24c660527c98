"""Product-quantised vectors in an inverted file, as plain arrays: the format for FAISS and for snapshots.

Letters: X points, d width, C cells, m subspaces, k codewords each.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class InvertedCodes:
    """X coded points: each is its cell's centre and one codeword per subspace.

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
        """4 or 8."""
        return int(self.codebooks.shape[1]).bit_length() - 1

    def packed(self) -> npt.NDArray[np.uint8]:
        """FAISS's layout (X, ceil(m * bits / 8)): two 4-bit codes a byte, the first in the low half."""
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

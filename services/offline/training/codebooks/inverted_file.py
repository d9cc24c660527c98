"""Coarse cells with product-quantized residuals: the quantizer of an IVF index.

A point is its cell's centre plus a decoded residual. The residual is what the codes reproduce, but an error's direction
is judged against the whole point: a query's score is <q, centre> + <q, residual>, and being high or low is a property
of the sum. It knows no search.

Letters: X points, d width, C cells, m subspaces, k codewords each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.quantized.inverted_codes import InvertedCodes
from services.offline.training.codebooks.product_quantizer import (
    DEFAULT_THRESHOLD,
    CodeArray,
    ProductQuantizer,
    train_product_quantizer,
)
from services.offline.training.codebooks.targets import checked_points
from services.offline.training.codebooks.vector_quantizer import VectorQuantizer, train_vector_quantizer

_TRAINING_POINTS = 100_000
_CHUNK = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class InvertedFileQuantizer:
    """Cells, and the product quantizer of the residuals.

    Shapes: cells.centres (C, d); residuals.codebooks (m, k, d / m).
    """

    cells: VectorQuantizer
    residuals: ProductQuantizer

    def __post_init__(self) -> None:
        if self.cells.centres.shape[1] != self.residuals.width:
            raise ValueError(f"cells are {self.cells.centres.shape[1]} wide and residuals {self.residuals.width}")

    def encode(self, points: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.int64], CodeArray]:
        """Cells (X,) and codes (X, m) of points (X, d)."""
        cells = self.cells.assign(points)
        return cells, self.residuals.encode(points, centres=self.cells.centres[cells])

    def coded(self, points: npt.NDArray[np.floating]) -> InvertedCodes:
        """Points (X, d) as what FAISS is given and files hold."""
        parts = [self.encode(points[x : x + _CHUNK]) for x in range(0, len(points), _CHUNK)] or [self.encode(points)]
        rotation = self.residuals.rotation
        return InvertedCodes(
            centres=self.cells.centres if rotation is None else self.cells.centres @ rotation,
            codebooks=self.residuals.codebooks,
            rotation=rotation,
            cells=np.concatenate([cells for cells, _ in parts]).astype(np.int32),
            codes=np.concatenate([codes for _, codes in parts]),
        )


def train_inverted_file(
    points: npt.NDArray[np.floating],
    *,
    num_cells: int,
    num_subspaces: int,
    code_bits: int,
    threshold: float = DEFAULT_THRESHOLD,
    cell_threshold: float = 0.0,
    rotate: bool = False,
    seed: int = 0,
    on_step: Callable[[str, float], None] | None = None,
) -> InvertedFileQuantizer:
    """Learn C cells and the residuals' codebooks for points (X, d), from at most 100,000 of them, drawn by seed.

    threshold and errors as `train_product_quantizer`; cell_threshold as `train_vector_quantizer` (0: plain k-means);
    rotate as there, off here so that FAISS's inverted index is not wrapped in a transform unless asked for.
    """
    chosen = np.sort(np.random.default_rng(seed).permutation(len(points))[:_TRAINING_POINTS])
    checked = checked_points(points if len(chosen) == len(points) else points[chosen])
    cells = train_vector_quantizer(checked, num_centres=num_cells, threshold=cell_threshold, seed=seed)
    residuals = train_product_quantizer(
        checked,
        num_subspaces=num_subspaces,
        code_bits=code_bits,
        threshold=threshold,
        seed=seed,
        centres=cells.centres[cells.assign(checked)],
        rotate=rotate,
        on_step=on_step,
    )
    return InvertedFileQuantizer(cells=cells, residuals=residuals)

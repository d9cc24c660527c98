"""Coarse cells with product-quantized residuals: the codebooks of an IVF index.

A point is coded as its cell's centre plus a decoded residual. The loss weighs errors along the whole point
and errors across it differently, because a score is the sum <q, centre> + <q, residual>.

Letters: X points, d width, C cells, m subspaces, k codewords each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.indexes.quantized.tangents import Slopes
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import default_cells
from services.algorithms.scoring.states import ItemStates, PairGate
from services.offline.training.codebooks.k_means import product_k_means
from services.offline.training.codebooks.product_quantizer import DEFAULT_THRESHOLD, train_product_quantizer
from services.offline.training.codebooks.targets import checked_points

_TRAINING_POINTS = 100_000
_POINTS_PER_CELL, _LEAST_POINTS = 128, 16_384  # limits of the k-means training
_COORDINATES, _CODE_BITS = 2, 4  # a codeword of index `anisotropic`: two bits per coordinate


def catalogue_codebooks(items: ItemStates, pair_gate: PairGate | None, *, seed: int = 0) -> Codebooks | None:
    """Return codebooks for index `anisotropic`, from at most 100,000 of the X items, drawn by seed; None for X = 0."""
    if not len(items):
        return None
    slopes = Slopes(MolScorer(items.take(_sample(len(items), seed)), pair_gate))
    vectors = slopes.vectors()
    vectors = np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % _COORDINATES)))
    # A catalogue smaller than a codebook is repeated. If all vectors are zero, training uses vectors of ones instead.
    points = np.resize(vectors, (max(len(vectors), 1 << _CODE_BITS), vectors.shape[1]))
    with _one_thread():
        return train_inverted_file(
            points if points.any() else np.ones_like(points),
            num_cells=min(default_cells(len(items), slopes.width).num_cells, len(vectors)),
            num_subspaces=vectors.shape[1] // _COORDINATES,
            code_bits=_CODE_BITS,
            rotate=True,
            seed=seed,
            gate_scale=slopes.gate_scale,
        )


def train_inverted_file(
    points: npt.NDArray[np.floating],
    *,
    num_cells: int,
    num_subspaces: int,
    code_bits: int,
    threshold: float = DEFAULT_THRESHOLD,
    rotate: bool = False,
    seed: int = 0,
    gate_scale: npt.NDArray[np.floating] | None = None,
) -> Codebooks:
    """Learn C cells and the residuals' codebooks for points (X, d), from at most 100,000 drawn by seed.

    k-means determines the cells. threshold, rotate and errors: see `train_product_quantizer`. Without rotation,
    FAISS's inverted index needs no transform.
    """
    chosen = _sample(len(points), seed)
    checked = checked_points(points if len(chosen) == len(points) else points[chosen])
    if not 1 <= num_cells <= len(checked):
        raise ValueError(f"num_cells is {num_cells}; it must be from 1 to the number of points, {len(checked)}")
    vectors, generator = torch.from_numpy(checked), torch.Generator().manual_seed(seed)
    most = max(_LEAST_POINTS, _POINTS_PER_CELL * num_cells)
    drawn = vectors
    if len(vectors) > most:
        drawn = vectors[torch.randperm(len(vectors), generator=generator)[:most].sort().values]
    cells = product_k_means(drawn, 1, num_cells, generator)
    codebooks = train_product_quantizer(
        checked,
        num_subspaces=num_subspaces,
        code_bits=code_bits,
        threshold=threshold,
        seed=seed,
        centres=cells[0].numpy(),
        rotate=rotate,
    )
    return replace(codebooks, gate_scale=gate_scale)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread, because its threads wait for one another after each small tensor.

    On two busy cores, 3,706 items took 57 s with two threads and 4 s with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sample(num_points: int, seed: int) -> npt.NDArray[np.int64]:
    return np.sort(np.random.default_rng(seed).permutation(num_points)[:_TRAINING_POINTS])

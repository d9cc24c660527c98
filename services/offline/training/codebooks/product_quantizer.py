"""Product quantization under the score-aware loss: training, encoding, decoding.

A point is m small numbers, and its score for a query is a sum of m table entries. Training starts from plain k-means
and then alternates coordinate-descent encoding with the joint codebook solve; neither step can raise the loss
(arXiv:1908.10396, section 4.1).

Letters: X points, d width, m subspaces, k codewords each, C coarse cells.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.algorithms.indexes.quantized.codebooks import Codebooks, encoded
from services.algorithms.scoring.states import FloatArray
from services.offline.training.codebooks.codebook_solve import solve_codebooks
from services.offline.training.codebooks.k_means import nearest, product_k_means
from services.offline.training.codebooks.score_aware import threshold_weights
from services.offline.training.codebooks.targets import Targets, checked_points, training_targets

DEFAULT_THRESHOLD = 0.2
CODE_BITS = (4, 8)
_TRAINING_POINTS_PER_CODEWORD = 128
_MIN_TRAINING_POINTS = 8_192
_ROUNDS = 10
_SETTLED = 1e-3
_STEPS = 1024  # so many steps make the stiffness table precise to six digits
# Variances below this share of the largest are numerical noise, for example of pixels that are always black.
_SMALLEST_SHARE = 1e-9


def train_product_quantizer(
    points: npt.NDArray[np.floating],
    *,
    num_subspaces: int,
    code_bits: int,
    threshold: float = DEFAULT_THRESHOLD,
    seed: int = 0,
    centres: FloatArray | None = None,
    rotate: bool = True,
    on_step: Callable[[str, float], None] | None = None,
) -> Codebooks:
    """Learn codebooks for points (X, d).

    threshold: T as a share of the points' root mean square norm, so that codes do not depend on the unit of length; 0
    means plain l2. centres (C, d): if given, codes represent residuals from the nearest centre. `rotate` first rotates
    the points so that subspaces share the variance (MiniLM at 192 bits: recall 1@10 .95 instead of .91); it costs d^2
    multiplications per query. `on_step` gets the mean loss after each step ("encode", "solve"). Equal points and seed
    give equal codebooks on one machine. At most max(8,192, 128 k) points are used.
    Raises: ValueError for d not divisible by m, code_bits other than 4 or 8, fewer points than codewords, non-finite or
    only zero vectors, centres of another width, T < 0, or no point longer than T.
    """
    checked = checked_points(points)
    width = checked.shape[1]
    if code_bits not in CODE_BITS:
        raise ValueError(f"code_bits is {code_bits}; it must be one of {CODE_BITS}")
    if num_subspaces < 1 or width % num_subspaces:
        raise ValueError(f"num_subspaces is {num_subspaces}; it must divide the points' width {width}")
    num_codewords = 1 << code_bits
    if len(checked) < num_codewords:
        raise ValueError(f"{len(checked)} points cannot train {num_codewords} codewords; at least as many are needed")
    own = None if centres is None else _own_centres(checked, centres)
    generator = torch.Generator().manual_seed(seed)
    most = max(_MIN_TRAINING_POINTS, _TRAINING_POINTS_PER_CODEWORD * num_codewords)
    targets, scale = training_targets(checked, threshold=threshold, most=most, generator=generator, centres=own)
    rotation = balancing_rotation(targets.vectors, num_subspaces) if rotate else None
    targets = targets.rotated(rotation)
    codebooks = product_k_means(targets.vectors, num_subspaces, num_codewords, generator)
    codebooks = _refined(targets, codebooks, on_step)
    centres = np.zeros((1, width), dtype=np.float32) if centres is None else centres
    return Codebooks(
        centres=centres if rotation is None else centres @ rotation.numpy(),
        codebooks=codebooks.numpy(),
        rotation=None if rotation is None else rotation.numpy(),
        shortest=np.array([threshold * scale]),
        stiffness=_stiffness(width),
    )


def _own_centres(points: FloatArray, centres: FloatArray) -> FloatArray:
    """Return each point's nearest centre, (X, d)."""
    if centres.ndim != 2 or centres.shape[1] != points.shape[1]:
        raise ValueError(f"centres has shape {centres.shape}; expected (C, {points.shape[1]})")
    cells = nearest(torch.from_numpy(points)[None], torch.from_numpy(centres)[None])[0]
    return np.take(centres, cells.numpy(), axis=0)


def _stiffness(width: int) -> npt.NDArray[np.float64]:
    """Return `Codebooks.stiffness`. Its first and last values are the limits 0 and d + 1."""
    ratio = np.linspace(0, 1, _STEPS + 1)[1:-1]
    inner = (threshold_weights(1 / ratio, width, 1.0).ratio - 1) * (1 - ratio**2)
    return np.concatenate([[0.0], inner, [width + 1.0]])


def _refined(targets: Targets, codebooks: Tensor, on_step: Callable[[str, float], None] | None) -> Tensor:
    """Alternate encoding and solving until a round lowers the loss by less than a thousandth, at most ten rounds."""
    report = on_step or (lambda name, loss: None)
    codes = encode(targets, codebooks)
    losses = targets.losses(decode(codes, codebooks))
    loss = float(losses.mean())
    report("encode", loss)
    for _ in range(_ROUNDS):
        before = loss
        solved = solve_codebooks(targets, codes, codebooks)
        solved_losses = targets.losses(decode(codes, solved))
        # Rounding to float32 can lose more than the last solve gained; then training has converged.
        if float(solved_losses.mean()) > loss:
            break
        codebooks, losses = solved, solved_losses
        report("solve", float(losses.mean()))
        codebooks = _reseeded(targets, codes, codebooks, losses)
        codes = encode(targets, codebooks, codes)
        losses = targets.losses(decode(codes, codebooks))
        loss = float(losses.mean())
        report("encode", loss)
        if loss > (1 - _SETTLED) * before:
            break
    return codebooks


def _reseeded(targets: Targets, codes: Tensor, codebooks: Tensor, losses: Tensor) -> Tensor:
    """Set unused codewords to subvectors of the points with the largest losses; no code uses them yet."""
    num_subspaces, num_codewords, _ = codebooks.shape
    flat = codes + torch.arange(num_subspaces) * num_codewords
    used = torch.bincount(flat.reshape(-1), minlength=num_subspaces * num_codewords).view(num_subspaces, -1) > 0
    if bool(used.all()):
        return codebooks
    result = codebooks.clone()
    worst = losses.argsort(descending=True)
    parts = targets.vectors.view(len(targets), num_subspaces, -1)
    for subspace in range(num_subspaces):
        unused = torch.nonzero(~used[subspace])[:, 0]
        result[subspace, unused] = parts[worst[: len(unused)], subspace]
    return result


def encode(targets: Targets, codebooks: Tensor, start: Tensor | None = None) -> Tensor:
    """Return codes (X, m) int64 of X targets with codebooks (m, k, d / m).

    It starts from `start` (X, m), or the nearest codewords by l2, and never ends with a larger loss.
    """
    vectors, directions, stiffness = (one.numpy() for one in (targets.vectors, targets.directions, targets.stiffness))
    present = None if start is None else start.numpy()
    return torch.from_numpy(encoded(vectors, directions, stiffness, codebooks.numpy(), present)).long()


def decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Return the vectors (X, d) of codes (X, m)."""
    num_subspaces = len(codebooks)
    return codebooks[torch.arange(num_subspaces), codes].flatten(1)


def balancing_rotation(vectors: Tensor, num_subspaces: int) -> Tensor:
    """Return an orthogonal matrix R (d, d) float32, to be applied as x @ R, from vectors (X, d).

    It assigns principal directions so that the products of variances within subspaces are as equal as possible: the
    parametric solution of optimized product quantization (Ge et al., TPAMI 2014, section 3.3).
    """
    exact = vectors.double()
    centred = exact - exact.mean(dim=0)
    variances, directions = torch.linalg.eigh(centred.T @ centred)
    logs = variances.clamp(min=max(float(variances[-1]) * _SMALLEST_SHARE, 1e-300)).log()
    # Shifted so that each direction increases its subspace's load.
    order = dealt((logs - logs.min()).tolist(), num_subspaces)
    rotation: Tensor = directions[:, order].float()
    return rotation.contiguous()


def dealt(sizes: list[float], num_groups: int) -> list[int]:
    """Return the d sizes' indices in groups of d / m; each size (largest first) joins the lightest group with room."""
    room = len(sizes) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [0.0] * num_groups
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        group = min((group for group in range(num_groups) if len(groups[group]) < room), key=loads.__getitem__)
        groups[group].append(number)
        loads[group] += sizes[number]
    return [number for group in groups for number in group]

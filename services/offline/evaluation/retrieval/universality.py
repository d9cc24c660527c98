"""Theorem 1 of arXiv:2407.15462 as something that runs: any score matrix is a mixture of two rank-1 logit matrices.

The paper's own construction (its Lemma 2) rescales the first d of A's singular parts entry by entry and mixes the
extreme scales; where those parts are zero its denominator is zero, and no scale helps: the identity with d = 1 is such
a matrix. Mixing +c and -c with pi = (c - A) / 2c, c >= max |A|, always works, and exactly. `docs/universality.md`
tells it; `freshet bench universality` measures both constructions and draws its figure.

Letters: n queries, m items, d rank of a part.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.common.report import Report, Request, report_of, written
from services.offline.evaluation.common.tables import plain_page

DoubleMatrix = npt.NDArray[np.float64]


def mixture_of_constants(scores: DoubleMatrix) -> tuple[DoubleMatrix, DoubleMatrix]:
    """Gates (2, n, m) and rank-1 logits (2, n, m) with sum_p gates_p * logits_p = scores (n, m), to rounding.

    Gates are a distribution at every entry. Raises: ValueError for scores that are no finite matrix.
    """
    _check(scores)
    # All-zero scores need a scale above 0 for the gates to exist.
    scale = float(np.abs(scores).max(initial=0)) or 1.0
    negative = (scale - scores) / (2 * scale)
    gates = np.stack([negative, 1 - negative])
    logits = np.stack([np.full(scores.shape, -scale), np.full(scores.shape, scale)])
    return gates, logits


def mixture_of_scales(scores: DoubleMatrix, rank: int, *, epsilon: float = 1e-6) -> tuple[DoubleMatrix, DoubleMatrix]:
    """The paper's Lemma 2 as printed: gates (2, n, m) over the least and the most scaled rank-d part (2, n, m).

    `epsilon` is what the proof puts in place of a zero denominator. Entries of the rank-d part below 1e-12 of the
    largest count as zero.
    Raises: ValueError for scores that are no finite matrix, or a rank outside 1..min(n, m).
    """
    _check(scores)
    if not 1 <= rank <= min(scores.shape):
        raise ValueError(f"rank={rank} allowed: 1 to min(n, m) = {min(scores.shape)}")
    left, sizes, right = np.linalg.svd(scores, full_matrices=False)
    part = (left[:, :rank] * sizes[:rank]) @ right[:rank]
    rest = scores - part
    zero = np.abs(part) <= 1e-12 * max(1e-300, float(np.abs(part).max()))
    scale = 1 + rest / np.where(zero, epsilon, part)
    least, most = float(scale.min()), float(scale.max())
    gate = (most - scale) / (most - least) if most > least else np.ones_like(scale)
    return np.stack([gate, 1 - gate]), np.stack([least * part, most * part])


def mix(gates: DoubleMatrix, logits: DoubleMatrix) -> DoubleMatrix:
    """sum_p gates_p * logits_p: (P, n, m) each -> (n, m)."""
    return np.asarray((gates * logits).sum(axis=0))


def run(request: Request) -> Report:
    """The largest error of an entry by both constructions over d; writes universality.{md,json,png}."""
    began = time.perf_counter()
    found = rows(seed=request.seed)
    request.out.mkdir(parents=True, exist_ok=True)
    draw(request.out / "universality.png", seed=request.seed)
    report = report_of("universality", request, found, began)
    question = (
        "How far from A is the largest entry of each mixture of two?\n\n![both constructions](universality.png)\n\n"
    )
    return written(request, report, plain_page("Any matrix is a mixture of two", question, found, request.how))


def rows(*, size: int = 16, seed: int = 0) -> list[dict[str, Any]]:
    """One row per matrix and rank: the largest error of an entry by the paper's construction and by constants."""
    return [
        {
            "matrix": name,
            "rank": rank,
            "paper": float(np.abs(mix(*mixture_of_scales(matrix, rank)) - matrix).max()),
            "constants": float(np.abs(mix(*mixture_of_constants(matrix)) - matrix).max()),
        }
        for name, matrix in _matrices(size, seed).items()
        for rank in range(1, size + 1)
    ]


def _matrices(size: int, seed: int) -> dict[str, DoubleMatrix]:
    return {"identity": np.eye(size), "Gaussian noise": np.random.default_rng(seed).normal(size=(size, size))}


def draw(path: Path, *, size: int = 16, seed: int = 0) -> None:
    """Write the figure: the identity by both constructions with d = 1, and both errors on both matrices over d."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    identity = np.eye(size)
    gates, logits = mixture_of_constants(identity)
    panels = [
        ("identity", identity),
        ("the paper's construction, d = 1", mix(*mixture_of_scales(identity, 1))),
        ("gate of the two constants", gates[1]),
        ("their mixture", mix(gates, logits)),
    ]
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 4, height_ratios=[1, 0.9])
    for place, (title, matrix) in enumerate(panels):
        axes = figure.add_subplot(grid[0, place])
        axes.imshow(matrix, cmap="Greys", vmin=0, vmax=1)
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    found = rows(size=size, seed=seed)
    for place, name in enumerate(_matrices(size, seed)):
        axes = figure.add_subplot(grid[1, 2 * place : 2 * place + 2])
        part = [row for row in found if row["matrix"] == name]
        ours = part[0]["constants"]
        axes.semilogy(
            [row["rank"] for row in part],
            [max(row["paper"], 1e-17) for row in part],
            "o-",
            color="black",
            label="the paper's construction",
        )
        axes.axhline(max(ours, 1e-17), color="tab:blue", label="two constants, rank 1 each")
        axes.set_ylim(1e-17, 10)
        axes.set_title(f"{name}, {size} x {size}: largest error of an entry", fontsize=9)
        axes.set_xlabel("d, rank of a part")
        axes.legend(fontsize=8, loc="center left")
    figure.savefig(path, dpi=90, metadata={"Software": None})


def _check(scores: DoubleMatrix) -> None:
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"scores has shape {scores.shape}; expected (n, m), n and m at least 1")
    if not np.isfinite(scores).all():
        raise ValueError("scores holds NaN or infinite values; every value must be finite")

"""Theorem 1 of arXiv:2407.15462 as a program: any score matrix is a mixture of two rank-1 logit matrices.

The paper's construction (Lemma 2) fails if the rank-d part has zeros, as that of the identity with d = 1. Mixing +c and
-c with pi = (c - A) / 2c, c >= max |A|, always works (`docs/reference/universality.md`).

Letters: n queries, m items, d rank of a part.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written

DoubleMatrix = npt.NDArray[np.float64]


def mixture_of_constants(scores: DoubleMatrix) -> tuple[DoubleMatrix, DoubleMatrix]:
    """Return gates (2, n, m) and rank-1 logits (2, n, m) with sum_p gates_p * logits_p = scores (n, m).

    Raises: ValueError for scores that are not a finite matrix.
    """
    _check(scores)
    # Gates need a scale above 0.
    scale = float(np.abs(scores).max(initial=0)) or 1.0
    negative = (scale - scores) / (2 * scale)
    gates = np.stack([negative, 1 - negative])
    logits = np.stack([np.full(scores.shape, -scale), np.full(scores.shape, scale)])
    return gates, logits


def mixture_of_scales(scores: DoubleMatrix, rank: int, *, epsilon: float = 1e-6) -> tuple[DoubleMatrix, DoubleMatrix]:
    """Return gates (2, n, m) over two scaled copies (2, n, m) of the rank-d part, by the paper's Lemma 2 as printed.

    As in the paper's proof, `epsilon` replaces a zero denominator. Entries below 1e-12 of the largest count as zero.
    Raises: ValueError for scores that are not a finite matrix, or a rank outside 1..min(n, m).
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
    """Return sum_p gates_p * logits_p (n, m) of gates and logits (P, n, m)."""
    return np.asarray((gates * logits).sum(axis=0))


def run(request: Request) -> Report:
    """Measure the largest error of both constructions over d; writes universality.{md,json,png}."""
    began = time.perf_counter()
    report = report_of("universality", request, rows(seed=request.seed), began)
    return written(request, report, page, lambda _, out: draw(out / "universality.png", seed=request.seed))


def page(report: Report) -> str:
    """Return universality.md; the report has every rank."""
    shown = [row for row in report["rows"] if row["rank"] in (1, 2, 4, 8, 15, 16)]
    return filled(Path(__file__).with_name("universality.md.j2"), **report | {"rows": shown})


def rows(*, size: int = 16, seed: int = 0) -> list[dict[str, Any]]:
    """Return the largest error of an entry by both constructions, by matrix and rank."""
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
    """Draw the identity by both constructions with d = 1, and both errors over d."""
    identity = np.eye(size)
    gates, logits = mixture_of_constants(identity)
    shown = {
        "identity": identity,
        "the paper's construction, d = 1": mix(*mixture_of_scales(identity, 1)),
        "gate of the two constants": gates[1],
        "their mixture": mix(gates, logits),
    }
    found = rows(size=size, seed=seed)
    with panels(path, 1, 6, size=(3.2, 3), dpi=90) as drawn:
        for panel, (title, matrix) in zip(drawn[0], shown.items(), strict=False):
            titled(panel, title, xticks=[], yticks=[]).imshow(matrix, cmap="Greys", vmin=0, vmax=1)
        for panel, name in zip(drawn[0][4:], _matrices(size, seed), strict=True):
            part = [row for row in found if row["matrix"] == name]
            titled(panel, f"{name}: largest error", xlabel="d, rank of a part", yscale="log", ylim=(1e-17, 10))
            for kind, label in (("paper", "the paper's construction"), ("constants", "two constants, rank 1 each")):
                panel.plot([row["rank"] for row in part], [max(row[kind], 1e-17) for row in part], "o-", label=label)


def _check(scores: DoubleMatrix) -> None:
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"scores has shape {scores.shape}; expected (n, m), n and m at least 1")
    if not np.isfinite(scores).all():
        raise ValueError("scores holds NaN or infinite values; every value must be finite")

"""Clustered vectors of varying norm: small, but with the structure that makes a score-aware loss differ from l2."""

import numpy as np

from services.algorithms.scoring.states import FloatArray


def clustered(num_points: int, width: int, seed: int, *, spread: float = 0.7) -> FloatArray:
    """(X, d) float32 around twelve centres, lengths from 0.6 to 1.6."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(12, width))
    points = centres[rng.integers(12, size=num_points)] + spread * rng.normal(size=(num_points, width))
    points *= rng.uniform(0.6, 1.6, size=(num_points, 1)) / np.linalg.norm(points, axis=1, keepdims=True)
    return points.astype(np.float32)

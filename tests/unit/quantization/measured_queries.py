"""The score-aware loss under queries that were logged, in place of queries spread evenly over the sphere.

`measured_loss` is Definition 3.1 of arXiv:1908.10396 over the log, exactly: a quadratic form of the residual with one
d x d matrix per point. `measured_weights` keeps of that matrix what the encoder can use, two numbers per point: the
mean of the squared part of the queries along the point, and across it spread evenly over the d - 1 other directions
(the approximation: given its score, a query is as likely to lean one way as another). It knows no codes.

Letters: X points, d width, M logged queries.
"""

import numpy as np

from services.algorithms.quantization.score_aware import ErrorWeights, Float64Array, FloatsArray, threshold_weights

_BLOCK_POINTS = 2_048


def measured_loss(points: FloatsArray, decoded: FloatsArray, queries: FloatsArray, threshold: float) -> Float64Array:
    """Mean over the queries (M, d) of 1[<q, x> >= T] <q, x - x~>^2, with q scaled to length 1: per point, (X,)."""
    units = _units(queries, points.shape[1])
    if points.shape != decoded.shape:
        raise ValueError(f"decoded has shape {decoded.shape}; expected {points.shape} as points")
    result = np.empty(len(points))
    for rows in _blocks(len(points)):
        exact = points[rows].astype(np.float64)
        errors = (exact - decoded[rows]) @ units.T
        result[rows] = ((exact @ units.T >= threshold) * errors**2).mean(axis=1)
    return result


def measured_weights(
    points: FloatsArray, queries: FloatsArray, threshold: float, *, prior_queries: float = 10.0
) -> ErrorWeights:
    """Weights along and across for each of the points (X, d), from queries (M, d) whose lengths do not matter.

    A point's sums are joined by `prior_queries` queries that behave like the mean over points, so that one which few or
    no queries reach has sane weights; only points that no unit query could score above T (|x| <= T) are empty.
    Raises: ValueError for other widths, no queries, zero or non-finite ones, T < 0, or when no query reaches any point.
    """
    units = _units(queries, points.shape[1])
    width = points.shape[1]
    norms = np.linalg.norm(points.astype(np.float64), axis=1)
    reachable = ~threshold_weights(norms, width, threshold).empty
    squared_cosines, counts = np.zeros(len(points)), np.zeros(len(points))
    for rows in _blocks(len(points)):
        scores = points[rows].astype(np.float64) @ units.T
        seen = (scores >= threshold) & reachable[rows, None]
        counts[rows] = seen.sum(axis=1)
        cosines = np.divide(scores, norms[rows, None], out=np.zeros_like(scores), where=norms[rows, None] > 0)
        squared_cosines[rows] = (cosines**2 * seen).sum(axis=1)
    if counts.sum() == 0:
        raise ValueError(f"threshold is {threshold}, and no logged query scores any point as high")
    mean_along = squared_cosines[reachable].mean() / len(units)
    mean_across = (counts - squared_cosines)[reachable].mean() / len(units)
    total = len(units) + prior_queries
    along = (squared_cosines + prior_queries * mean_along) / total
    across = (counts - squared_cosines + prior_queries * mean_across) / total / (width - 1)
    # Below 1 only where T is so low that queries lean away from the point; then plain l2 is what is meant.
    ratio = np.maximum(np.divide(along, across, out=np.ones_like(along), where=reachable & (across > 0)), 1)
    with np.errstate(divide="ignore"):
        log_across = np.where(reachable, np.log(across), -np.inf)
    return ErrorWeights(log_across=log_across, ratio=np.where(reachable, ratio, 1))


def _units(queries: FloatsArray, width: int) -> Float64Array:
    if queries.ndim != 2 or queries.shape[1] != width or len(queries) == 0:
        raise ValueError(f"queries has shape {queries.shape}; expected (M, {width}) with M of at least 1")
    exact = queries.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or (lengths == 0).any():
        raise ValueError("queries holds zero vectors or non-finite values; a query must have a direction")
    result: Float64Array = exact / lengths
    return result


def _blocks(num_points: int) -> list[slice]:
    return [slice(first, first + _BLOCK_POINTS) for first in range(0, num_points, _BLOCK_POINTS)]

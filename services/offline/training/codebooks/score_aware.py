"""The score-aware loss: the effect of a quantized vector's error on high scores.

For a query q drawn uniformly from the unit sphere, E[w(<q, x>) <q, x - x~>^2] is a weighted sum of the squared parts of
the residual along x and across it (arXiv:1908.10396, Theorem 3.2). For w(t) = 1[t >= T] both weights are incomplete
beta functions, computed here by one continued fraction, exact and stable for every width.

With I_d = the integral of sin^d over angles from 0 to a = arccos(T / |x|), one integration by parts gives

    h_across = I_d,    h_along = I_d + cos(a) sin^(d-1)(a),    eta = h_along / h_across = 1 + cos(a) sin^(d-1)(a) / I_d,

So eta >= 1 is evident (Theorem 3.3), and nearly equal numbers are never subtracted.

Letters: X points, d width.
"""

from dataclasses import dataclass
from math import lgamma, log, pi

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
FloatsArray = npt.NDArray[np.floating]

_FRACTION_STEPS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorWeights:
    """Weights of the two parts of each point's residual, as expectations over the unit sphere.

    Shapes: log_across (X,), the logarithm of h_across (at d = 1,024 and T = .9 |x| it is about 3e-375, below any
    double); ratio (X,), eta = h_along / h_across. A point that no unit query scores above T has log_across = -inf and
    ratio = 1: its loss is always 0.
    """

    log_across: Float64Array
    ratio: Float64Array

    @property
    def across(self) -> Float64Array:
        """Return h_across (X,); underflows to 0 where the loss itself would."""
        result: Float64Array = np.exp(self.log_across)
        return result

    @property
    def along(self) -> Float64Array:
        """Return h_along (X,)."""
        return self.across * self.ratio

    @property
    def empty(self) -> npt.NDArray[np.bool_]:
        """Return which points (X,) no unit query scores above T."""
        return np.isneginf(self.log_across)


def threshold_weights(norms: FloatsArray, width: int, threshold: float) -> ErrorWeights:
    """Return exact weights for w(t) = 1[t >= T].

    Shapes: norms (X,) are |x_i|; `width` is d, `threshold` T is in units of <q, x> with |q| = 1.
    Raises: ValueError for norms that are negative or not finite, d < 2, or T < 0 (w is then positive below zero, which
    Theorem 3.3 does not cover).
    """
    lengths = _checked_norms(norms, width)
    if not (np.isfinite(threshold) and threshold >= 0):
        raise ValueError(f"threshold is {threshold}; it must be a finite number of at least 0")
    log_across = np.full(len(lengths), -np.inf)
    ratio = np.ones(len(lengths))
    seen = lengths > threshold
    cosine = np.minimum(threshold / lengths[seen], 1 - 1e-15)
    log_integral, log_edge = _log_sine_integral(cosine, width)
    log_across[seen] = log_integral - _log_sphere(width)
    ratio[seen] = 1 + np.exp(log_edge - log_integral)
    return ErrorWeights(log_across=log_across, ratio=ratio)


def eta(threshold: float, width: int) -> float:
    """Return eta = h_along / h_across of a unit vector."""
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold is {threshold}; a unit vector has weights for 0 <= T < 1")
    return float(threshold_weights(np.ones(1), width, threshold).ratio[0])


def residual_parts(points: FloatsArray, decoded: FloatsArray) -> tuple[Float64Array, Float64Array]:
    """Return squared lengths (X,), (X,) of each residual x - x~ along x and across it.

    Shapes: points, decoded (X, d). For x = 0 the whole residual counts as across.
    """
    if points.shape != decoded.shape:
        raise ValueError(f"decoded has shape {decoded.shape}; expected {points.shape} as points")
    exact = points.astype(np.float64)
    residual = exact - decoded
    squared = np.einsum("xd,xd->x", exact, exact)
    inner = np.einsum("xd,xd->x", residual, exact)
    along = np.divide(inner**2, squared, out=np.zeros_like(inner), where=squared > 0)
    across = np.maximum(np.einsum("xd,xd->x", residual, residual) - along, 0)
    return along, across


def score_aware_loss(points: FloatsArray, decoded: FloatsArray, threshold: float) -> Float64Array:
    """Return E[1[<q, x> >= T] <q, x - x~>^2] for q uniform on the unit sphere, per point (X,): Definition 3.1."""
    along, across = residual_parts(points, decoded)
    weights = threshold_weights(np.linalg.norm(points.astype(np.float64), axis=1), points.shape[1], threshold)
    return weights.along * along + weights.across * across


def _checked_norms(norms: FloatsArray, width: int) -> Float64Array:
    lengths = np.asarray(norms, dtype=np.float64)
    if lengths.ndim != 1 or not np.isfinite(lengths).all() or (lengths < 0).any():
        raise ValueError(f"norms must be finite numbers of at least 0 in one row; their shape is {lengths.shape}")
    if width < 2:
        raise ValueError(f"width is {width}; the loss needs at least 2, one direction along and one across")
    return lengths


def _log_sphere(width: int) -> float:
    """Logarithm of (d - 1) times the integral of sin^(d-2) from 0 to pi, which normalises h.

    The weight across is E[1[..] sin^2] / (d - 1), the weight along E[1[..] cos^2]. I_d includes the (d - 1) of Theorem
    3.2's main text, which its appendix omits.
    """
    return log(width - 1) + 0.5 * log(pi) + lgamma((width - 1) / 2) - lgamma(width / 2)


def _log_sine_integral(cosine: Float64Array, width: int) -> tuple[Float64Array, Float64Array]:
    """Logarithms of I_d and of cos(a) sin^(d-1)(a), with cos(a) in [0, 1).

    I_d is half the incomplete beta function of sin^2(a) at ((d + 1) / 2, 1 / 2). In the tail it is a prefactor times a
    continued fraction; near the equator, where the fraction converges slowly, it is half a sphere minus the rest.
    """
    a, b = (width + 1) / 2, 0.5
    squared_sine = (1 - cosine) * (1 + cosine)
    with np.errstate(divide="ignore"):
        log_cosine = np.log(cosine)
    log_sine = 0.5 * np.log(squared_sine)
    log_edge = log_cosine + (width - 1) * log_sine
    in_tail = squared_sine < (a + 1) / (a + b + 2)
    log_prefactor = 2 * a * log_sine + 2 * b * log_cosine
    result = np.empty_like(cosine)
    result[in_tail] = log_prefactor[in_tail] - log(2 * a) + np.log(_beta_fraction(a, b, squared_sine[in_tail]))
    near = ~in_tail
    half_sphere = lgamma(a) + lgamma(b) - lgamma(a + b)
    rest = np.exp(log_prefactor[near] - log(b) - half_sphere) * _beta_fraction(b, a, cosine[near] ** 2)
    result[near] = log(0.5) + half_sphere + np.log1p(-rest)
    return result, log_edge


def _beta_fraction(a: float, b: float, x: Float64Array) -> Float64Array:
    """Continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's rule.

    B(x; a, b) = x^a (1 - x)^b / a * fraction. Converges in O(sqrt(max(a, b))) steps for x < (a + 1) / (a + b + 2).
    """
    c = np.ones_like(x)
    d = 1 / (1 - (a + b) * x / (a + 1))
    value = d.copy()
    for m in range(1, _FRACTION_STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / (1 + even * d), 1 + even / c
        value *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / (1 + odd * d), 1 + odd / c
        step = d * c
        value *= step
        if x.size == 0 or np.abs(step - 1).max() < 1e-15:
            break
    return value

"""SiLU, the gate's activation (arXiv:1702.03118)."""

import numpy as np
import numpy.typing as npt


def silu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x / (1 + e**-x), elementwise."""
    with np.errstate(over="ignore"):  # far below zero the exponential is infinite, the quotient correct
        return np.asarray(x / (1 + np.exp(-x)))

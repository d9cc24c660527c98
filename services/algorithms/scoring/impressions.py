"""Impressions lower an item's score for their user: by d · 2^(-age / half-life) each.

Other users' scores do not change.
"""

import numpy as np
import numpy.typing as npt


def discount(ages_s: npt.ArrayLike, *, each: float, half_life_s: float) -> npt.NDArray[np.float64]:
    """The discount of impressions of these ages in seconds, elementwise. each: of one just now."""
    return np.asarray(each * np.exp2(-np.maximum(0.0, np.asarray(ages_s, dtype=np.float64)) / half_life_s))

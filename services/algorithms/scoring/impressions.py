"""What impressions take from an item's score for the person who had them: d · 2^(-age / half-life), each.

It never counts as liking, and other people's scores do not change.
"""

import numpy as np
import numpy.typing as npt


def discount(ages_s: npt.ArrayLike, *, each: float, half_life_s: float) -> npt.NDArray[np.float64]:
    """Of impressions so many seconds ago, elementwise; `each`: of one just now."""
    return np.asarray(each * np.exp2(-np.maximum(0.0, np.asarray(ages_s, dtype=np.float64)) / half_life_s))

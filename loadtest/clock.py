"""When calls are due: arrival times on a clock that does not wait for answers.

Users of a real site do not hold back because the server is slow; arrivals fixed in advance keep a slow server from
thinning out its own load. Pure functions of a rate, a duration and a seed; nothing here sleeps or sends.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
ARRIVALS = ("poisson", "uniform")


def arrivals(kind: str, *, rate_per_s: float, seconds: float, rng: np.random.Generator) -> FloatArray:
    """Due times in seconds since the start, increasing, all in [0, seconds).

    "poisson": independent users (exponential gaps); "uniform": equal gaps from a random first one, for runs that are
    to be compared.
    Raises: ValueError for another kind or a negative rate.
    """
    if kind not in ARRIVALS:
        raise ValueError(f"arrivals={kind!r}; allowed: {', '.join(ARRIVALS)}")
    if rate_per_s < 0 or seconds < 0:
        raise ValueError(f"rate_per_s={rate_per_s}, seconds={seconds}; allowed: 0 or more")
    if rate_per_s == 0 or seconds == 0:
        return np.zeros(0)
    if kind == "uniform":
        return np.arange(rng.random() / rate_per_s, seconds, 1.0 / rate_per_s)
    # Given their number, the arrivals of a Poisson process are uniform: no loop over gaps.
    return np.sort(rng.random(rng.poisson(rate_per_s * seconds)) * seconds)

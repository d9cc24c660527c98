"""Refreshed item states: the model's states, moved towards the states of the item's users (PEFA-XS).

g' = lambda g + (1 - lambda) Pi(sum), per component, with Pi(v) = v / ||v||; a zero sum has Pi(0) = 0 and lambda = 1. g'
is not renormalised and the gate is unchanged, so that the model's share of a score stays defined.

Letters: n items, P_x item components, P pairs, d component width.
"""

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.exact_floats import Doubles
from services.algorithms.scoring.states import ItemStates


def refreshed(base: ItemStates, sums: Doubles, share: npt.NDArray[np.floating]) -> ItemStates:
    """The states of n items from bundle states, sums and lambda. A component with a zero sum is unchanged.

    Shapes: base (n, P_x, d) and (n, P), sums (n, P_x, d), share (n,) or (n, P_x) in [0, 1] -> as `base`. Items unknown
    to the model are `contribution.cold_start_items` with `policy.NEW_ITEM_SHARE`. Raises: ValueError for shapes that
    disagree, a share outside [0, 1] and non-finite sums. Source: arXiv:2312.02429, equation 8.
    """
    directions = unit(sums)
    if sums.shape != base.components.shape:
        raise ValueError(f"sums has shape {sums.shape}; the items' components have {base.components.shape}")
    share = np.asarray(share, dtype=np.float64)
    if share.shape not in (sums.shape[:1], sums.shape[:2]):
        raise ValueError(f"share has shape {share.shape}; expected {sums.shape[:1]} or {sums.shape[:2]}")
    if not ((share >= 0) & (share <= 1)).all():
        worst = share[~((share >= 0) & (share <= 1))][0]
        raise ValueError(f"share holds {worst}; allowed: 0 to 1")
    wide = share[:, None] if share.ndim == 1 else share
    shares = np.where((sums != 0).any(axis=2), wide, 1.0)[:, :, None]
    components = shares * base.components + (1 - shares) * directions
    return ItemStates(components=np.ascontiguousarray(components, dtype=np.float32), gate=base.gate)


def unit(vectors: npt.NDArray[np.floating]) -> Doubles:
    """Vectors along the last axis divided by their lengths, in float64; zero stays zero.

    Raises: ValueError for non-finite values.
    """
    values = np.asarray(vectors, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("vectors hold NaN or infinite values; every value must be finite")
    # Divided by the largest value first, so that lengths neither underflow nor overflow.
    largest = np.abs(values).max(axis=-1, keepdims=True, initial=0)
    scaled = values / np.where(largest > 0, largest, 1.0)
    lengths = np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True))
    return np.asarray(scaled / np.where(lengths > 0, lengths, 1.0))

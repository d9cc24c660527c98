"""Choose the length of new items' components, as measured for a bundle (services/offline/training/new_items.py) or from
known items' sums.

Letters: n items; P_x item components, d their width.
"""

import numpy as np

from services.algorithms.pefa.policy import NEW_ITEM_SHARE, SharePolicy
from services.algorithms.pefa.sums import SumsOf
from services.algorithms.scoring.states import ItemStates

_ENOUGH = 20  # interactions of an item
_ITEMS = 20
# Prior in units of weight times coherence. Three interactions are about 1.3, which gives nine tenths of the length.
_PRIOR = 0.1


def share_of_length(length: float) -> SharePolicy:
    """The policy of new items whose components approach `length`: nine tenths after three interactions.

    Raises: ValueError unless 0 < length <= 1.
    """
    if not 0 < length <= 1:
        raise ValueError(f"length={length} allowed: more than 0, at most 1")
    return SharePolicy(prior=_PRIOR, least=1.0 - length)


def new_item_share_from_sums(known: ItemStates, observed: SumsOf) -> SharePolicy:
    """The policy under which new items score like trained ones, from known items' sums.

    <g, sum> is the total similarity of an item's trained state g to its users' states (the sum contains the pair
    weights). ||sum|| is the same total for a new item's direction. The length is the ratio of both over all items.
    Measured for MovieLens-1M: .46 to .49 for the 8x4x64 model, where .5 to .55 is best; .78 to .85 for 4x2x32, where .8
    to .9 is best. Items with fewer than `_ENOUGH` interactions are omitted, because they are too similar to their sums;
    with fewer than `_ITEMS` others the result is `NEW_ITEM_SHARE`.

    Shapes: known (n, P_x, d): bundle states of n items known to the model; observed: their sums. Raises: ValueError for
    shapes that disagree.
    """
    if known.components.shape != observed.sums.shape:
        raise ValueError(
            f"known has shape {known.components.shape} and observed.sums {observed.sums.shape}; expected one shape"
        )
    enough = observed.counts >= _ENOUGH
    sums = observed.sums[enough]
    lengths = float(np.sqrt((sums * sums).sum(axis=2)).sum())
    if int(enough.sum()) < _ITEMS or lengths == 0:
        return NEW_ITEM_SHARE
    length = float((known.components[enough] * sums).sum()) / lengths
    return SharePolicy(prior=NEW_ITEM_SHARE.prior, least=1.0 - min(max(length, 0.0), 1.0))

"""How long a new item may be, in closed form, from held-out scores or from the sums themselves; grids are the
evaluation's. Training measures it on its model and writes it into the bundle (services/offline/training/new_items.py).

What a good ranking is, and which interactions are held out, is the caller's; here is the arithmetic.

Letters: n interactions, or items; P_x item components, d their width.
"""

import math

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.policy import NEW_ITEM_SHARE, SharePolicy
from services.algorithms.pefa.sums import SumsOf
from services.algorithms.scoring.states import ItemStates

_ENOUGH = 20  # interactions of an item
_ITEMS = 20
# In units of weight times coherence, and three interactions together have about 1.3: they reach nine tenths.
_PRIOR = 0.1


def share_of_length(length: float) -> SharePolicy:
    """The policy of new items whose components may become `length` long; after three interactions nine tenths of it.

    Raises: ValueError for a length that is not above 0 and at most 1.
    """
    if not 0 < length <= 1:
        raise ValueError(f"length={length} allowed: more than 0, at most 1")
    return SharePolicy(prior=_PRIOR, least=1.0 - length)


def new_item_share_from_sums(known: ItemStates, said: SumsOf, *, prior: float = NEW_ITEM_SHARE.prior) -> SharePolicy:
    """The policy of new items under which they score as trained ones do, in closed form from known items' sums.

    <g, sum> adds up the model's similarity of an item with those who took it (the pair weights are in the sum), ||sum||
    that of the direction which a new item would have: the ratio over all items is how long a new item's components may
    become. Measured: .46 to .49 for the 8x4x64 model of MovieLens-1M, where .5 to .55 answers best; .78 to .85 for
    4x2x32, where .8 to .9 does. Items of few interactions flatter their own sums, so those of `_ENOUGH` and more are
    asked; where fewer than `_ITEMS` have as many, `NEW_ITEM_SHARE` it is.

    Shapes: known (n, P_x, d): bundle states of n items that the model knows; said: what the sums say of the same items.
    Raises: ValueError for shapes that disagree.
    """
    if known.components.shape != said.sums.shape:
        raise ValueError(
            f"known has shape {known.components.shape} and said.sums {said.sums.shape}; expected one shape"
        )
    enough = said.counts >= _ENOUGH
    sums = said.sums[enough]
    lengths = float(np.sqrt((sums * sums).sum(axis=2)).sum())
    if int(enough.sum()) < _ITEMS or lengths == 0:
        return NEW_ITEM_SHARE
    length = float((known.components[enough] * sums).sum()) / lengths
    return SharePolicy(prior=prior, least=1.0 - min(max(length, 0.0), 1.0))


def new_item_length(model: npt.NDArray[np.floating], memory: npt.NDArray[np.floating]) -> float:
    """How long new items' components may become so that they score as trained ones do: the ratio of the means, 0 to 1.

    Shapes: model, memory (n,): the similarity of n held-out queries with the known items that followed, by the bundle's
    states and by Pi(sum) of others' interactions with no model in it. On MovieLens-1M .52 (8x4x64), where .5 to .55
    measured best, and .96 (4x2x32).
    Raises: ValueError for shapes that disagree, no rows, values that are not finite, or a memory that points away.
    """
    by_model, by_memory = np.asarray(model, dtype=np.float64), np.asarray(memory, dtype=np.float64)
    if by_model.shape != by_memory.shape or by_model.ndim != 1 or not len(by_model):
        raise ValueError(f"model {by_model.shape} and memory {by_memory.shape}; expected (n,) each, n at least 1")
    ahead, behind = float(by_model.mean()), float(by_memory.mean())
    if not (math.isfinite(ahead) and behind > 0):
        raise ValueError(f"mean similarities {ahead} and {behind}; allowed: finite ones, the memory's above 0")
    return min(max(ahead / behind, 0.0), 1.0)

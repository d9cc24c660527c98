"""Test whether the order of the events carries information, by shuffling each user's events.

The items that most often followed the previous item in other users' sequences predict the next one. If the order has no
information, the predictions are as good after shuffling.

Letters: N events, X items.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .interactions import Interactions

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Verdict = Literal["ordered", "no order found", "sorted by item"]

_HITS_AT = 10
_SHUFFLES = 20
_HELD_OUT_USERS = 0.2
# Limit for the share of steps to a higher item code. Gowalla has .97, because each user's events are two runs sorted by
# item number. Data sets in order of time have .51 to .70.
_SORTED_SHARE = 0.9
_MIN_Z = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderTest:
    """The result. `hit_rate`: share of held-out steps whose item is among the ten predictions. `lift`: the hit rate
    over the mean shuffled rate. `z`: their difference in standard deviations of the shuffled rates.
    """

    hit_rate: float
    z: float
    lift: float
    verdict: Verdict


def order_test(interactions: Interactions) -> OrderTest:
    """Compare the hit rate of first-order predictions before and after shuffling each user's events 20 times.

    About a fifth of the users is held out. The other users' counts predict the held-out steps, with equal counts in
    random order. The verdict is "sorted by item" if nine of ten steps to another item go to a higher (or a lower) item
    code. Otherwise "ordered" needs z of at least 4 and a higher rate than every shuffle.
    Raises: ValueError if no held-out or no other user has two events. Cost: O(N log N) per shuffle.
    """
    rng = np.random.default_rng(0)
    rows, _ = interactions.by_user()
    users, items = interactions.users[rows].astype(np.int64), interactions.items[rows].astype(np.int64)
    held_out = rng.random(interactions.num_users) < _HELD_OUT_USERS
    same_user = users[1:] == users[:-1]
    tested, learnt = same_user & held_out[users[1:]], same_user & ~held_out[users[1:]]
    if not tested.any() or not learnt.any():
        raise ValueError(f"{interactions.name} has too few users with two events for a shuffle test")
    hit_rate = _hit_rate(items, learnt, tested, interactions.num_items)
    shuffled = np.array(
        [
            _hit_rate(items[np.lexsort((rng.random(len(items)), users))], learnt, tested, interactions.num_items)
            for _ in range(_SHUFFLES)
        ]
    )
    mean, deviation = float(shuffled.mean()), float(shuffled.std(ddof=1))
    z = (hit_rate - mean) / deviation if deviation else float(np.sign(hit_rate - mean)) * float("inf")
    steps = np.diff(items)[same_user]
    moved = steps[steps != 0]
    rising = float((moved > 0).mean()) if len(moved) else 0.5
    return OrderTest(
        hit_rate=hit_rate,
        z=z,
        lift=hit_rate / mean if mean else float("inf"),
        verdict=_verdict(z, hit_rate > float(shuffled.max()), rising),
    )


def _verdict(z: float, above_all: bool, rising: float) -> Verdict:
    if max(rising, 1 - rising) >= _SORTED_SHARE:
        return "sorted by item"
    return "ordered" if z >= _MIN_Z and above_all else "no order found"


def _hit_rate(items: IntArray, learnt: BoolArray, tested: BoolArray, num_items: int) -> float:
    """Return the expected share of tested steps whose item is among the ten that most often follow the previous one.

    items (N,); learnt, tested (N - 1,): whether the step from event i to i + 1 is counted, and whether it is predicted.
    """
    steps = items[:-1] * num_items + items[1:]
    pairs, counts = np.unique(steps[learnt], return_counts=True)
    wanted = steps[tested]
    row = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    found = pairs[row] == wanted
    # Keys sort by item, then by descending count, so two lookups count the more frequent followers.
    highest = int(counts.max())
    keys = np.sort(pairs // num_items * (highest + 1) + highest - counts)
    previous = wanted[found] // num_items
    own = previous * (highest + 1) + highest - counts[row[found]]
    above = np.searchsorted(keys, own, side="left") - np.searchsorted(keys, previous * (highest + 1), side="left")
    equal = np.searchsorted(keys, own, side="right") - np.searchsorted(keys, own, side="left")
    hits = np.clip((_HITS_AT - above) / equal, 0.0, 1.0)
    return float(hits.sum() / len(wanted))

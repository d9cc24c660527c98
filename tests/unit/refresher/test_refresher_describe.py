"""Answers about what is held leave the lock to folding in between, and are right all the same."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from refresher_scene import P_X, D, World, interaction, make_rules

from services.algorithms.pefa.sums import ItemSums
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.records import Interaction
from services.refresher.server import Describe

RULES = make_rules(max_remembered=4)
NUM_NEW = 600


class WatchedLock:
    """A lock that counts how often it was taken, and calls `between` each time after it was let go."""

    def __init__(self) -> None:
        self._lock, self.taken = Lock(), 0
        self.between: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        between, self.between = self.between, lambda: None
        between()


class SmallSlices(ItemSums):
    """Hashes an item at a time."""

    def hash_some(self, num_bytes: int = 1) -> bool:
        return super().hash_some(1)


def click(place: int, item: str, user: str) -> Interaction:
    return interaction(np.random.default_rng(place), place=(0, place), item=item, user=user)


def folded(clicks: list[Interaction]) -> Partition:
    state = Partition(0, RULES, {f"new-{number}": True for number in range(NUM_NEW)})
    state.sums = SmallSlices(num_components=P_X, width=D)
    state.fold(clicks)
    return state


def scene(clicks: list[Interaction]) -> tuple[Describe, Partition, WatchedLock]:
    lock: Any = WatchedLock()
    state = folded(clicks)
    held = PartitionRegistry(lock=lock, partitions={0: state})
    return Describe(held, World(RULES).refresher().publisher, RULES), state, lock


CLICKS = [click(number, f"new-{number}", f"user-{number % 7}") for number in range(NUM_NEW)]
POPULAR = [click(NUM_NEW + number, "item-0", f"reader-{number}") for number in range(100)]


def test_a_users_items_are_counted_with_folding_in_between() -> None:
    describe, state, lock = scene([*CLICKS, *POPULAR])
    lock.between = lambda: state.fold([click(2000, "item-1", "somebody else")])
    found = describe.user("user-3")
    expected = sum(number % 7 == 3 for number in range(NUM_NEW))
    assert (found.interactions, found.items) == (expected, expected)
    assert lock.taken > 1
    assert [describe.user(user).items for user in ("reader-99", "somebody else", "nobody")] == [1, 1, 0]


def test_a_status_lets_folding_in_between_its_slices_and_its_digest_is_that_of_its_position() -> None:
    describe, state, lock = scene(CLICKS)
    late = click(2000, "item-1", "somebody else")
    lock.between = lambda: state.fold([late])
    (status,) = describe.status().partitions
    assert lock.taken > NUM_NEW
    assert status.digest == folded([*CLICKS, late]).digest()
    taken = lock.taken
    state.fold([click(2001, "item-2", "somebody else")])
    describe.status()
    # Only what changed is hashed again.
    assert lock.taken - taken <= 3


def test_a_status_has_the_time_of_the_newest_interaction_if_there_is_one() -> None:
    (status,) = scene([])[0].status().partitions
    assert not status.HasField("newest_recorded_time")
    (status,) = scene(CLICKS)[0].status().partitions
    assert status.newest_recorded_time.ToMilliseconds() == max(one.recorded_ms for one in CLICKS)

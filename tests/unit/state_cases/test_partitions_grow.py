"""Partitions are added to a running system: an item's home changes, a user's records lie in more places.

The in-memory log gets another partition as Kafka's does: what was written stays where it is, what comes next is placed
by the new number.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from fakes.refresher import MemoryLog
from gateway.gateway_scene import Scene
from refresher.refresher_scene import NUM_ITEMS, World, fold_all, interaction, make_rules, readers_view

from services.contracts.topics.index_deltas import IndexDelta, ItemDelta
from services.gateway.ports import Contributions, StoredUser
from services.platform import request_context
from services.platform.errors import PreconditionFailed
from services.platform.stream.kafka import partition_for
from services.platform.stream.topic import NUM_PARTITIONS

# An item whose records move from partition 0 to partition 1 when there are two.
MOVED = next(f"item-{row}" for row in range(NUM_ITEMS) if partition_for(f"item-{row}".encode(), 2) == 1)


def delta(partition: int, offset: int, components: np.ndarray) -> IndexDelta:
    return IndexDelta(
        model_version="m1",
        partition=partition,
        offset=offset,
        batch=1,
        last_of_batch=True,
        change=ItemDelta(item_id="a", components=components),
    )


def test_readers_take_the_deltas_of_an_item_that_changed_its_partition() -> None:
    old, new = np.full((2, 4), 0.5, np.float32), np.full((2, 4), -0.5, np.float32)
    items, _ = readers_view([delta(0, 100, old), delta(1, 5, new)])
    assert items["a"].components.tolist() == new.tolist()


def sums_of(world: World) -> Mapping[int, Any]:
    """By partition that has the item: its sums."""
    running = world.settled()
    found = {
        number: state.sums.of([MOVED]).sums.tolist()
        for number, state in running.held.partitions.items()
        if MOVED in state.sums
    }
    running.refresher.finish()
    return found


def test_an_item_that_changes_its_partition_takes_its_sums_along() -> None:
    """A refresher that refuses the new number of partitions by name would do, too."""
    rng, world, whole = np.random.default_rng(3), World(make_rules()), MemoryLog()
    before = [interaction(rng, place=(0, n), item=MOVED, user=f"user-{n}") for n in range(4)]
    after = [interaction(rng, place=(0, 4 + n), item=MOVED, user=f"user-{n}") for n in range(3)]
    for record in (*before, *after):
        whole.append(0, record)
    for record in before:
        world.log.append(0, record)
    assert list(sums_of(world)) == [0]
    world.log.entries.append([])
    for record in after:
        world.log.append(1, record)
    wanted = fold_all(world.rules, whole).sums.of([MOVED]).sums.tolist()
    try:
        found = sums_of(world)
    except PreconditionFailed:
        return
    assert found == {1: wanted}


async def test_a_forget_is_not_done_while_an_added_partition_holds_the_user() -> None:
    """`attributions` has sixteen partitions: one refresher has forgotten in the first eight, another holds the other
    eight and has not come to it."""
    scene = Scene()
    up_to = {partition: end - 1 for partition, end in scene.ends.ends.items()}
    scene.encoder.users["ann"] = StoredUser(pseudonym="p-ann", forgotten_up_to=up_to)
    scene.refreshers.of_users["p-ann"] = [
        Contributions(forgotten_up_to=up_to, partitions=range(NUM_PARTITIONS)),
        Contributions(summed_interactions=5, forgotten_up_to={}, partitions=range(NUM_PARTITIONS, 2 * NUM_PARTITIONS)),
    ]
    scene.ends.num_attribution_partitions = 2 * NUM_PARTITIONS
    # Ask with little time, so that a forget that is not applied is reported soon.
    token = request_context.deadline.set(time.monotonic() + 0.3)
    try:
        report = await scene.forget_user("ann", preview=False)
    finally:
        request_context.deadline.reset(token)
    assert (report.left["summed_interactions"], report.is_applied) == (5, False)

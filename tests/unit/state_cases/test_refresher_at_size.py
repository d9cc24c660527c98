"""The refresher with many users: a checkpoint that stops the world, a takeover without the files, costly forgets.

The in-memory ports are kinder than the real ones: their records are never removed and read again at no cost. Here a
log's beginning goes, as retention has it, and reading again costs time on a clock of the test's own.
"""

import secrets
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
from fakes.refresher import MemoryLog, to_bytes
from refresher.refresher_scene import World, fold_all, interaction, make_rules

from services.gateway.adapters.peers import offsets_of
from services.refresher.domain.partition import Partition
from services.refresher.domain.records import Forgetting, Interaction

RULES = make_rules()
USERS = 100_000
# A checkpoint may keep the other threads of its process waiting so long (the lease's renewal among them).
MAX_PAUSE_S = 0.05


def test_a_checkpoint_does_not_hold_the_interpreter() -> None:
    """The pause grows with the users: at a few million it is longer than a lease, and refreshers take turns losing it.
    Real threads: one only sleeps a millisecond at a time, as a busy lease would renew. Its pauses are told in the
    other's processor time, which other processes do not lengthen."""
    state = Partition(0, RULES, {})
    for place in range(USERS):
        state.ledger.add(secrets.token_hex(16), place, place)
    pauses: list[float] = []
    done, clock = threading.Event(), time.pthread_getcpuclockid(threading.get_ident())

    def renew() -> None:
        last = time.clock_gettime(clock)
        while not done.wait(0.001):
            now = time.clock_gettime(clock)
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=renew)
    thread.start()
    while not pauses:
        time.sleep(0.001)
    started = time.clock_gettime(clock)
    to_bytes(state)
    seconds = time.clock_gettime(clock) - started
    done.set()
    thread.join()
    # On a busy machine a thread may wait longer for a core; one call that sorts is a third of the whole.
    assert max(pauses) <= max(MAX_PAUSE_S, seconds / 4)


def filled(world: World, count: int = 200) -> None:
    rng = np.random.default_rng(7)
    for number in range(count):
        user, item = f"user-{number % 9}", f"item-{number % 12}"
        world.log.append(0, interaction(rng, place=(0, number), item=item, user=user))


def log_of(entries: Sequence[Interaction]) -> MemoryLog:
    log = MemoryLog()
    for entry in entries:
        log.append(0, entry)
    return log


def sums(state: Partition) -> dict[str, list[float]]:
    items = sorted(state.sums)
    return dict(zip(items, state.sums.of(items).sums.tolist(), strict=True))


def test_a_forget_of_what_retention_removed_leaves_the_others_sums() -> None:
    world = World(RULES)
    filled(world)
    running = world.settled()
    others = [f"item-{number}" for number in range(12) if number % 3]
    before = {item: running.held.partitions[0].sums.of([item]).sums.tolist() for item in others}
    world.log.expire(0, 100)
    # user-0's items are those whose number 3 divides; the others hold nothing of that user.
    world.log.append(0, Forgetting(0, "user-0", {0: 199}))
    running.settle()
    state = running.held.partitions[0]
    after = {item: state.sums.of([item]).sums.tolist() if item in state.sums else None for item in others}
    assert after == before
    # What is left of the forgotten user's items is what the log has left of others.
    left = [entry for entry in world.log.entries[0][100:200] if entry.item_id == "item-3" and entry.user != "user-0"]
    batch = fold_all(RULES, log_of(left))
    assert state.sums.of(["item-3"]).sums.tolist() == batch.sums.of(["item-3"]).sums.tolist()
    assert not state.remembered.visible.keys() & {f"0-{number}" for number in range(0, 200, 9)}
    assert running.describe.user("user-0").interactions == 0
    again = world.refresher("b", checkpoints=world.checkpoints)
    running.refresher.finish()
    again.settle()
    assert again.digests() == {0: state.digest()}


class CostlyLog(MemoryLog):
    """Reading a record again takes a millisecond of the test's clock: what lies far apart is fetched one by one."""

    def __init__(self) -> None:
        super().__init__(poll_records=100)
        self.now_ms = 0

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        self.now_ms += len(offsets)
        return super().read_again(partition, offsets)


def test_a_heavy_users_forget_does_not_hold_up_the_others() -> None:
    """One user has 3,000 interactions, each to be read again; another user's event follows the forget at once. It has
    to be in the sums within a second, the length of a lease."""
    rng, log = np.random.default_rng(5), CostlyLog()
    world = World(RULES, log=log)
    for number in range(3_000):
        log.append(0, interaction(rng, place=(0, number), item=f"item-{number % 11}", user="heavy"))
    running = world.settled(checkpoint_s=1e9)
    log.append(0, Forgetting(0, "heavy", {0: 2_999}))
    log.append(0, interaction(rng, place=(0, 3_000), item="item-11", user="another"))
    asked_ms = log.now_ms
    while "item-11" not in running.held.partitions[0].sums:
        running.refresher.step()
    assert log.now_ms - asked_ms <= 1_000
    state = running.held.partitions[0]
    # Not said to be done before it is; and a successor goes on with it.
    assert offsets_of(running.describe.user("heavy").forgotten_up_to) == {}
    running.refresher._checkpoints.keep(state)
    world.now_ms += 10_000
    successor = world.settled("b")
    while successor.held.partitions[0].leaving:
        successor.refresher.step()
    assert offsets_of(successor.describe.user("heavy").forgotten_up_to) == {0: 2_999}
    assert list(successor.held.partitions[0].sums) == ["item-11"]
    assert successor.digests() == {0: fold_all(RULES, log).digest()}

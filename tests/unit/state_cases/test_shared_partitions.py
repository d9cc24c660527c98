"""Encoder processes share the partitions by leases: whoever holds which, users are what a replay of the log says.

Leases end by a test's clock. A process that is not asked for longer than a lease was paused, or died.
"""

import os
import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from fakes.leases import LeaseTable, MemoryLeases
from state_scene import EncoderProcess, FragileStore, append, interaction, replay
from structlog.testing import capture_logs

from services.contracts.topics.attributions import Attribution
from services.contracts.topics.forgets import Forget
from services.encoder.domain import EncodedStates, EncodeJob
from services.user_state.layout import home_of

PARTITIONS = 4
LEASE_MS = 1_000
USERS = [f"user-{number}" for number in range(8)]
SEEDS = int(os.environ.get("FRESHET_SHARE_SEEDS", "20"))


class Model(HashEncoder):
    """`meanwhile` is done once, in the middle of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] | None = None

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().encode(jobs)


class Sharing(EncoderProcess):
    """One of several."""

    model: Model


class World:
    """A log, a store and leases, and processes on them."""

    def __init__(self) -> None:
        self.stream, self.store, self.forgets = MemoryStream(PARTITIONS), FragileStore(), MemoryForgetLog()
        self.outbox = MemoryOutbox(self.stream.histories)
        self.now_ms, self.second, self.started = 0, 0, 0
        self.table = LeaseTable(lambda: self.now_ms, LEASE_MS)
        self.processes: list[Sharing] = []

    def join(self, **changes: Any) -> "Sharing":
        self.started += 1
        made = Sharing(
            self.stream.reader(),
            self.store,
            model=Model(),
            forget_log=self.forgets,
            outbox=self.outbox,
            leases=MemoryLeases(self.table, f"process-{self.started}"),
            **changes,
        )
        self.processes.append(made)
        return made

    def write(self, count: int = 12, rng: random.Random | None = None) -> None:
        rng = rng or random.Random(self.second)
        for _ in range(count):
            self.second += 1
            user = rng.choice(USERS)
            event = interaction(rng.choice("abcdef"), user=user, event_id=f"e{self.second}", second=self.second)
            if rng.random() < 0.15:
                undoes = f"e{rng.randrange(self.second)}"
                event = interaction("", user=user, event_id=f"u{self.second}", undoes_event_id=undoes)
            append(self.stream, event, home_of(user, f"e-{PARTITIONS}").partition)

    def settle(self, rounds: int = 12) -> None:
        """All of them work until nothing comes any more, well within a lease."""
        for _ in range(rounds):
            self.now_ms += 50
            for process in self.processes:
                process.settle(4)

    def held(self) -> list[list[int]]:
        return [sorted(process.consumer._handler.progress.watermarks) for process in self.processes]

    def wanted(self) -> dict[str, Any]:
        return replay(self.stream, USERS, forget_log=self.forgets)

    def applied_up_to(self) -> list[int]:
        progress = self.store.progress(range(PARTITIONS), self.store.epoch() or "")
        return [progress[partition].watermark for partition in range(PARTITIONS)]

    def ends(self) -> list[int]:
        return [len(log) - 1 for log in self.stream.log]


@pytest.mark.parametrize("ends", [True, False])
def test_the_others_take_over_from_one_that_ends_at_once_and_from_one_that_dies_after_its_lease(ends: bool) -> None:
    world = World()
    world.join()
    world.join()
    world.settle()
    gone = world.processes.pop(0)
    if ends:
        gone.consumer.finish()
    began_ms = world.now_ms
    world.write()
    while world.applied_up_to() != world.ends():
        world.settle(1)
        assert world.now_ms - began_ms < LEASE_MS + 500
    assert (world.now_ms - began_ms < LEASE_MS // 2) == ends
    assert world.held() == [[0, 1, 2, 3]]
    assert world.store.contents(USERS) == world.wanted()


def test_what_one_knows_of_its_own_partitions_survives_a_change_of_others() -> None:
    world = World()
    # The first round begins at once, before there is anything; the next one is far.
    process = world.join(keep_every_s=1e9).settle()
    world.write()
    process.settle()
    changed = set(process.keep.changed.users)
    stored = world.store.load_users(USERS, world.store.epoch() or "")
    assert changed == {user for user in USERS if stored[user].positions}
    other = world.join(keep_every_s=1e9)
    other.keep._next_round = 1e18
    with capture_logs() as logs:
        world.settle()
    # It did not read the log again for them.
    left = {user for user in changed if home_of(user, f"e-{PARTITIONS}").partition in (0, 1)}
    assert process.keep.changed.users == left
    assert process.keep.topic.marks.keys() == {0, 1}
    assert other.keep.topic.marks.keys() == {2, 3}
    # Who took over found the others in the log.
    assert other.keep.changed.users == changed - left
    assert [entry["partitions"] for entry in logs if entry["event"] == "partitions_assigned"][-1] == [2, 3]


def test_a_lost_user_is_not_brought_back_by_a_process_that_does_not_read_her_log_any_more() -> None:
    world = World()
    process = world.join().settle()
    world.write(40)
    process.settle()
    wanted = world.wanted()
    # Of a user whose keys are partly there, an empty history would be written.
    world.store.seen.clear()
    restore = process.consumer._handler._restore
    assert restore is not None
    restore._waiting.update(dict.fromkeys(USERS))
    # From now on the half of the partitions is somebody else's.
    MemoryLeases(world.table, "somebody").holding()
    process.consumer.step()
    process.settle()
    assert world.held() == [[0, 1]]
    found = world.store.contents(USERS)
    for user in USERS:
        held = home_of(user, f"e-{PARTITIONS}").partition < 2
        assert found[user] == wanted[user] if held else found[user]["history"] == wanted[user]["history"]
    world.join()
    world.now_ms += 2 * LEASE_MS
    world.settle()
    assert world.store.contents(USERS) == wanted


def test_marks_stand_still_where_users_have_records_whose_home_was_given_up() -> None:
    """A producer with another partitioner: whoever has the home now does not know of records elsewhere."""
    world = World()
    process = world.join(keep_every_s=1e9).settle()
    user = next(user for user in USERS if home_of(user, f"e-{PARTITIONS}").partition == 3)
    append(world.stream, interaction("a", user=user, event_id="elsewhere"), 0)
    process.settle()
    world.join(keep_every_s=1e9)
    world.settle()
    assert process.keep.topic.marks.keys() == {0, 1}
    process.consumer._handler.finish()
    assert (process.keep.topic.marks[0].covered, world.applied_up_to()[0]) == (-1, 0)


def assert_attributed_once(world: World) -> None:
    """Repetitions of a record's attribution say the same."""
    said: dict[tuple[int, int], bytes] = {}
    for one in world.outbox.attributions:
        if isinstance(one, Attribution):
            assert said.setdefault((one.partition, one.offset), one.state.components) == one.state.components


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whoever_holds_what_every_user_is_what_the_log_says(seed: int) -> None:
    """Processes join, end, die, and are paused between two turns or within one, while users are lost and forgotten; in
    the end the store is lost, and filled again from what all of them kept."""
    rng = random.Random(seed)
    world, paused, forgotten = World(), list[Sharing](), False
    world.join(keep_every_s=rng.choice([0.0, 1e9]))

    def pause() -> None:
        world.now_ms += rng.choice([10, 2 * LEASE_MS])
        for process in list(world.processes):
            process.settle(rng.randrange(6))

    for _ in range(rng.randrange(10, 40)):
        action = rng.choice(
            ["write"] * 4 + ["settle"] * 4 + ["join", "join", "end", "die", "pause", "wake", "within", "time"]
            + ["evict", "wipe", "forget"]
        )  # fmt: skip
        if action == "write":
            world.write(rng.randrange(1, 10), rng)
        elif action == "settle":
            world.settle(rng.randrange(1, 5))
        elif action == "join" and len(world.processes) < 4:
            world.join(keep_every_s=rng.choice([0.0, 1e9]))
        elif action in ("end", "die", "pause") and world.processes:
            process = world.processes.pop(rng.randrange(len(world.processes)))
            if action == "end":
                process.consumer.finish()
            elif action == "pause":
                paused.append(process)
        elif action == "wake" and paused:
            world.processes.append(paused.pop())
        elif action == "within" and world.processes:
            process = world.processes.pop(rng.randrange(len(world.processes)))
            process.model.meanwhile = pause
            world.write(rng.randrange(1, 10), rng)
            process.settle(3)
            process.model.meanwhile = None
            world.processes.append(process)
        elif action == "time":
            world.now_ms += rng.choice([100, 2 * LEASE_MS])
        elif action == "evict":
            world.store.evict(rng.sample(USERS, 3))
        elif action == "wipe":
            world.store.wipe()
        elif action == "forget":
            forgotten = True
            up_to = {p: end for p, end in enumerate(world.ends()) if end >= 0}
            name = f"f{world.second}"
            world.forgets.append(Forget(forget_id=name, user_id=rng.choice(USERS), up_to=up_to, requested_ms=0))
    world.processes += paused
    if not world.processes:
        world.join()
    world.now_ms += 2 * LEASE_MS
    world.settle(30)
    held = world.held()
    assert sorted(chain(*held)) == list(range(PARTITIONS))
    assert max(map(len, held)) <= -(-PARTITIONS // len(held))
    assert world.store.contents(USERS) == world.wanted()
    if not forgotten:
        assert_attributed_once(world)
    for process in world.processes:
        process.consumer.finish()
    world.store.wipe()
    EncoderProcess(world.stream.reader(), world.store, forget_log=world.forgets).settle()
    assert world.store.contents(USERS) == world.wanted()

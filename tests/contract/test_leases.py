"""One suite for the leases port: `MemoryLeases` always, Redis with the integration tests.

Members ask what they hold again and again, as processes do, until it is as expected; at every moment no partition has
two holders. Time passes meanwhile: a test's clock for the fake, real time for Redis.
"""

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import redis
from fakes.leases import LeaseTable, MemoryLeases
from suites import either, eventually

from services.platform.redis_clients import open_client
from services.platform.stream.ports import Holding, Leases
from services.user_state.leases import RedisLeases

PARTITIONS = (0, 1, 2)


@dataclass
class Scene:
    """Members of one group, by name. new: with a name and a lease in milliseconds; kill: nothing is given back."""

    new: Callable[[str, int], Leases]
    kill: Callable[[Leases], None]
    members: dict[str, Leases] = field(default_factory=dict)

    def join(self, name: str, *, lease_ms: int = 1_000) -> Leases:
        self.members[name] = self.new(name, lease_ms)
        self.members[name].start(PARTITIONS)
        return self.members[name]

    def die(self, name: str) -> None:
        self.kill(self.members.pop(name))

    def leave(self, name: str) -> None:
        self.members.pop(name).close()

    def holding(self) -> dict[str, Holding]:
        found = {name: member.holding() for name, member in self.members.items()}
        held = [partition for one in found.values() for partition in one.terms]
        assert len(held) == len(set(held)), found
        return found

    def until(self, **counts: int) -> dict[str, Holding]:
        """What each holds once it is so many partitions."""
        return eventually(self.holding, lambda found: {name: len(one.terms) for name, one in found.items()} == counts)


@pytest.fixture(params=either("redis"))
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    if request.param == "memory":
        clock = itertools.count(step=50)
        table = LeaseTable(lambda: next(clock))

        def new(name: str, lease_ms: int) -> Leases:
            table.lease_ms = lease_ms
            return MemoryLeases(table, name)

        # The fake is renewed by asking it.
        scene = Scene(new=new, kill=lambda member: None)
    else:
        url, model = request.getfixturevalue("redis_url"), secrets.token_hex(4)
        scene = Scene(
            new=lambda name, lease_ms: RedisLeases(url, process="test", group=model, lease_ms=lease_ms),
            kill=stop_renewing,
        )
    yield scene
    for name in list(scene.members):
        scene.leave(name)


def stop_renewing(member: Leases) -> None:
    assert isinstance(member, RedisLeases)
    assert member._thread is not None
    member._stop.set()
    member._thread.join()
    member._redis.close()


def test_whoever_is_alone_holds_everything(scene: Scene) -> None:
    scene.join("one")
    (held,) = scene.until(one=3).values()
    assert (set(held.terms), held.surplus) == (set(PARTITIONS), 0)
    assert all(term >= 1 for term in held.terms.values())


def test_a_newcomer_gets_its_share_when_the_other_gives_up_its_surplus(scene: Scene) -> None:
    one = scene.join("one")
    before = scene.until(one=3)["one"]
    scene.join("two")
    found = eventually(scene.holding, lambda found: found["one"].surplus > 0)
    # Nothing is taken from who holds it.
    assert (found["one"].terms, found["one"].surplus, found["two"].terms) == (before.terms, 1, {})
    one.release([2])
    after = scene.until(one=2, two=1)
    assert {name: one.surplus for name, one in after.items()} == {"one": 0, "two": 0}
    # A later holder's term is higher; who holds on keeps its own.
    assert after["two"].terms[2] > before.terms[2]
    assert after["one"].terms == {partition: before.terms[partition] for partition in (0, 1)}


def test_nobody_gives_back_what_another_holds(scene: Scene) -> None:
    scene.join("one")
    before = scene.until(one=3)["one"]
    two = scene.join("two")
    two.release(PARTITIONS)
    for _ in range(20):
        assert scene.holding()["one"].terms == before.terms


def test_what_was_given_back_by_the_only_one_is_taken_again_in_the_next_term(scene: Scene) -> None:
    one = scene.join("one")
    before = scene.until(one=3)["one"].terms
    one.release([1])
    after = eventually(scene.holding, lambda found: found["one"].terms.get(1, before[1]) != before[1])["one"].terms
    assert after == {**before, 1: before[1] + 1}


def test_when_one_dies_the_other_takes_over_in_later_terms(scene: Scene) -> None:
    scene.join("one")
    before = scene.until(one=3)["one"].terms
    scene.join("two")
    scene.die("one")
    after = scene.until(two=3)["two"]
    assert after.surplus == 0
    assert all(after.terms[partition] > before[partition] for partition in PARTITIONS)


def test_who_closes_gives_back_partitions_and_seat_at_once(scene: Scene) -> None:
    # So long that nobody could wait for its end.
    one = scene.join("one", lease_ms=1_000_000)
    before = scene.until(one=3)["one"].terms
    scene.leave("one")
    assert one.holding() == Holding({})
    scene.join("two", lease_ms=1_000_000)
    after = scene.until(two=3)["two"]
    assert after.surplus == 0
    assert all(after.terms[partition] > before[partition] for partition in PARTITIONS)


@pytest.mark.integration
def test_one_that_hangs_loses_its_partitions_and_gets_its_share_when_it_goes_on(redis_url: str) -> None:
    group = secrets.token_hex(4)
    one = RedisLeases(redis_url, process="test", group=group, lease_ms=400, stuck_s=0.5)
    two = RedisLeases(redis_url, process="test", group=group, lease_ms=400)
    try:
        one.start(PARTITIONS)
        assert len(one.holding().terms) == 3
        two.start(PARTITIONS)
        # Nobody asks what the first one holds, though its thread runs.
        eventually(two.holding, lambda found: len(found.terms) == 3)
        eventually(one.holding, lambda found: not found.terms)
        eventually(two.holding, lambda found: found.surplus == 1)
        two.release([2])
        eventually(one.holding, lambda found: list(found.terms) == [2])
    finally:
        one.close()
        two.close()


@pytest.mark.integration
def test_a_full_redis_takes_no_lease_away(redis_url: str) -> None:
    """Leases lie beside the users, and take no room: who holds one keeps it, and the dead are succeeded."""
    model = secrets.token_hex(4)
    one, two = (RedisLeases(redis_url, process="test", group=model, lease_ms=1_000) for _ in range(2))
    with open_client(redis_url, timeout_s=5) as client:
        (before,) = client.config_get("maxmemory").values()
        one.start(PARTITIONS)
        held = eventually(one.holding, lambda found: len(found.terms) == 3)
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(redis.OutOfMemoryError):
                client.set("anything", 1)
            two.start(PARTITIONS)
            eventually(one.holding, lambda found: found.surplus == 1)
            assert one.holding().terms == held.terms
            stop_renewing(one)
            eventually(two.holding, lambda found: len(found.terms) == 3)
        finally:
            client.config_set("maxmemory", before)
            two.close()

"""The suites of what is stored in Redis again, on a cluster, and what a failover there loses."""

import re
import secrets
from collections.abc import Iterator

import pytest
from fakes.redis_cluster import RedisCluster
from suites import eventually
from test_restricted_store import PASSWORD, documented_users
from test_sessions import *  # noqa: F403 - the suite
from test_sessions import OnRedis
from test_state_store import *  # noqa: F403 - the suite
from test_state_store import NUM_PARTITIONS, update
from test_user_states import *  # noqa: F403 - the suite

from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.redis_clients import open_client
from services.stack.folders import REPOSITORY
from services.user_state.layout import EPOCH_KEY, PAGES, home_of, progress_key
from services.user_state.leases import RedisLeases
from services.user_state.ports import Store
from services.user_state.reader import StateReader
from services.user_state.sessions import SessionStore
from services.user_state.values import AdvanceStep
from services.user_state.writer import StateWriter

pytestmark = [pytest.mark.integration, pytest.mark.cluster]


@pytest.fixture(scope="session")
def redis_url(redis_cluster: RedisCluster) -> str:
    """In the place of one server's."""
    return redis_cluster.url


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    with open_client(redis_url, timeout_s=5) as client:
        client.flushall()
    writer = StateWriter(redis_url, max_seen=5)
    yield writer
    writer.close()


@pytest.fixture
def sessions(on_redis: OnRedis) -> SessionStore:
    return on_redis.sessions


def test_leases_are_taken_and_given_back(redis_url: str) -> None:
    leases = RedisLeases(redis_url, process="test", group=secrets.token_hex(4), lease_ms=1_000)
    leases.start([0, 1])
    try:
        eventually(lambda: set(leases.holding().terms) == {0, 1})
        leases.release([1])
    finally:
        leases.close()


async def test_the_documented_users_may_do_what_they_need(
    redis_cluster: RedisCluster,
    store: StateWriter,  # emptied it
) -> None:
    page = (REPOSITORY / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    (more,) = re.findall(r"^On a cluster both need `(.*?)`", page, re.MULTILINE)
    for number in range(6):
        with redis_cluster.client(number) as node:
            for rule in documented_users():
                node.execute_command("ACL SETUSER", *rule.split()[1:], *more.split())
    urls = {who: redis_cluster.url.replace("://", f"://freshet-{who}:{PASSWORD}@") for who in ("reader", "writer")}
    writer, reader = StateWriter(urls["writer"]), StateReader(urls["reader"], timeout_s=2)
    epoch, made = writer.ensure_epoch(NUM_PARTITIONS)
    assert made
    writer.begin(range(NUM_PARTITIONS), epoch)
    writer.apply([update()], epoch, {})
    assert not writer.is_paused()
    assert writer.usage().memory_share == 0
    assert (await reader.read_user("ann", "model-1")).state is not None
    assert (await reader.read_keys("ann")).history_events == 3
    sessions = SessionStore(urls["reader"], reader.last_epoch, timeout_s=2)
    await sessions.push(PAGES, "ann", b"1", most=2, ttl_seconds=60)
    assert await sessions.read("ann", {PAGES: 9}) == {PAGES: [b"1"]}
    writer.start_new_epoch(epoch)
    assert writer.epoch() != epoch
    writer.close()
    await sessions.close()
    await reader.close()


@pytest.fixture
def failing(redis_cluster: RedisCluster, store: StateWriter) -> Iterator[RedisCluster]:
    """The cluster, empty, and whole again afterwards."""
    yield redis_cluster
    redis_cluster.heal()


def at_home(partition: int, epoch: str) -> str:
    return next(name for n in range(1_000) if home_of(name := f"user-{n}", epoch).partition == partition)


async def test_what_a_master_loses_in_a_failover_is_noticed(
    failing: RedisCluster, store: StateWriter, reader: StateReader
) -> None:
    epoch, _ = store.ensure_epoch(NUM_PARTITIONS)
    store.begin(range(NUM_PARTITIONS), epoch)
    masters = {partition: failing.master_of(progress_key(partition)) for partition in range(NUM_PARTITIONS)}
    lost = next(partition for partition in masters if masters[partition] != failing.master_of(EPOCH_KEY))
    kept = next(partition for partition in masters if masters[partition] != masters[lost])
    ann, bob = at_home(lost, epoch), at_home(kept, epoch)

    def write(offset: int) -> None:
        marks = dict.fromkeys((lost, kept), offset - 1)
        before = store.load_users([ann, bob], epoch)
        store.apply(
            [
                update(user, before[user].expected, positions={home_of(user, epoch).partition: offset})
                for user in before
            ],
            epoch,
            marks,
        )
        store.advance(
            [AdvanceStep(partition=p, from_watermark=at, to_watermark=offset, counts={}) for p, at in marks.items()],
            epoch,
        )

    write(0)
    assert (await reader.read_user(ann, "model-1")).watermark == 0
    failing.wait_whole()
    failing.fall_behind(masters[lost])
    write(1)
    failing.fail_over(masters[lost])
    # Until then a server may name the dead one, and the reader asks once more at most.
    failing.wait_whole()
    found = eventually(lambda: progress_of(store, epoch))
    assert {partition: found[partition].watermark for partition in (lost, kept)} == {lost: 0, kept: 1}
    # A writer that missed it writes nothing there, and what it reads says how far that reaches.
    with pytest.raises(Conflict, match="1 of 2"):
        store.apply(
            [
                update(user, store.load_users([user], epoch)[user].expected, positions={p: 2})
                for user, p in ((ann, lost), (bob, kept))
            ],
            epoch,
            {lost: 1, kept: 1},
        )
    view = await reader.read_user(ann, "model-1")
    assert (view.watermark, view.is_lost, view.epoch) == (0, False, epoch)
    assert store.load_users([ann, bob], epoch)[bob].positions == {kept: 2}


def progress_of(store: StateWriter, epoch: str) -> dict[int, object] | None:
    """None while the cluster does not answer for all partitions."""
    try:
        return store.progress(range(NUM_PARTITIONS), epoch)  # type: ignore[return-value]
    except DependencyUnavailable:
        return None


async def test_an_epoch_that_a_failover_loses_is_begun_anew_on_every_master(
    failing: RedisCluster, store: StateWriter, reader: StateReader
) -> None:
    failing.wait_whole()
    failing.fall_behind(failing.master_of(EPOCH_KEY))
    epoch, _ = store.ensure_epoch(NUM_PARTITIONS)
    store.begin(range(NUM_PARTITIONS), epoch)
    holder = failing.master_of(EPOCH_KEY)
    apart = next(p for p in range(NUM_PARTITIONS) if failing.master_of(progress_key(p)) != holder)
    ann = at_home(apart, epoch)
    store.apply([update(ann, positions={apart: 0})], epoch, {apart: -1})
    failing.fail_over(holder)
    # Until then a server may name the dead one.
    failing.wait_whole()
    assert eventually(lambda: not_failing(store))
    after, made = store.ensure_epoch(NUM_PARTITIONS)
    assert made
    assert after != epoch
    assert store.load_users([ann], after)[ann].events == []
    assert {one.watermark for one in store.begin(range(NUM_PARTITIONS), after).values()} == {-1}
    view = await reader.read_user(ann, "model-1")
    assert (view.epoch, view.watermark) == (after, -1)


def not_failing(store: StateWriter) -> bool:
    try:
        return store.epoch() is None
    except DependencyUnavailable:
        return False


async def test_the_other_kind_of_url_is_said(redis_cluster: RedisCluster, redis_server: str) -> None:
    writer = StateWriter(redis_server.replace("redis://", "redis+cluster://"))
    with pytest.raises(DependencyUnavailable, match=r"FRESHET_REDIS_URL is redis\+cluster:// .*allowed: redis://"):
        writer.epoch()
    reader = StateReader(redis_server.replace("redis://", "redis+cluster://"))
    with pytest.raises(DependencyUnavailable, match=r"FRESHET_REDIS_URL is redis\+cluster:// .*allowed: redis://"):
        await reader.epoch()
    await reader.close()
    other = next(number for number in range(3) if number != redis_cluster.master_of(EPOCH_KEY))
    node = StateWriter(f"redis://127.0.0.1:{redis_cluster.ports[other]}")
    with pytest.raises(DependencyUnavailable, match=r"FRESHET_REDIS_URL is redis:// .* allowed: redis\+cluster://"):
        node.epoch()
    for one in (writer, node):
        one.close()

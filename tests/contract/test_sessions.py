"""One suite for what is kept beside a user: in memory always, on Redis with the integration tests."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import redis
from fakes.gateway import MemorySessions
from suites import either
from test_state_store import forgotten, update

from services.gateway.ports import Sessions
from services.platform.errors import DependencyUnavailable, PreconditionFailed
from services.platform.redis_clients import open_client
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state.layout import ANSWERS, PAGES, SESSION_KINDS, home_of, session_key, session_sizes_key
from services.user_state.reader import StateReader
from services.user_state.sessions import SessionStore
from services.user_state.writer import StateWriter


@dataclass
class OnRedis:
    """A store beside the encoder's, which made the epoch."""

    sessions: SessionStore
    client: redis.Redis
    epoch: str


@pytest.fixture
async def on_redis(redis_url: str) -> AsyncIterator[OnRedis]:
    with open_client(redis_url, timeout_s=5) as client:
        client.flushall()
        writer, reader = StateWriter(redis_url), StateReader(redis_url, timeout_s=2)
        epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
        writer.apply([update("ann"), update("bob")], epoch, {})
        store = SessionStore(redis_url, reader.last_epoch, timeout_s=2)
        yield OnRedis(store, client, epoch)
        await store.close()
        await reader.close()
        writer.close()


@pytest.fixture(params=either("redis"))
def sessions(request: pytest.FixtureRequest) -> Sessions:
    return MemorySessions() if request.param == "memory" else request.getfixturevalue("on_redis").sessions


async def test_the_newest_come_first_and_the_oldest_go(sessions: Sessions) -> None:
    for entry in (b"1", b"\x00two\xff", b"3"):
        await sessions.push(PAGES, "ann", entry, most=2, ttl_seconds=60)
    await sessions.push(ANSWERS, "ann", b"other", most=2, ttl_seconds=60)
    found = await sessions.read("ann", {PAGES: 9, ANSWERS: 9})
    assert found == {PAGES: [b"3", b"\x00two\xff"], ANSWERS: [b"other"]}
    assert await sessions.read("ann", {PAGES: 1}) == {PAGES: [b"3"]}
    assert await sessions.read("bob", {PAGES: 9}) == {PAGES: []}


async def test_nothing_is_kept_of_a_user_without_a_history(sessions: Sessions) -> None:
    assert await sessions.push(PAGES, "ann", b"1", most=2, ttl_seconds=60)
    assert not await sessions.push(PAGES, "nobody", b"1", most=2, ttl_seconds=60)
    assert await sessions.read("nobody", {PAGES: 9}) == {PAGES: []}


def sizes(on_redis: OnRedis, user_id: str = "ann") -> list[int]:
    """What the user's partition counts, by the time when it ends."""
    found = on_redis.client.hgetall(session_sizes_key(home_of(user_id, on_redis.epoch).partition))
    return [int(size) for _, size in sorted(found.items())]  # type: ignore[union-attr]


@pytest.mark.integration
async def test_lists_are_counted_by_their_bytes_while_they_live(on_redis: OnRedis) -> None:
    keys = [session_key(home_of("ann", on_redis.epoch), kind) for kind in (PAGES, ANSWERS)]
    for number in range(5):
        await on_redis.sessions.push(PAGES, "ann", b"x" * 1_000 * number, most=2, ttl_seconds=1_600)
        await on_redis.sessions.push(ANSWERS, "ann", b"x" * 10, most=3, ttl_seconds=16_000)
    used = [on_redis.client.memory_usage(key) for key in keys]
    assert 7_000 < used[0] < 9_000  # type: ignore[operator]
    assert sizes(on_redis) == used
    # A list that ended is counted no more.
    on_redis.client.delete(keys[0])
    key = session_sizes_key(home_of("ann", on_redis.epoch).partition)
    (ends, *_) = sorted(on_redis.client.hkeys(key))  # type: ignore[type-var]
    on_redis.client.hdel(key, ends)
    on_redis.client.hset(key, "1700000000", used[0])  # type: ignore[arg-type]
    await on_redis.sessions.push(ANSWERS, "ann", b"x" * 10, most=3, ttl_seconds=16_000)
    assert sizes(on_redis) == used[1:]


@pytest.mark.integration
async def test_lists_take_a_tenth_of_the_memory_and_histories_have_the_rest(on_redis: OnRedis, redis_url: str) -> None:
    writer = StateWriter(redis_url)
    at_home = [user for number in range(1_000) if home_of(user := f"user-{number}", on_redis.epoch).partition == 3]
    writer.apply([update(user) for user in at_home], on_redis.epoch, {})
    used = on_redis.client.info("memory")["used_memory"]  # type: ignore[index]
    on_redis.client.config_set("maxmemory", used + 16_000_000)
    room = (used + 16_000_000) // 10 // NUM_PARTITIONS

    async def fill() -> None:
        for user in at_home:
            await on_redis.sessions.push(PAGES, user, b"x" * 10_000, most=4, ttl_seconds=900)

    try:
        with pytest.raises(PreconditionFailed, match="sessions use their tenth of Redis' memory"):
            await fill()
        assert 0.9 * room < sum(sizes(on_redis, at_home[0])) <= room
        # Another partition's lists and every history go on.
        bob = next(user for user in ("ann", "bob") if home_of(user, on_redis.epoch).partition != 3)
        assert await on_redis.sessions.push(PAGES, bob, b"x" * 10_000, most=4, ttl_seconds=900)
        writer.apply([update("carl")], on_redis.epoch, {})
    finally:
        on_redis.client.config_set("maxmemory", 0)
    writer.close()


@pytest.mark.integration
async def test_a_list_ends_by_itself_and_lies_in_the_users_slot(on_redis: OnRedis) -> None:
    await on_redis.sessions.push(PAGES, "ann", b"1", most=2, ttl_seconds=60)
    assert 0 < on_redis.client.ttl(session_key(home_of("ann", on_redis.epoch), PAGES)) <= 64  # type: ignore[operator]
    on_redis.client.flushall()
    assert await on_redis.sessions.read("ann", {PAGES: 9}) == {PAGES: []}


@pytest.mark.integration
async def test_before_the_first_epoch_nothing_can_be_kept(on_redis: OnRedis, redis_url: str) -> None:
    on_redis.client.flushall()
    reader = StateReader(redis_url)
    fresh = SessionStore(redis_url, reader.last_epoch)
    with pytest.raises(DependencyUnavailable, match="no epoch yet"):
        await fresh.push(PAGES, "ann", b"1", most=2, ttl_seconds=60)
    assert await fresh.read("ann", {PAGES: 9}) == {PAGES: []}
    await fresh.close()
    await reader.close()


@pytest.mark.integration
async def test_a_forgotten_users_lists_go(on_redis: OnRedis, redis_url: str) -> None:
    writer = StateWriter(redis_url)
    for user_id in ("ann", "bob"):
        for kind in SESSION_KINDS:
            await on_redis.sessions.push(kind, user_id, b"1", most=2, ttl_seconds=60)
    writer.rewrite([forgotten(writer, "ann", on_redis.epoch)], on_redis.epoch)
    writer.close()
    wanted = dict.fromkeys(SESSION_KINDS, 9)
    assert await on_redis.sessions.read("ann", wanted) == {kind: [] for kind in SESSION_KINDS}
    assert await on_redis.sessions.read("bob", wanted) == {kind: [b"1"] for kind in SESSION_KINDS}

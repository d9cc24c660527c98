"""One suite for what is kept beside a user: in memory always, on Redis with the integration tests."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import redis
from fakes.gateway import MemorySessions
from suites import either
from test_state_store import forgotten, update

from services.common.errors import DependencyUnavailable
from services.common.redis_clients import open_client
from services.common.session_store import SessionStore
from services.common.state_layout import ANSWERS, PAGES, SESSION_KINDS, home_of, session_key
from services.common.state_store import StateReader, StateWriter
from services.common.stream.topic import NUM_PARTITIONS
from services.gateway.ports import Sessions


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
        store = SessionStore(redis_url, reader.home, timeout_s=2)
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


@pytest.mark.integration
async def test_a_list_ends_by_itself_and_lies_in_the_users_slot(on_redis: OnRedis) -> None:
    await on_redis.sessions.push(PAGES, "ann", b"1", most=2, ttl_seconds=60)
    assert 0 < on_redis.client.ttl(session_key(home_of("ann", on_redis.epoch), PAGES)) <= 60  # type: ignore[operator]
    on_redis.client.flushall()
    assert await on_redis.sessions.read("ann", {PAGES: 9}) == {PAGES: []}


@pytest.mark.integration
async def test_before_the_first_epoch_nothing_can_be_kept(on_redis: OnRedis, redis_url: str) -> None:
    on_redis.client.flushall()
    reader = StateReader(redis_url)
    fresh = SessionStore(redis_url, reader.home)
    with pytest.raises(DependencyUnavailable, match="no epoch yet"):
        await fresh.push(PAGES, "ann", b"1", most=2, ttl_seconds=60)
    assert await fresh.read("ann", {PAGES: 9}) == {PAGES: []}
    await fresh.close()
    await reader.close()


@pytest.mark.integration
async def test_a_forgotten_users_lists_go(on_redis: OnRedis, redis_url: str) -> None:
    writer = StateWriter(redis_url)
    for user_id in ("ann", "bob"):
        writer.apply([update(user_id)], on_redis.epoch, {})
        for kind in SESSION_KINDS:
            await on_redis.sessions.push(kind, user_id, b"1", most=2, ttl_seconds=60)
    writer.rewrite([forgotten(writer, "ann", on_redis.epoch)], on_redis.epoch)
    writer.close()
    wanted = dict.fromkeys(SESSION_KINDS, 9)
    assert await on_redis.sessions.read("ann", wanted) == {kind: [] for kind in SESSION_KINDS}
    assert await on_redis.sessions.read("bob", wanted) == {kind: [b"1"] for kind in SESSION_KINDS}

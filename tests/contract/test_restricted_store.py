"""The state store's suite again, on a Redis whose users may do only what docs/operate/security.md lets them."""

import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import test_state_store
from suites import eventually
from test_state_store import *  # noqa: F403 - the suite

from services.platform.errors import DependencyUnavailable
from services.stack import Ports, Stack
from services.stack.components.redis import Redis
from services.stack.folders import REPOSITORY
from services.user_state.layout import SESSION_KINDS
from services.user_state.leases import RedisLeases
from services.user_state.ports import Store
from services.user_state.reader import StateReader
from services.user_state.sessions import SessionStore
from services.user_state.writer import StateWriter

pytestmark = pytest.mark.integration

PASSWORD = secrets.token_hex(16)
_START_S = 10.0


def documented_users() -> list[str]:
    """The rules of docs/operate/security.md, with a password."""
    page = (REPOSITORY / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    rules = re.findall(r"^user freshet-\w+ .*$", page, re.MULTILINE)
    assert len(rules) == 2
    return [rule.replace(">PASSWORD", f">{PASSWORD}") for rule in rules]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The administrator's URL."""
    folder = tmp_path_factory.mktemp("redis")
    component = Stack(folder / "stack").components["redis"]
    assert isinstance(component, Redis)
    component.prepare(lambda part, doing: None)
    port = Ports.free()["redis"]
    lines = [f"port {port}", "bind 127.0.0.1", 'save ""', f"user default on >{PASSWORD} ~* &* +@all"]
    (folder / "redis.conf").write_text("\n".join([*lines, *documented_users()]) + "\n")
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen([component.program(), str(folder / "redis.conf")], stdout=log, stderr=log)
    url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    try:
        deadline = time.monotonic() + _START_S
        while not answers(url):
            assert running.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield url
    finally:
        running.terminate()
        running.wait(10)


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


def of_user(name: str, url: str) -> str:
    return url.replace("redis://:", f"redis://{name}:")


@pytest.fixture(autouse=True)
def restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's clients are the restricted users; what it does to Redis beside them, the administrator does."""

    def made(kind: Any, name: str, url: str, **options: Any) -> Any:
        return kind(of_user(name, url), **options)

    for kind, name in ((StateWriter, "freshet-writer"), (StateReader, "freshet-reader")):
        monkeypatch.setattr(test_state_store, kind.__name__, partial(made, kind, name))


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    writer = test_state_store.StateWriter(redis_url, max_seen=5)
    yield writer
    writer.close()


async def test_the_gateways_user_keeps_lists_beside_users(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    writer = StateWriter(redis_url)
    epoch, _ = writer.ensure_epoch(1)
    writer.apply([test_state_store.update("ann")], epoch, {})
    writer.close()
    reader = StateReader(of_user("freshet-reader", redis_url))
    sessions = SessionStore(of_user("freshet-reader", redis_url), reader.last_epoch)
    for kind in SESSION_KINDS:
        await sessions.push(kind, "ann", b"1", most=2, ttl_seconds=60)
    assert await sessions.read("ann", dict.fromkeys(SESSION_KINDS, 9)) == {kind: [b"1"] for kind in SESSION_KINDS}
    await sessions.close()
    await reader.close()


@pytest.mark.parametrize("process", ["encoder", "refresher"])
def test_leases_are_taken_and_given_back(redis_url: str, process: str) -> None:
    leases = RedisLeases(of_user("freshet-writer", redis_url), process=process, group="acl", lease_ms=1_000)
    leases.start([0, 1])
    try:
        eventually(lambda: set(leases.holding().terms) == {0, 1})
        leases.release([1])
    finally:
        leases.close()
    with redis.Redis.from_url(redis_url) as client:
        assert not client.keys("*lease*")


@pytest.mark.parametrize("name", ["freshet-reader", "freshet-writer"])
def test_a_user_may_do_nothing_else(redis_url: str, name: str) -> None:
    with redis.Redis.from_url(of_user(name, redis_url)) as client:
        for command in (
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "GET", "*"),
            ("SHUTDOWN",),
            ("ACL", "LIST"),
            ("REPLICAOF", "NO", "ONE"),
            ("GET", "somebody:else"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


def test_the_reader_writes_nothing_else(redis_url: str) -> None:
    with redis.Redis.from_url(of_user("freshet-reader", redis_url)) as client:
        for command in (("SET", "stream:epoch", "x"), ("DEL", "stream:epoch"), ("HSET", "{p0}:users", "a", "b")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


async def test_a_wrong_password_is_said(redis_url: str, tmp_path: Path) -> None:
    writer = StateWriter(of_user("freshet-writer", redis_url).replace(PASSWORD, "wrong"))
    reader = StateReader(of_user("nobody", redis_url))
    with pytest.raises(DependencyUnavailable, match=r"(?i)WRONGPASS|invalid username-password"):
        writer.epoch()
    with pytest.raises(DependencyUnavailable, match=r"(?i)WRONGPASS|invalid username-password") as refused:
        await reader.read_user("ann", "model")
    assert PASSWORD not in str(refused.value)
    writer.close()
    await reader.close()

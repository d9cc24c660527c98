"""What readers of the store and of `forgets` tell their callers."""

import pytest
from fakes.encoder import MemoryForgetLog

from services.contracts.topics.forgets import Forget
from services.platform.errors import DependencyUnavailable
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state.forgetting import Forgotten
from services.user_state.reader import StateReader
from services.user_state.writer import StateWriter
from tests.chaos.memory_redis import AsyncClient, Client, MemoryServer


async def test_each_read_of_a_user_is_reported_with_its_time_and_whether_it_failed() -> None:
    found = list[tuple[bool, bool]]()
    reader = StateReader("redis://localhost", on_read=lambda seconds, failed: found.append((seconds >= 0, failed)))
    redis = MemoryServer()
    reader._redis = AsyncClient(redis)  # type: ignore[assignment]
    await reader.read_user("ann", "m1")
    writer = StateWriter("redis://localhost")
    writer._redis = Client(redis)  # type: ignore[assignment]
    writer.ensure_epoch(NUM_PARTITIONS)
    await reader.read_user("ann", "m1")
    redis.is_down = True
    with pytest.raises(DependencyUnavailable):
        await reader.read_user("ann", "m1")
    assert found == [(True, False), (True, False), (True, True)]


def test_an_unreadable_forget_is_passed_over() -> None:
    log, forgotten = MemoryForgetLog(), Forgotten()
    log.append(None)
    log.append(Forget(forget_id="f", user_id="ann", up_to={0: 2}, requested_ms=0))
    forgotten.read(log)
    assert forgotten.up_to("ann") == {0: 2}

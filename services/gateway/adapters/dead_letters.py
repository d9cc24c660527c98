"""Dead letters through `services.contracts.dead_letters`, in a thread, one call after the other."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from services.contracts.dead_letters import DeadLetters, Replayed
from services.contracts.topics.dead_letters import StoredLetter
from services.gateway.adapters.stream_ends import within
from services.platform.stream.kafka import Brokers
from services.platform.stream.records import Position

T = TypeVar("T")


class KafkaDeadLetters:
    """Implements `ports.DeadLetterLog`. Connects for each of its rare calls."""

    def __init__(self, bootstrap: Brokers) -> None:
        self._bootstrap = bootstrap
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dead-letters")

    async def newest(self, topics: Collection[str], timeout_s: float) -> tuple[Sequence[StoredLetter], bool]:
        """Read each topic from its end."""
        return await self._run(lambda letters: letters.newest(topics), timeout_s)

    async def replay(self, topic: str, place: Position, *, preview: bool, timeout_s: float) -> Replayed:
        """Replay the letter."""
        return await self._run(lambda letters: letters.replay_one(topic, place, preview=preview), timeout_s)

    async def _run(self, act: Callable[[DeadLetters], T], timeout_s: float) -> T:
        def opened() -> T:
            with closing(DeadLetters(self._bootstrap)) as letters:
                return act(letters)

        return await within(asyncio.get_running_loop().run_in_executor(self._thread, opened), timeout_s)

    def close(self) -> None:
        """Stop the thread without waiting for a call."""
        self._thread.shutdown(wait=False, cancel_futures=True)

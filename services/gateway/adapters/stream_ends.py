"""Where the stream ends, asked with kafka-python in a thread of its own: its client waits, an event loop must not."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.interactions import INTERACTIONS
from services.platform.errors import DeadlineExceeded
from services.platform.stream.kafka import Brokers

T = TypeVar("T")


class KafkaStreamEnds:
    """Implements `ports.StreamEnds`. Connects when first asked; `close` at the end."""

    def __init__(self, bootstrap: Brokers) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream-ends")
        self._reader = TopicReader(
            bootstrap, INTERACTIONS, group_id="freshet-gateway", client_id="freshet-gateway-ends"
        )
        self._asking: asyncio.Future[Mapping[int, int]] | None = None

    def start(self) -> None:
        """Connect in the background: the first to ask would else wait for it, and give up."""
        self._thread.submit(self._reader.partitions)

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        """Callers that come while the broker is being asked share its answer.

        Raises: DependencyUnavailable; DeadlineExceeded when the broker took longer than `timeout_s`.
        """
        if self._asking is None or self._asking.done():
            self._asking = self._submit(self._reader.end_offsets)
        return await _within(self._asking, timeout_s)

    async def attribution_partitions(self, timeout_s: float) -> int:
        """As the client's metadata has it, which is renewed every few minutes. Raises: as `interactions`."""
        return await _within(self._submit(lambda: self._reader.num_partitions(ATTRIBUTIONS)), timeout_s)

    def _submit(self, ask: Callable[[], T]) -> asyncio.Future[T]:
        asking = asyncio.get_running_loop().run_in_executor(self._thread, ask)
        # Nobody may be left to read it when it fails.
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asking

    async def close(self) -> None:
        """Let the thread end; an answer still on its way is not waited for."""
        self._thread.submit(self._reader.close)
        self._thread.shutdown(wait=False)


async def _within(asking: asyncio.Future[T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asking)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"Kafka did not answer within {timeout_s * 1000:.0f} ms") from exc

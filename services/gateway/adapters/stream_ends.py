"""Read the stream's end offsets in a thread, since kafka-python blocks."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.interactions import INTERACTIONS
from services.platform.errors import DeadlineExceeded
from services.platform.stream.kafka import Brokers
from services.platform.stream.records import SourceRecord

T = TypeVar("T")


class KafkaStreamEnds:
    """Implements `ports.StreamEnds`. Connects on first use."""

    def __init__(self, bootstrap: Brokers) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream-ends")
        self._reader = TopicReader(
            bootstrap, INTERACTIONS, group_id="freshet-gateway", client_id="freshet-gateway-ends"
        )
        self._asking: asyncio.Future[Mapping[int, int]] | None = None

    def start(self) -> None:
        """Connect in the background: otherwise the first caller would time out."""
        self._thread.submit(self._reader.partitions)

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        """Return the end offsets; concurrent callers share one request.

        Raises: DependencyUnavailable; DeadlineExceeded.
        """
        if self._asking is None or self._asking.done():
            self._asking = self._submit(self._reader.end_offsets)
        return await within(self._asking, timeout_s)

    async def records(self, offsets: Mapping[int, int], timeout_s: float) -> Mapping[int, SourceRecord]:
        """Return the record at each offset. Raises: as `interactions`."""
        return await within(self._submit(lambda: self._reader.records_at(offsets)), timeout_s)

    async def attribution_partitions(self, timeout_s: float) -> int:
        """Return the number in the client's metadata. Raises: as `interactions`."""
        return await within(self._submit(lambda: self._reader.num_partitions(ATTRIBUTIONS)), timeout_s)

    def _submit(self, ask: Callable[[], T]) -> asyncio.Future[T]:
        asking = asyncio.get_running_loop().run_in_executor(self._thread, ask)
        # Else, if every caller timed out, asyncio logs an error that was never retrieved.
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asking

    async def close(self) -> None:
        """Stop the thread without waiting."""
        self._thread.submit(self._reader.close)
        self._thread.shutdown(wait=False)


async def within(asking: asyncio.Future[T], timeout_s: float) -> T:
    """Return a thread's result. Raises: DeadlineExceeded; the call in the thread continues."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asking)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"Kafka did not answer within {timeout_s * 1000:.0f} ms") from exc

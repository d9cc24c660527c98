"""Reads from Kafka for the gateway's requests: end offsets, single records, dead letters, a user's recorded answers.

kafka-python blocks, so each of the four kinds of read has a thread, which makes one call at a time.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from services.contracts.dead_letters import DeadLetters, Replayed
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.dead_letters import StoredLetter
from services.contracts.topics.exposures import EXPOSURES, decode_exposure
from services.contracts.topics.interactions import INTERACTIONS
from services.gateway.ports import Looked, Shown
from services.platform.errors import DeadlineExceeded, InvalidRequest, NotFound, PreconditionFailed
from services.platform.stream.kafka import Brokers, partition_for
from services.platform.stream.reading import Backwards
from services.platform.stream.records import Position, SourceRecord

T = TypeVar("T")

# Limits of a search in `exposures`.
_MAX_BYTES, _MAX_S, _TIMEOUT_S = 16 << 20, 2.0, 10.0
# Longest time from an answer to its record: a second in the queue, ten seconds of delivery, and clock differences.
_LATEST_MS = 30_000


class _Thread:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def _submit(self, act: Callable[[], T]) -> asyncio.Future[T]:
        asking = asyncio.get_running_loop().run_in_executor(self._thread, act)
        # If every caller timed out, asyncio would log the error as never retrieved, so it is retrieved here.
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asking

    def close(self) -> None:
        """Stop the thread without waiting for a call."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class _ReaderThread(_Thread):
    """A thread with one reader of a topic. It connects on first use."""

    def __init__(self, bootstrap: Brokers, topic: str, name: str) -> None:
        super().__init__(name)
        self._reader = TopicReader(bootstrap, topic, group_id="freshet-gateway", client_id=f"freshet-gateway-{name}")

    def read(self, act: Callable[[TopicReader], T]) -> asyncio.Future[T]:
        """Run `act` on the reader in the thread."""
        return self._submit(lambda: act(self._reader))

    def close(self) -> None:
        """Stop the thread and close the reader after the queued calls; return at once."""
        self._thread.submit(self._reader.close)
        self._thread.shutdown(wait=False)


class KafkaStreamEnds(_ReaderThread):
    """Implements `ports.StreamEnds`."""

    def __init__(self, bootstrap: Brokers) -> None:
        super().__init__(bootstrap, INTERACTIONS, "ends")
        # Records have a second thread: they may take seconds, and forgets and GetFreshness must not wait for them.
        self._records = _ReaderThread(bootstrap, INTERACTIONS, "tail")
        self._asking: asyncio.Future[Mapping[int, int]] | None = None

    def close(self) -> None:
        super().close()
        self._records.close()

    def start(self) -> None:
        """Connect in the background: otherwise the first caller would time out."""
        self._thread.submit(self._reader.partitions)

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        """Return the end offsets; concurrent callers share one request.

        Raises: DependencyUnavailable; DeadlineExceeded.
        """
        if self._asking is None or self._asking.done():
            self._asking = self.read(TopicReader.end_offsets)
        return await _within(self._asking, timeout_s)

    async def records(self, offsets: Mapping[int, int], timeout_s: float) -> Mapping[int, SourceRecord]:
        """Return the record at each offset. Raises: as `interactions`."""
        return await _within(self._records.read(lambda reader: reader.records_at(offsets)), timeout_s)

    async def attribution_partitions(self, timeout_s: float) -> int:
        """Return the number of partitions in the client's metadata. Raises: as `interactions`."""
        return await _within(self.read(lambda reader: reader.num_partitions(ATTRIBUTIONS)), timeout_s)


class KafkaDeadLetters(_Thread):
    """Implements `ports.DeadLetterLog`. Calls are rare, so each opens a connection."""

    def __init__(self, bootstrap: Brokers) -> None:
        super().__init__("dead-letters")
        self._bootstrap = bootstrap

    async def newest(self, topics: Collection[str], timeout_s: float) -> tuple[Sequence[StoredLetter], bool]:
        return await self._run(lambda letters: letters.newest(topics), timeout_s)

    async def replay(self, topic: str, place: Position, *, preview: bool, timeout_s: float) -> Replayed:
        return await self._run(lambda letters: letters.replay_one(topic, place, preview=preview), timeout_s)

    async def _run(self, act: Callable[[DeadLetters], T], timeout_s: float) -> T:
        def opened() -> T:
            with closing(DeadLetters(self._bootstrap)) as letters:
                return act(letters)

        return await _within(self._submit(opened), timeout_s)


class KafkaShownAnswers(_ReaderThread):
    """Implements `ports.ShownAnswers`. pseudonym_key: None if no exposures are recorded.

    A user's records have the pseudonym as key and share a partition with other users' records.
    """

    def __init__(self, bootstrap: Brokers, pseudonym_key: bytes | None) -> None:
        super().__init__(bootstrap, EXPOSURES, "shown")
        self._key = pseudonym_key

    async def newest(self, user_id: str, most: int) -> Looked:
        """Read backwards from the end, for at most 16 MiB and two seconds."""
        return await self._run(user_id, lambda key, partition: self._newest(key, partition, most))

    async def at(self, user_id: str, exposure_id: str, shown_ms: int) -> Shown:
        """Read from the answer's time on."""
        return await self._run(user_id, lambda key, partition: self._at(key, partition, exposure_id, shown_ms))

    async def _run(self, user_id: str, read: Callable[[bytes, int], T]) -> T:
        if self._key is None:
            raise PreconditionFailed("this gateway records no exposures (FRESHET_GATEWAY_EXPOSURES)")
        key = pseudonym_of(user_id, self._key).encode()
        reading = self._submit(lambda: read(key, partition_for(key, self._reader.num_partitions())))
        return await _within(reading, _TIMEOUT_S)

    def _newest(self, key: bytes, partition: int, most: int) -> Looked:
        blocks = Backwards(self._reader, partition, max_bytes=_MAX_BYTES, max_s=_MAX_S)
        found: list[Shown] = []
        oldest_ms = None
        for block in blocks:
            oldest_ms = block[0].written_ms if block else oldest_ms
            found += [shown for record in reversed(block) if (shown := _shown(record, key)) is not None]
            if len(found) >= most:
                break
        return Looked(found[:most], oldest_ms, blocks.is_complete and len(found) <= most)

    def _at(self, key: bytes, partition: int, exposure_id: str, shown_ms: int) -> Shown:
        start, deadline, size = self._reader.offset_at(partition, shown_ms), time.monotonic() + _MAX_S, 0
        end = self._reader.bounds([partition])[partition][1]
        self._reader.assign({partition: end if start is None else start})
        while self._reader.positions()[partition] < end and time.monotonic() < deadline and size < _MAX_BYTES:
            for record in self._reader.poll(200):
                size += len(record.value or b"")
                shown = _shown(record, key)
                if shown is not None and shown.exposure.exposure_id == exposure_id:
                    return shown
                if record.written_ms > shown_ms + _LATEST_MS:
                    size = _MAX_BYTES
        raise NotFound("no record of this answer: not written, removed, or not found within the limits of the search")


def _shown(record: SourceRecord, key: bytes) -> Shown | None:
    if record.key != key:
        return None
    try:
        return Shown(decode_exposure(record.value), Position(record.partition, record.offset))
    except InvalidRequest:
        return None


async def _within(asking: asyncio.Future[T], timeout_s: float) -> T:
    """Return a thread's result. Raises: DeadlineExceeded; the call in the thread continues."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asking)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"Kafka did not answer within {timeout_s * 1000:.0f} ms") from exc

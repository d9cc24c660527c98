"""Read a user's answers in the topic `exposures`, in a separate thread.

A user's records are in one partition, under the pseudonym, between those of others. The newest are read backwards; a
single one from the time in its id on.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.exposures import EXPOSURES, decode_exposure
from services.gateway.adapters.stream_ends import within
from services.gateway.describe.shown import Looked, Shown
from services.platform.errors import InvalidRequest, NotFound, PreconditionFailed
from services.platform.stream.kafka import Brokers, partition_for
from services.platform.stream.reading import Backwards
from services.platform.stream.records import Position, SourceRecord

T = TypeVar("T")

_MAX_BYTES, _MAX_S, _TIMEOUT_S = 16 << 20, 2.0, 10.0
# Longest time from an answer to its record: a second in the queue, ten for delivery, and clock differences.
_LATEST_MS = 30_000


class KafkaShownAnswers:
    """Implements `ports.ShownAnswers`. pseudonym_key: None without recorded exposures."""

    def __init__(self, bootstrap: Brokers, pseudonym_key: bytes | None) -> None:
        self._key = pseudonym_key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shown-answers")
        self._reader = TopicReader(bootstrap, EXPOSURES, group_id="freshet-gateway", client_id="freshet-gateway-shown")

    async def newest(self, user_id: str, most: int) -> Looked:
        """Read backwards within 16 MiB and two seconds."""
        return await self._run(user_id, lambda key, partition: self._newest(key, partition, most))

    async def at(self, user_id: str, exposure_id: str, shown_ms: int) -> Shown:
        """Read from the answer's time on."""
        return await self._run(user_id, lambda key, partition: self._at(key, partition, exposure_id, shown_ms))

    async def _run(self, user_id: str, read: Callable[[bytes, int], T]) -> T:
        if self._key is None:
            raise PreconditionFailed("this gateway records no exposures (FRESHET_GATEWAY_EXPOSURES)")
        key = pseudonym_of(user_id, self._key).encode()

        def run() -> T:
            return read(key, partition_for(key, self._reader.num_partitions()))

        return await within(asyncio.get_running_loop().run_in_executor(self._thread, run), _TIMEOUT_S)

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

    def close(self) -> None:
        """Stop the thread without waiting for a call."""
        self._thread.submit(self._reader.close)
        self._thread.shutdown(wait=False)


def _shown(record: SourceRecord, key: bytes) -> Shown | None:
    if record.key != key:
        return None
    try:
        return Shown(decode_exposure(record.value), Position(record.partition, record.offset))
    except InvalidRequest:
        return None

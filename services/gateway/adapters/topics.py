"""Write the gateway's topics. One producer writes interactions, items and forgets. A thread writes exposures, so that
answers do not wait for them.

A record costs kafka-python 38 us in batches of fifty and 800 us alone (one core, eight partitions), so the thread
collects exposures for a second. A record is lost and counted if the queue is full or Kafka does not acknowledge it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.exposures import EXPOSURES, Exposure, encode_exposure
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.platform.errors import FreshetError
from services.platform.request_context import OFF, Tracing
from services.platform.stream.event_producer import EventProducer
from services.platform.stream.kafka import Brokers, BulkProducer, Record
from services.platform.stream.records import Position

R = TypeVar("R")


class KafkaLog(Generic[R]):
    """Implements `ports.Log` for one topic."""

    def __init__(
        self,
        producer: EventProducer,
        topic: str,
        key: Callable[[R], str],
        encode: Callable[[R], bytes],
        tracing: Tracing,
    ) -> None:
        self._producer, self._topic, self._key, self._encode, self._tracing = producer, topic, key, encode, tracing

    async def append(self, record: R, timeout_s: float) -> Position:
        """Append a record; on return all in-sync replicas have it."""
        partition, offset = await self._producer.send(
            self._topic,
            self._key(record).encode(),
            self._encode(record),
            self._tracing.headers(),
            timeout_s=timeout_s,
        )
        return Position(partition, offset)


def interaction_log(producer: EventProducer, tracing: Tracing = OFF) -> KafkaLog[Interaction]:
    """Return the log of interactions, keyed by user, which preserves the order of a user's interactions."""
    return KafkaLog(producer, INTERACTIONS, lambda one: one.user_id, encode_interaction, tracing)


def item_log(producer: EventProducer, tracing: Tracing = OFF) -> KafkaLog[CatalogueItem]:
    """Return the log of items, keyed by item: the newest record is its state."""
    return KafkaLog(producer, ITEMS, lambda one: one.item_id, encode_item, tracing)


def forget_log(producer: EventProducer, tracing: Tracing = OFF) -> KafkaLog[Forget]:
    """Return the log of forgets, keyed by user, compacted and never deleted."""
    return KafkaLog(producer, FORGETS, lambda one: one.user_id, encode_forget, tracing)


log = structlog.get_logger()

# So many answers of ten items take about 4 MB in all, and their contexts at most 64 MB more.
MAX_WAITING = 4_000
_GATHER_S = 1.0


class KafkaExposureLog:
    """Implements `ports.ExposureLog`. Call `start`, then `close`. The thread calls `count` with the numbers of written
    and of lost records.
    """

    def __init__(
        self,
        bootstrap: Brokers,
        pseudonym_key: bytes,
        *,
        count: Callable[[int, int], None] = lambda written, lost: None,
        gather_s: float = _GATHER_S,
    ) -> None:
        self._producer = BulkProducer(bootstrap, client_id="freshet-exposures")
        self._pseudonym_key, self._count, self._gather_s = pseudonym_key, count, gather_s
        self._waiting: deque[tuple[str, Exposure]] = deque()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exposures", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def append(self, user_id: str, exposure: Exposure) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._count(0, 1)
        else:
            self._waiting.append((user_id, exposure))

    async def close(self, timeout_s: float = 2.0) -> None:
        """Write the queue; after `timeout_s` the rest is lost."""
        self._ends.set()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self) -> None:
        while not self._ends.wait(self._gather_s):
            self._write()
        self._write()
        self._producer.close()

    def _write(self) -> None:
        noted = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not noted:
            return
        try:
            self._producer.send_many([self._record(user_id, exposure) for user_id, exposure in noted])
        except Exception as exc:  # After any error the next records may still be written.
            is_bug = not isinstance(exc, FreshetError)
            log.warning("exposures_lost", exposures=len(noted), reason=str(exc), exc_info=is_bug)
            self._count(0, len(noted))
        else:
            self._count(len(noted), 0)

    def _record(self, user_id: str, exposure: Exposure) -> Record:
        key = pseudonym_of(user_id, self._pseudonym_key) if user_id else exposure.exposure_id
        return Record(EXPOSURES, key.encode(), encode_exposure(exposure))

"""The topics that the gateway writes with one producer."""

from collections.abc import Callable
from typing import Generic, TypeVar

from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.platform.stream.event_producer import EventProducer
from services.platform.stream.records import Position
from services.platform.tracing import OFF, Tracing

R = TypeVar("R")


class KafkaLog(Generic[R]):
    """Implements `ports.Log` for one topic."""

    def __init__(
        self,
        producer: EventProducer,
        topic: str,
        key: Callable[[R], str],
        encode: Callable[[R], bytes],
        tracing: Tracing = OFF,
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
    """Return the log of interactions, keyed by user, which preserves their order."""
    return KafkaLog(producer, INTERACTIONS, lambda one: one.user_id, encode_interaction, tracing)


def item_log(producer: EventProducer, tracing: Tracing = OFF) -> KafkaLog[CatalogueItem]:
    """Return the log of items, keyed by item: the newest record is its state."""
    return KafkaLog(producer, ITEMS, lambda one: one.item_id, encode_item, tracing)


def forget_log(producer: EventProducer, tracing: Tracing = OFF) -> KafkaLog[Forget]:
    """Return the log of forgets, keyed by user, compacted and never deleted."""
    return KafkaLog(producer, FORGETS, lambda one: one.user_id, encode_forget, tracing)

"""The topics `items` and `forgets`, written through the gateway's producer."""

from services.common.forgets import Forget, encode_forget
from services.common.items import CatalogueItem, encode_item
from services.common.kafka import EventProducer
from services.common.topics import FORGETS, ITEMS


class KafkaItemLog:
    """Implements `ports.ItemLog`: keyed by item, so the newest record of an item is what it is."""

    def __init__(self, producer: EventProducer) -> None:
        self._producer = producer

    async def put(self, item: CatalogueItem, timeout_s: float) -> None:
        """Acknowledged by all in-sync replicas when this returns."""
        await self._producer.send(ITEMS, item.item_id.encode(), encode_item(item), timeout_s=timeout_s)


class KafkaForgetLog:
    """Implements `ports.ForgetLog`: keyed by user, compacted and kept."""

    def __init__(self, producer: EventProducer) -> None:
        self._producer = producer

    async def append(self, forget: Forget, timeout_s: float) -> None:
        """Acknowledged by all in-sync replicas when this returns."""
        await self._producer.send(FORGETS, forget.user_id.encode(), encode_forget(forget), timeout_s=timeout_s)

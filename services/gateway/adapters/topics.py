"""The topics that the gateway writes, through its one producer: interactions, items, forgets."""

from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.platform.stream.event_producer import EventProducer
from services.platform.stream.position import Position
from services.platform.tracing import OFF, Tracing


class KafkaInteractionLog:
    """Implements `ports.InteractionLog`: keyed by user, so one user's events keep their order."""

    def __init__(self, producer: EventProducer, tracing: Tracing = OFF) -> None:
        self._producer, self._tracing = producer, tracing

    async def append(self, interaction: Interaction, timeout_s: float) -> Position:
        """Acknowledged by all in-sync replicas when this returns."""
        partition, offset = await self._producer.send(
            INTERACTIONS,
            interaction.user_id.encode(),
            encode_interaction(interaction),
            self._tracing.headers(),
            timeout_s=timeout_s,
        )
        return Position(partition, offset)


class KafkaItemLog:
    """Implements `ports.ItemLog`: keyed by item, so the newest record of an item is what it is."""

    def __init__(self, producer: EventProducer, tracing: Tracing = OFF) -> None:
        self._producer, self._tracing = producer, tracing

    async def put(self, item: CatalogueItem, timeout_s: float) -> None:
        """Acknowledged by all in-sync replicas when this returns."""
        headers = self._tracing.headers()
        await self._producer.send(ITEMS, item.item_id.encode(), encode_item(item), headers, timeout_s=timeout_s)


class KafkaForgetLog:
    """Implements `ports.ForgetLog`: keyed by user, compacted and kept."""

    def __init__(self, producer: EventProducer, tracing: Tracing = OFF) -> None:
        self._producer, self._tracing = producer, tracing

    async def append(self, forget: Forget, timeout_s: float) -> None:
        """Acknowledged by all in-sync replicas when this returns."""
        headers = self._tracing.headers()
        await self._producer.send(FORGETS, forget.user_id.encode(), encode_forget(forget), headers, timeout_s=timeout_s)

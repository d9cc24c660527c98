"""The stream of interactions, through `services.common.kafka`."""

from services.common.events import Interaction, encode_interaction
from services.common.kafka import EventProducer, partition_for
from services.common.stream.position import Position
from services.common.topics import INTERACTIONS, NUM_PARTITIONS


class KafkaInteractionLog:
    """Implements `ports.InteractionLog`: keyed by user, so one user's events keep their order."""

    def __init__(self, producer: EventProducer, num_partitions: int = NUM_PARTITIONS) -> None:
        self._producer = producer
        self._num_partitions = num_partitions

    def partition_of(self, user_id: str) -> int:
        """Where Kafka's default partitioner puts this user."""
        return partition_for(user_id.encode(), self._num_partitions)

    async def append(self, interaction: Interaction, timeout_s: float) -> Position:
        """Acknowledged by all in-sync replicas when this returns."""
        partition, offset = await self._producer.send(
            INTERACTIONS, interaction.user_id.encode(), encode_interaction(interaction), timeout_s=timeout_s
        )
        return Position(partition, offset)

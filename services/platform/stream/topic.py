"""The configuration with which a topic is created."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.platform.errors import PreconditionFailed

NUM_PARTITIONS = 8
FOREVER = {"retention.ms": "-1"}
COMPACTED = {"cleanup.policy": "compact"}

# With three brokers, any one may fail without losing or rejecting a record.
SAFE_REPLICAS, SAFE_IN_SYNC = 3, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Replication of created topics.

    0 means three replicas, two of them in sync, on at least three brokers; on fewer brokers, one replica.
    """

    replication_factor: int = 0
    min_in_sync: int = 0

    def on(self, num_brokers: int) -> tuple[int, int]:
        """Return (replication factor, in-sync minimum) on a cluster. Raises: PreconditionFailed if they contradict."""
        factor = self.replication_factor or (SAFE_REPLICAS if num_brokers >= SAFE_REPLICAS else 1)
        in_sync = self.min_in_sync or (SAFE_IN_SYNC if factor >= SAFE_REPLICAS else 1)
        if in_sync > factor:
            raise PreconditionFailed(
                f"FRESHET_KAFKA_MIN_IN_SYNC={in_sync} is more than the {factor} replicas of a topic on {num_brokers} "
                "brokers: no record could be written. Set FRESHET_KAFKA_REPLICATION"
            )
        return factor, in_sync


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """A topic's configuration. has_dead_letters: a second topic gets unreadable records. as_many_as: an existing topic;
    the new topic gets the same number of partitions.
    """

    name: str
    num_partitions: int = NUM_PARTITIONS
    settings: Mapping[str, str] = field(default_factory=dict)
    has_dead_letters: bool = False
    as_many_as: str = ""

"""A topic as it is made, and what reading the Protobuf of any topic's record has in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from services.platform.errors import InvalidRequest, PreconditionFailed

NUM_PARTITIONS = 8
FOREVER = {"retention.ms": "-1"}
COMPACTED = {"cleanup.policy": "compact"}

# Where a cluster has three brokers, each record lies on all of them and is acknowledged by two: any one may be lost,
# or be away, without losing a record or refusing one.
SAFE_REPLICAS, SAFE_IN_SYNC = 3, 2

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """How many brokers hold a record of a topic that is made here, and how many have it before it is acknowledged
    (min.insync.replicas; every producer here waits for all that are in sync).

    0: as the cluster allows: three and two where it has three brokers or more, else one and one.
    """

    replication_factor: int = 0
    min_in_sync: int = 0

    def on(self, num_brokers: int) -> tuple[int, int]:
        """(replication factor, in-sync minimum) on a cluster. Raises: PreconditionFailed when they contradict."""
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
    """One topic and how it is made when it is missing; an existing topic is left as it is.

    has_dead_letters: what of it nobody can read goes to a topic of its own. as_many_as: another topic, whose number of
    partitions it gets where that one exists.
    """

    name: str
    num_partitions: int = NUM_PARTITIONS
    settings: Mapping[str, str] = field(default_factory=dict)
    has_dead_letters: bool = False
    as_many_as: str = ""


def parse(kind: type[_M], value: bytes | None) -> _M:
    """The message of a record, unchecked. Raises: InvalidRequest when there are no bytes or they are not one."""
    name = kind.DESCRIPTOR.name
    if not value:
        raise InvalidRequest.of("value", "no bytes", f"a whole {name} message")
    try:
        return kind.FromString(value)
    except DecodeError as exc:
        raise InvalidRequest.of("value", f"{len(value)} unreadable bytes", f"a whole {name} message") from exc


def check_key(key: bytes | None, wanted: bytes, name: str) -> None:
    """Raises: InvalidRequest unless a record's key is what its value says. name: what the key is to be."""
    if key != wanted:
        raise InvalidRequest.of("key", "absent" if key is None else f"{len(key)} other bytes", name)

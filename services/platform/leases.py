"""The port by which processes share partitions (`services/user_state/leases.py`)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Holding:
    """The leased partitions. terms: per partition, grows with every owner. surplus: how many others should have."""

    terms: Mapping[int, int]
    surplus: int = 0


class Leases(Protocol):
    """Leases on partitions. Thread-safe."""

    def start(self, partitions: Sequence[int]) -> None:
        """Join in the background; acquires free partitions at once. Raises: DependencyUnavailable, without joining."""

    def holding(self) -> Holding:
        """Return the leased partitions."""

    def release(self, partitions: Collection[int]) -> None:
        """Release partitions at once."""

    def close(self) -> None:
        """Release everything and leave the group."""

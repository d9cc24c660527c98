"""Who works on which partition: the port that processes share partitions by (`redis_leases.py` is the real adapter)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Holding:
    """What leases say. terms: for each partition held, a number that grows with every holder; surplus: how many of
    them others should have."""

    terms: Mapping[int, int]
    surplus: int = 0


class Leases(Protocol):
    """Who works on which partition. Methods may be called from any thread."""

    def start(self, partitions: Sequence[int]) -> None:
        """Begin to take part, in the background; what is free then is held at once. Raises: DependencyUnavailable;
        then nothing has begun."""

    def holding(self) -> Holding:
        """What is held now."""

    def release(self, partitions: Collection[int]) -> None:
        """Give partitions back at once."""

    def close(self) -> None:
        """Give everything back; nothing is held from then on."""

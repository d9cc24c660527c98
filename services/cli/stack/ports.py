"""The ports of one stack: the defaults of docker-compose.yml, those shifted, or a free block for tests.

Names are the compose services; what a service publishes beside its main port is `<service>-<what>`. Taken ports are
found, and their owners named, by services/common/ports.
"""

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from services.common.ports import PortTaken, check_port_free

LOOPBACK = "127.0.0.1"
DEFAULTS: Mapping[str, int] = MappingProxyType(
    {
        "redis": 16379,
        "inference-server-http": 18000,
        "inference-server": 18001,
        "inference-server-metrics": 18002,
        "kafka": 19092,
        "kafka-controller": 19093,
        "gateway": 50050,
        "encoder": 50051,
        "candidates": 50052,
        "reranker": 50053,
        "refresher": 50054,
        "generator": 50055,
        "gateway-metrics": 51050,
        "encoder-metrics": 51051,
        "candidates-metrics": 51052,
        "reranker-metrics": 51053,
        "refresher-metrics": 51054,
        "generator-metrics": 51055,
    }
)
# Below the ports that the system hands to outgoing connections (32768-60999 on Linux).
_FREE_BLOCKS = range(20_000, 32_000, len(DEFAULTS))


@dataclass(frozen=True)
class Ports:
    """A port per name of `DEFAULTS`."""

    numbers: Mapping[str, int]

    def __post_init__(self) -> None:
        if set(self.numbers) != set(DEFAULTS):
            raise ValueError(f"ports name {sorted(self.numbers)}; expected {sorted(DEFAULTS)}")
        for name, number in self.numbers.items():
            if not 0 < number < 65536:
                raise ValueError(f"port of {name} is {number}; allowed: 1-65535")

    def __getitem__(self, name: str) -> int:
        return self.numbers[name]

    def of(self, part: str) -> dict[str, int]:
        """Every port of one part, its main port first."""
        return {name: number for name, number in sorted(self.numbers.items()) if owner(name) == part}

    def address(self, name: str) -> str:
        return f"{LOOPBACK}:{self.numbers[name]}"

    @classmethod
    def default(cls, *, offset: int = 0) -> "Ports":
        """The documented ports, each plus `offset`."""
        return cls({name: number + offset for name, number in DEFAULTS.items()})

    @classmethod
    def free(cls) -> "Ports":
        """A block that nobody listens on now; blocks are tried in an order of this process's own."""
        blocks = list(_FREE_BLOCKS)
        random.Random(f"{os.getpid()} {os.urandom(4).hex()}").shuffle(blocks)
        for start in blocks:
            ports = cls({name: start + place for place, name in enumerate(DEFAULTS)})
            if not any(ports.taken()):
                return ports
        raise ValueError(f"no block of {len(DEFAULTS)} free ports between 20000 and 32000")

    def taken(self, part: str | None = None) -> Iterator[PortTaken]:
        """A problem per port, of `part` or of all, that somebody listens on."""
        for name, number in self.numbers.items():
            if part is not None and owner(name) != part:
                continue
            try:
                check_port_free(LOOPBACK, number)
            except PortTaken as problem:
                yield PortTaken(LOOPBACK, number, problem.owner, purpose=name)


def owner(name: str) -> str:
    """The part whose port this is: "encoder-metrics" belongs to "encoder"."""
    for suffix in ("-metrics", "-http", "-controller"):
        name = name.removesuffix(suffix)
    return name

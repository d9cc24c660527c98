"""A stack's ports, which are docker-compose.yml's, shifted ones, or a free block.

Tests, version sets and shards use free blocks. A main port has its service's name, others `<service>-<what>`.
"""

import os
import random
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from services.contracts.processes import PROCESSES
from services.platform.machine import PortTaken, check_port_free


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the stack. ports: the main one first. stop_s: seconds between SIGTERM and SIGKILL. The rest: see
    `processes.Process`.
    """

    name: str
    ports: Mapping[str, int]
    memory_mb: int
    stop_s: float = 10.0
    holds: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[str, bool] = field(default_factory=dict)
    needs_bundle: bool = True


CONSOLE = "console"
INFRASTRUCTURE = ("kafka", "redis", "inference-server")
_ROWS = (
    Part(
        name="kafka",
        ports={"kafka": 19092, "kafka-controller": 19093},
        memory_mb=400,
        stop_s=20.0,
        needs_bundle=False,
    ),
    Part(name="redis", ports={"redis": 16379}, memory_mb=30, needs_bundle=False),
    Part(
        name="inference-server",
        ports={"inference-server": 18001, "inference-server-http": 18000, "inference-server-metrics": 18002},
        memory_mb=150,
        stop_s=12.0,
        holds={"encoder.onnx": 3},
    ),
    *(
        Part(
            name=row.name,
            ports={
                row.name: row.port,
                f"{row.name}-metrics": row.metrics_port,
                **({f"{row.name}-http": row.http_port} if row.http_port else {}),
            },
            memory_mb=row.memory_mb,
            holds=row.holds,
            options=row.options,
            needs=row.needs,
        )
        for row in PROCESSES.values()
    ),
    # The console has no gRPC, so `PROCESSES` has no row for it.
    Part(name=CONSOLE, ports={CONSOLE: 50060}, memory_mb=120, needs_bundle=False),
)
PARTS: Mapping[str, Part] = MappingProxyType({row.name: row for row in _ROWS})


def stop_order() -> Iterator[list[str]]:
    """Yield groups of parts that may stop together, after those that depend on them."""
    left = dict(PARTS)
    while left:
        needed = {other for part in left.values() for other in part.needs}
        together = [name for name in left if name not in needed]
        yield together
        left = {name: part for name, part in left.items() if name not in together}


LOOPBACK = "127.0.0.1"
# Maps each port's name to its documented number.
DEFAULTS: Mapping[str, int] = MappingProxyType(
    {name: number for part in PARTS.values() for name, number in part.ports.items()}
)
_OWNERS = {name: part.name for part in PARTS.values() for name in part.ports}
# Ports below those of outgoing connections (32768-60999 on Linux) and without the demo's in tests (tests/e2e). A
# block's last port is its guard.
_FREE_BLOCKS = range(20_000, 27_000, len(DEFAULTS) + 1)


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
        """Return a part's ports, its main one first."""
        return {name: number for name, number in sorted(self.numbers.items()) if owner(name) == part}

    def address(self, name: str) -> str:
        return f"{LOOPBACK}:{self.numbers[name]}"

    @classmethod
    def default(cls, *, offset: int = 0) -> "Ports":
        """Return the documented ports, each plus `offset`."""
        return cls({name: number + offset for name, number in DEFAULTS.items()})

    @classmethod
    def free(cls) -> "Ports":
        """Return a block of ports without listeners.

        Its guard port stays bound, so that concurrent tests do not take ports of stopped parts.
        """
        blocks = list(_FREE_BLOCKS)
        random.Random(f"{os.getpid()} {os.urandom(4).hex()}").shuffle(blocks)
        for start in blocks:
            ports = cls({name: start + place for place, name in enumerate(DEFAULTS)})
            if not any(ports.taken()) and _reserve(start + len(DEFAULTS)):
                return ports
        raise ValueError(f"no block of {len(DEFAULTS)} free ports between 20000 and 27000")

    def taken(self, part: str | None = None) -> Iterator[PortTaken]:
        """Yield a problem for each port (of `part`) with a listener."""
        for name, number in self.numbers.items():
            if part is not None and owner(name) != part:
                continue
            try:
                check_port_free(LOOPBACK, number)
            except PortTaken as problem:
                yield PortTaken(LOOPBACK, number, problem.owner, purpose=name)


def owner(name: str) -> str:
    """Return a port's part: "encoder-metrics" belongs to "encoder"."""
    return _OWNERS[name]


def _reserve(guard: int) -> bool:
    """Bind this port until the process ends. Return False if the port is in use."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        try:
            holder.bind((LOOPBACK, guard))
        except OSError:
            return False
        holder.detach()
    return True

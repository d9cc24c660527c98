"""The parts of the local stack: Kafka, Redis and the inference server, then Freshet's own processes.

A part is one row; those of the processes come from services/common/processes.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from services.common.processes import PROCESSES


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part. ports: its main port first, under its own name. stop_s: SIGTERM drains, whoever takes longer is killed.

    memory_mb, holds and needs as in `processes.Process`.
    """

    name: str
    ports: Mapping[str, int]
    memory_mb: int
    stop_s: float = 10.0
    holds: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[str, bool] = field(default_factory=dict)
    needs_bundle: bool = True


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
            ports={row.name: row.port, f"{row.name}-metrics": row.metrics_port},
            memory_mb=row.memory_mb,
            holds=row.holds,
            needs=row.needs,
        )
        for row in PROCESSES.values()
    ),
)
PARTS: Mapping[str, Part] = MappingProxyType({row.name: row for row in _ROWS})


def stop_order() -> Iterator[list[str]]:
    """Names that may stop together, first those that no other part needs; what they write to stays until the end."""
    left = dict(PARTS)
    while left:
        needed = {other for part in left.values() for other in part.needs}
        together = [name for name in left if name not in needed]
        yield together
        left = {name: part for name, part in left.items() if name not in together}

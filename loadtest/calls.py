"""What the scenarios' calls have in common: the gateway's stub, and what is read from an answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freshet.v1 import gateway_pb2, gateway_pb2_grpc

from .engine import Stream
from .open_loop import FloatArray
from .results import Outcome

_STAGES = ("queue", "encode", "first_stage", "rerank", "transport")


def gateway(channel: Any) -> Any:
    """The gateway's stub on a channel."""
    return gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]


def streams(rows: Mapping[str, tuple[FloatArray, Callable[[], Outcome]]]) -> list[Stream]:
    """By name when calls are due and what makes one; kinds without a call are left out."""
    return [Stream(name=name, arrivals_s=due_s, call=call) for name, (due_s, call) in rows.items() if len(due_s)]


def degradations(answer: Any) -> list[str]:
    """The answer's marks, by name."""
    return [gateway_pb2.Degradation.Name(mark).removeprefix("DEGRADATION_") for mark in answer.degradations]


def recommended(answer: gateway_pb2.RecommendResponse, counts: Sequence[str] = ()) -> Outcome:
    """Stage times and marks of a Recommend's answer."""
    return Outcome(
        stages_ms={stage: getattr(answer.stage_times, f"{stage}_ms") for stage in _STAGES},
        degradations=degradations(answer),
        counts=counts,
    )

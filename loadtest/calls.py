"""Shared by the scenarios' calls: the gateway's stub, and reading an answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freshet.v1 import gateway_pb2, gateway_pb2_grpc

from .engine import Stream
from .open_loop import FloatArray
from .results import Outcome

_STAGES = ("queue", "encode", "first_stage", "rerank", "transport")


def gateway(channel: Any) -> Any:
    """Return the gateway's stub on a channel."""
    return gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]


def streams(rows: Mapping[str, tuple[FloatArray, Callable[[], Outcome]]]) -> list[Stream]:
    """Return a stream for each row of due times and call, by name; rows without due times are omitted."""
    return [Stream(name=name, arrivals_s=due_s, call=call) for name, (due_s, call) in rows.items() if len(due_s)]


def degradations(answer: Any) -> list[str]:
    """Return the names of the answer's degradations."""
    return [gateway_pb2.Degradation.Name(mark).removeprefix("DEGRADATION_") for mark in answer.degradations]


def recommended(answer: gateway_pb2.RecommendResponse, counts: Sequence[str] = ()) -> Outcome:
    """Return stage times and degradations of a Recommend's answer."""
    return Outcome(
        stages_ms={stage: getattr(answer.stage_times, f"{stage}_ms") for stage in _STAGES},
        degradations=degradations(answer),
        counts=counts,
    )

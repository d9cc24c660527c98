"""Calls to the gateway: its stub, interactions and requests (as bytes for the compiled sender), and reading answers."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc

from .compiled import OK, PlannedCall, SenderError, send
from .engine import Stream
from .open_loop import FloatArray
from .population import Draws, Population
from .results import Outcome

_STAGES = ("queue", "encode", "first_stage", "rerank", "transport")
_SERVICE = "/freshet.v1.GatewayService/"
RECOMMEND, RECORD, SEARCH = f"{_SERVICE}Recommend", f"{_SERVICE}RecordInteractions", f"{_SERVICE}Search"
HEALTH = "/grpc.health.v1.Health/Check"
# Events of each user before the measurement, events per call, calls per second.
_FIRST_EVENTS, _TOGETHER, _CALLS_PER_S = 3, 50, 6


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


def interaction(
    user: str, item: str, kind: str = "click", *, value: float = 0.0, query: str = "", at_ns: int | None = None
) -> events_pb2.Interaction:
    """Return an interaction with its own event id; it happens at `at_ns` (unix nanoseconds), by default now."""
    made = events_pb2.Interaction(
        event_id=uuid.uuid4().hex, user_id=user, item_id=item, type=kind, value=value, query=query
    )
    made.event_time.FromNanoseconds(time.time_ns() if at_ns is None else at_ns)
    return made


def recommend(user: str, k: int) -> bytes:
    return gateway_pb2.RecommendRequest(user_id=user, k=k).SerializeToString()


def record(events: Sequence[tuple[str, str]]) -> bytes:
    """Return a request with a click now for each user and item."""
    interactions = [interaction(user, item) for user, item in events]
    return gateway_pb2.RecordInteractionsRequest(interactions=interactions).SerializeToString()


def search(words: str, user: str, k: int) -> bytes:
    return gateway_pb2.GatewayServiceSearchRequest(query=words, user_id=user, k=k).SerializeToString()


def make_known(program: Path, target: str, population: Population, draws: Draws) -> None:
    """Write each user's first events, so that no answer has popular items because a state is missing.

    Raises: SenderError if one was not accepted.
    """
    events = [(user, draws.draw()[1]) for user in population.user_ids for _ in range(_FIRST_EVENTS)]
    calls = [
        PlannedCall(
            due_s=place / _TOGETHER / _CALLS_PER_S, method=RECORD, request=record(events[place : place + _TOGETHER])
        )
        for place in range(0, len(events), _TOGETHER)
    ]
    status = send(program, target, calls, timeout_s=10.0).status
    if (status != OK).any():
        raise SenderError(f"users' first events were not all taken: gRPC status {sorted(set(status.tolist()))}")

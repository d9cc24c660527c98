"""Interactions, requests as bytes for the compiled sender, and users' first events."""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from freshet.v1 import events_pb2, gateway_pb2

from .compiled import OK, PlannedCall, SenderError, send
from .population import Draws, Population

_SERVICE = "/freshet.v1.GatewayService/"
RECOMMEND, RECORD, SEARCH = f"{_SERVICE}Recommend", f"{_SERVICE}RecordInteractions", f"{_SERVICE}Search"
HEALTH = "/grpc.health.v1.Health/Check"
# Events of each user before the measurement, events per call, calls per second.
_FIRST_EVENTS, _TOGETHER, _CALLS_PER_S = 3, 50, 6


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

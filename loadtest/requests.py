"""Requests as bytes for the compiled sender, and users' first events."""

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


def recommend(user: str, k: int) -> bytes:
    return gateway_pb2.RecommendRequest(user_id=user, k=k).SerializeToString()


def record(events: Sequence[tuple[str, str]]) -> bytes:
    """Return a request with a click now for each user and item."""
    request = gateway_pb2.RecordInteractionsRequest()
    for user, item in events:
        event = events_pb2.Interaction(event_id=uuid.uuid4().hex, user_id=user, item_id=item, type="click")
        event.event_time.GetCurrentTime()
        request.interactions.append(event)
    return request.SerializeToString()


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

"""Calls of the running gateway by the demo's own steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from freshet_client import Client

from services.platform.rpc.client import gateway_client

_CALL_S = 5.0


class Gateway:
    """`gateway("Recommend", request)` calls a method by its name."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __call__(self, method: str, request: Any, *, timeout_s: float = _CALL_S) -> Any:
        """Raises: freshet_client.FreshetError."""
        return self._client.call(method, request, timeout_s=timeout_s)

    def top(self, user_id: str, k: int, as_of_s: int | None = None) -> list[str]:
        """Return the recommended item ids, best first; as_of_s: request time, unix seconds."""
        from freshet.v1 import gateway_pb2

        request = gateway_pb2.RecommendRequest(user_id=user_id, k=k)
        if as_of_s is not None:
            request.as_of.FromSeconds(as_of_s)
        answer = self("Recommend", request)
        return [scored.item_id for scored in answer.items]


@contextmanager
def connected(address: str) -> Iterator[Gateway]:
    """Connect to the gateway at host:port for a block."""
    with gateway_client(address) as client:
        yield Gateway(client)

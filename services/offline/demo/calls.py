"""Calls of the running gateway by the demo's own steps; a failure names the gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.platform.config import environment_tls
from services.platform.rpc.client import api_key_metadata, blocking_channel

_CALL_S = 5.0
_LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


class CallFailed(Exception):
    """A call of the gateway at `address`, which had `timeout_s`, failed with gRPC's `error`."""

    def __init__(self, address: str, timeout_s: float, error: grpc.RpcError) -> None:
        super().__init__(f"gateway {address}: {error.code().name}: {error.details()}")
        self.address = address
        self.timeout_s = timeout_s
        self.error = error

    @property
    def is_unavailable(self) -> bool:
        """Whether the same call may succeed later."""
        return self.error.code() in _LATER


class Gateway:
    """An open connection. `gateway("Recommend", request)` calls a method by its name."""

    def __init__(self, stub: Any, address: str) -> None:
        self._stub = stub
        self._address = address

    def __call__(self, method: str, request: Any, *, timeout_s: float = _CALL_S) -> Any:
        """Raises: CallFailed."""
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, metadata=api_key_metadata())
        except grpc.RpcError as error:
            raise CallFailed(self._address, timeout_s, error) from error

    def top(self, user_id: str, k: int, as_of_s: int | None = None) -> list[str]:
        """Item ids that the user is recommended, best first; as_of_s: as of this moment, unix seconds."""
        from freshet.v1 import gateway_pb2

        request = gateway_pb2.RecommendRequest(user_id=user_id, k=k)
        if as_of_s is not None:
            request.as_of.FromSeconds(as_of_s)
        answer = self("Recommend", request)
        return [scored.item_id for scored in answer.items]


@contextmanager
def connected(address: str) -> Iterator[Gateway]:
    """The gateway at host:port, for a block."""
    from freshet.v1 import gateway_pb2_grpc

    stub: Any = gateway_pb2_grpc.GatewayServiceStub
    with blocking_channel(address, environment_tls()) as channel:
        yield Gateway(stub(channel), address)

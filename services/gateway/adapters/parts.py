"""Find out why a part is not ready, by gRPC health, a read of Redis, and the brokers' reachability."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway.ports import StreamStatus
from services.platform.errors import FreshetError
from services.platform.rpc.health_check import WHY_NOT_READY

Checked = Sequence[tuple[str, grpc.aio.Channel, str]]


class ProbedParts:
    """Implements `ports.Parts`. processes: each part's addresses, with channel and service name in gRPC health. store:
    reads Redis. inside: parts in this process.
    """

    def __init__(
        self,
        processes: Mapping[str, Checked],
        *,
        stream: StreamStatus,
        store: Callable[[], Awaitable[object]],
        inside: Sequence[str] = (),
    ) -> None:
        self._processes, self._stream, self._store, self._inside = processes, stream, store, inside

    async def problems(self, timeout_s: float) -> Mapping[str, str]:
        asked = {name: _processes(of_part, timeout_s) for name, of_part in self._processes.items() if of_part}
        redis, *found = await asyncio.gather(self._redis(), *asked.values())
        brokers = "" if self._stream.log_reachable else "fewer than half of its brokers answer"
        return {
            "kafka": brokers,
            "redis": redis,
            **dict.fromkeys(self._inside, ""),
            **dict(zip(asked, found, strict=True)),
        }

    async def _redis(self) -> str:
        try:
            await self._store()
        except FreshetError as exc:
            return exc.message
        return ""


async def _processes(of_part: Checked, timeout_s: float) -> str:
    found = await asyncio.gather(*(_process(*one, timeout_s) for one in of_part))
    return "; ".join(filter(None, found))


async def _process(address: str, channel: grpc.aio.Channel, service: str, timeout_s: float) -> str:
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    try:
        answer = await call
    except grpc.aio.AioRpcError as exc:
        if exc.code() is grpc.StatusCode.NOT_FOUND:
            return f"{address} serves another model ({exc.details()})"
        return f"no answer at {address} ({exc.code().name})"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    why = dict(await call.trailing_metadata() or ()).get(WHY_NOT_READY, "it is not serving")
    return f"{address}: {why}"

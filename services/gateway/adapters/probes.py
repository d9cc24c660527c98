"""Probe what the gateway depends on, and find out why a part is not ready.

Brokers (TCP) and the encoder's health are probed twice a second, so that requests do not wait for probes. The log is
reachable if at least half of the brokers are: two of three still accept writes. The cluster's list omits dead brokers,
so the longest list so far gives their number. An encoder counts as not serving after two time-outs in a row: on a busy
machine one answer may be late.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway.ports import StreamStatus
from services.platform.errors import FreshetError
from services.platform.rpc.health_check import WHY_NOT_READY

log = structlog.get_logger()

_TIMEOUT_S = 0.4


class ProbedStreamStatus:
    """Implements `ports.StreamStatus`. Call `start`, then `close`."""

    def __init__(
        self,
        encoder: grpc.aio.Channel,
        brokers: Callable[[], Collection[str]],
        *,
        interval_s: float = 0.5,
    ) -> None:
        self._check = health_pb2_grpc.HealthStub(encoder).Check
        self._named_now = brokers
        self._brokers: Collection[str] = ()
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._failures: dict[str, str] = {}
        self._was_silent = False
        self.log_reachable = True
        self.encoder_serving = True

    async def start(self) -> None:
        """Probe once, then start periodic probes."""
        await self.probe()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def probe(self) -> None:
        log_reachable, encoder_serving = await asyncio.gather(
            self._answer("broker", self._half_of_brokers()), self._answer("encoder", self._encoder_health())
        )
        if (log_reachable, encoder_serving) != (self.log_reachable, self.encoder_serving):
            log.warning("stream_status", log_reachable=log_reachable, encoder_serving=encoder_serving)
        self.log_reachable, self.encoder_serving = log_reachable, encoder_serving

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.probe()

    async def _answer(self, name: str, probe: Awaitable[bool]) -> bool:
        """Return a probe's result. If it raises, return False and log the error unless it equals the previous one."""
        failure, answer = "", False
        try:
            answer = await probe
        except Exception as exc:
            failure = repr(exc)
            if failure != self._failures.get(name):
                log.exception("stream_probe_failed", probe=name)
        self._failures[name] = failure
        return answer

    async def _half_of_brokers(self) -> bool:
        # A list of the same length replaces the old one, because it may have a new address.
        if len(named := self._named_now()) >= len(self._brokers):
            self._brokers = named
        answers = await asyncio.gather(*map(self._connects, self._brokers))
        return 2 * sum(answers) >= len(answers)

    async def _connects(self, broker: str) -> bool:
        host, _, port = broker.rpartition(":")
        # A time-out is an OSError; a name that IDNA cannot encode raises UnicodeError.
        with contextlib.suppress(OSError, UnicodeError):
            async with asyncio.timeout(_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return True
        return False

    async def _encoder_health(self) -> bool:
        try:
            answer = await self._check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            was_silent, self._was_silent = self._was_silent, error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return self.encoder_serving and self._was_silent and not was_silent
        self._was_silent = False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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

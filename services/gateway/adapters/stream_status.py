"""Probe Kafka's brokers (TCP) and the encoder's health twice a second, so that requests do not wait for probes.

The log is reachable if at least half of the brokers are: two of three still accept writes. The cluster's list omits
dead brokers, so the longest list so far gives their number. An encoder counts as not serving after two time-outs in a
row: on a busy machine one answer may be late.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

log = structlog.get_logger()


class ProbedStreamStatus:
    """Implements `ports.StreamStatus`. Call `start`, then `close`."""

    def __init__(
        self,
        encoder: grpc.aio.Channel,
        brokers: Callable[[], Collection[str]],
        *,
        interval_s: float = 0.5,
        timeout_s: float = 0.4,
    ) -> None:
        self._check = health_pb2_grpc.HealthStub(encoder).Check
        self._named_now = brokers
        self._brokers: Collection[str] = ()
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None
        self._failures: dict[str, str] = {}
        self._was_silent = False
        self.log_reachable = True
        self.encoder_serving = True

    async def start(self) -> None:
        """Probe once, then continue."""
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
        """Return a probe's result; if it raised, log a new text and return False."""
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
        # A list of the same length may have a new address.
        if len(named := self._named_now()) >= len(self._brokers):
            self._brokers = named
        answers = await asyncio.gather(*map(self._connects, self._brokers))
        return 2 * sum(answers) >= len(answers)

    async def _connects(self, broker: str) -> bool:
        host, _, port = broker.rpartition(":")
        # A time-out is an OSError; a name that IDNA cannot encode is not.
        with contextlib.suppress(OSError, UnicodeError):
            async with asyncio.timeout(self._timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return True
        return False

    async def _encoder_health(self) -> bool:
        try:
            answer = await self._check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            was_silent, self._was_silent = self._was_silent, error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return self.encoder_serving and self._was_silent and not was_silent
        self._was_silent = False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

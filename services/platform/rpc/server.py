"""A gRPC server: start, guard every call, report health, drain."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, CollectorRegistry

from services.platform.config import ProcessSettings
from services.platform.machine import PortTaken, check_port_free, give_back_freed, port_owner
from services.platform.metrics import serve_metrics
from services.platform.request_context import Tracing
from services.platform.rpc.admission import Admission
from services.platform.rpc.guard import CallGuards, Door, RpcMetrics
from services.platform.rpc.health_check import WHY_NOT_READY
from services.platform.stream.follower import TurnClock

if TYPE_CHECKING:
    from services.platform.http.server import HttpServer

log = structlog.get_logger()

AddServices = Callable[[grpc.aio.Server], Sequence[str]]

# The gateway sends pools of thousands of items to its peers.
MAX_REQUEST_BYTES = 16 * 1024 * 1024
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # These times limit how long a connection stays open with an unfinished handshake, without calls, or with a dead
    # peer.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

_STARTING = "starting, or a part that it needs does not answer"


def adding(add: Callable[..., None], servicer: Any, service: str) -> AddServices:
    """Return a function that adds one service. add: generated, `add_…Servicer_to_server`."""

    def add_services(server: grpc.aio.Server) -> list[str]:
        add(servicer, server)
        return [service]

    return add_services


class HealthState:
    """Whether this process accepts work. Thread-safe; may be set before the server starts.

    A watched loop that hangs makes it not ready.
    """

    def __init__(
        self, *, ready: bool = False, look_every_s: float = 1.0, check: Callable[[], str] | None = None
    ) -> None:
        """check: returns why the process must not accept work, or ""."""
        # The reason set by the process, and the reason found by checks.
        self._own_reason, self._found = "" if ready else _STARTING, ""
        self.is_draining = False
        self._look_every_s = look_every_s
        self._loops: dict[str, TurnClock] = {}
        self._check = check
        self.services: list[str] = [""]
        # Names of `serve_as`, and whether the process still serves under each.
        self._names: dict[str, bool] = {}
        self._servicer: health.aio.HealthServicer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.Task[None] | None = None
        self._published = ""

    @property
    def ready(self) -> bool:
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why the process accepts no work; "" if it does."""
        return "draining" if self.is_draining else self._found or self._own_reason

    def set_ready(self, ready: bool, why_not: str = "") -> None:
        """Publish the state."""
        reason = "" if ready else why_not or _STARTING
        if reason != self._own_reason:
            self._own_reason = reason
            self._publish_soon()

    def _publish_soon(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.publish(), self._loop)

    def serve_as(self, names: Collection[str]) -> None:
        """Also serve under these names (`Process.health_of`); names of earlier calls become NOT_SERVING."""
        self._names = dict.fromkeys(self._names, False) | dict.fromkeys(names, True)
        self._publish_soon()

    def watch(self, loop: str, turns: TurnClock) -> None:
        """Report not ready while this loop is stuck; call it before the server starts."""
        self._loops[loop] = turns

    async def attach(self, servicer: "health.aio.HealthServicer", services: Sequence[str]) -> None:
        """Publish changes through `servicer`; called by the server."""
        self._servicer = servicer
        self.services = ["", *services]
        self._loop = asyncio.get_running_loop()
        await self.publish()
        if self._loops or self._check:
            self._looking = self._loop.create_task(self._look())

    @property
    def known(self) -> list[str]:
        return [*self.services, *self._names]

    async def drain(self) -> None:
        """Become not ready until the process ends."""
        self.is_draining = True
        if self._looking is not None:
            self._looking.cancel()
        await self.publish()

    async def publish(self) -> None:
        if self._servicer is None:
            return
        kinds = health_pb2.HealthCheckResponse
        why_not = self.why_not
        if why_not and why_not != self._published and not self.is_draining:
            log.warning("not_ready", reason=why_not)
        elif self._published and not why_not:
            log.info("ready", after=self._published)
        self._published = why_not
        status = kinds.NOT_SERVING if why_not else kinds.SERVING
        for service, is_served in {**dict.fromkeys(self.services, True), **self._names}.items():
            await self._servicer.set(service, status if is_served else kinds.NOT_SERVING)

    async def _look(self) -> None:
        before: set[str] = set()
        while True:
            hanging = {name for name, turns in self._loops.items() if turns.is_stuck}
            for name in sorted(hanging ^ before):
                (log.error if name in hanging else log.info)(
                    "loop_hangs" if name in hanging else "loop_goes_on", loop=name
                )
            before = hanging
            found = self._check() if self._check else ""
            if not found and hanging:
                found = f"a loop hangs: {', '.join(sorted(hanging))}"
            if found != self._found:
                self._found = found
                await self.publish()
            await asyncio.sleep(self._look_every_s)


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    def __init__(self, state: HealthState) -> None:
        super().__init__()
        self._state = state

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        if request.service not in (known := self._state.known):
            text = f"service={request.service[:80]!r} allowed: {', '.join(known[1:])}, or none"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        if why_not := self._state.why_not:
            context.set_trailing_metadata(((WHY_NOT_READY, why_not),))
        return await super().Check(request, context)


class _ReflectionPool:
    """A descriptor pool that also finds a file by a method's full name, as some clients of reflection (ghz) ask."""

    def __init__(self) -> None:
        self._pool: Any = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


class RpcServer:
    """A guarded grpc.aio server with health and reflection.

    health_state: None makes the server ready at once. door: authorises calls; None allows all calls.
    admissions: each method's limit; methods that it lacks share the limit in `settings`. max_request_bytes: larger
    requests are rejected unread. limits: see `CallGuards`. told: called at each call's end with method, status and
    seconds.
    """

    def __init__(
        self,
        *,
        process: str,
        settings: ProcessSettings,
        add_services: AddServices,
        health_state: HealthState | None = None,
        tracing: Tracing | None = None,
        door: Door | None = None,
        admissions: Mapping[str, Admission] | None = None,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        limits: Mapping[str, int] = MappingProxyType({}),
        idle_s: float = 60.0,
        registry: CollectorRegistry = REGISTRY,
        told: Callable[[str, str, float], None] | None = None,
    ) -> None:
        self.settings = settings
        self._health = health_state or HealthState(ready=True)
        self.guards = CallGuards(
            RpcMetrics(process, registry, told),
            max_in_flight=settings.max_in_flight,
            admissions=admissions,
            idle_s=idle_s,
            door=door,
            limits=limits,
        )
        options = [
            *_SERVER_OPTIONS,
            ("grpc.max_receive_message_length", max_request_bytes),
            # Otherwise two servers could share a port and each get half of the calls.
            ("grpc.so_reuseport", int(settings.shares_port)),
        ]
        if settings.connection_seconds:
            options.append(("grpc.max_connection_age_ms", round(settings.connection_seconds * 1000)))
        interceptors = [*(tracing.server_interceptors if tracing else ()), self.guards]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._add_services = add_services
        self.health_servicer = _Health(self._health)
        self.port = 0

    async def start(self) -> None:
        """Serve. Raises: PortTaken."""
        host, port = self.settings.host, self.settings.port
        if not self.settings.shares_port:
            check_port_free(host, port)
        names = list(self._add_services(self._server))
        health_pb2_grpc.add_HealthServicer_to_server(self.health_servicer, self._server)
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server, pool=_ReflectionPool()
        )
        try:
            self.port = self._add_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as exc:
            raise PortTaken(host, port, port_owner(port)) from exc
        await self._health.attach(self.health_servicer, names)
        await self._server.start()

    def _add_port(self, address: str) -> int:
        tls = self.settings.tls
        if tls is None:
            return int(self._server.add_insecure_port(address))
        own = [(tls.key.read_bytes(), tls.certificate.read_bytes())]
        asks = self.settings.asks_client_certificates
        ca = tls.ca.read_bytes() if asks else None
        return int(self._server.add_secure_port(address, grpc.ssl_server_credentials(own, ca, asks)))

    async def drain(self) -> None:
        await self._health.drain()
        await self._server.stop(self.settings.drain_seconds)


async def serve(
    server: RpcServer,
    *,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    before_listening: Callable[[], Awaitable[None]] | None = None,
    beside: "HttpServer | None" = None,
) -> None:
    """Serve until SIGTERM or SIGINT, drain, then call `on_drain`.

    before_listening: awaited before the port is bound. beside: a second server with the same lifetime.
    Raises: PortTaken, after `on_drain`.
    """
    settings = server.settings
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        if before_listening is not None:
            either = [asyncio.ensure_future(one) for one in (before_listening(), stop.wait())]
            done, left = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for one in left:
                one.cancel()
            for one in done:
                one.result()
        await server.start()
        try:
            if beside is not None:
                await beside.start()
            serve_metrics(settings.resolved_metrics_port, settings.host, tls=settings.tls)
            # Objects from start-up live as long as the process.
            gc.collect()
            gc.freeze()
            give_back_freed()
            log.info(
                "serving",
                port=server.port,
                http_port=beside.port if beside is not None else 0,
                metrics_port=settings.resolved_metrics_port,
            )
            await stop.wait()
            log.info("draining", seconds=settings.drain_seconds)
        finally:
            await asyncio.gather(server.drain(), *([beside.drain()] if beside is not None else []))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)
        if on_drain is not None:
            await on_drain()
    log.info("stopped")

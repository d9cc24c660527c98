"""Prometheus metrics and their endpoint.

Names begin with `freshet_<process>_`, times are in seconds, and no label is a user id.
"""

import sys
from collections.abc import Sequence
from typing import Any

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from services.platform.machine import PortTaken, port_owner
from services.platform.stream.follower import TurnClock
from services.platform.transport import Tls

log = structlog.get_logger()

# From a hash lookup to a timeout; the targets (60 ms a request, 1.5 s of freshness) lie in the middle.
LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5,
    1.0, 2.0, 2.5, 5.0, 10.0,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LARGE_BATCH_BUCKETS = (*BATCH_BUCKETS, 1024, 2048, 4096, 8192)


class Figures:
    """Creates metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS_S) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def turn_age(self, name: str, turns: TurnClock) -> None:
        """Export the age of a follower's last good turn as `name` (`..._age_seconds`).

        The number of failed turns since then is `..._failures`.
        """
        text = "Seconds since the follower's last good turn; grows while it stalls."
        self.gauge(name, text).set_function(lambda: turns.age_s)
        text = "Turns in a row that failed; not 0 while the follower waits for a dependency."
        self.gauge(f"{name.removesuffix('_age_seconds')}_failures", text).set_function(lambda: turns.failures)


def serve_metrics(
    port: int, host: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY, *, tls: Tls | None = None
) -> None:
    """Serve /metrics from a daemon thread; port 0 serves nothing. With `tls`, clients need a certificate of its CA.

    Raises: PortTaken.
    """
    if port == 0:
        return
    try:
        if tls is None:
            start_http_server(port, addr=host, registry=registry)
            return
        server, _ = start_http_server(
            port,
            addr=host,
            registry=registry,
            certfile=str(tls.certificate),
            keyfile=str(tls.key),
            client_cafile=str(tls.ca),
            client_auth_required=True,
        )
        # In the accepting thread, a client that sends no handshake would block all others.
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]
        server.handle_error = _say_refused  # type: ignore[method-assign,assignment]
    except OSError as exc:
        raise PortTaken(host, port, port_owner(port), purpose="metrics") from exc


def _say_refused(_: Any, client: Any) -> None:
    """Log one line instead of a traceback on stderr."""
    log.warning("metrics_request_failed", client=client[0], reason=repr(sys.exception()))

"""gRPC clients between processes; errors are FreshetErrors.

An outgoing call keeps the request id and the deadline of the incoming call.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from services.platform import errors, request_context
from services.platform.transport import Tls

if TYPE_CHECKING:
    import freshet_client

R = TypeVar("R")

# A channel reconnects within a second; the library's default backoff grows to two minutes. The second option limits the
# time of one attempt, because a peer under load takes more than 0.1 s to accept a connection.
PEER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
)
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *PEER_OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
]

# Ejects a replica whose calls mostly fail while others answer.
_OUTLIERS = {
    "interval": "1s",
    "baseEjectionTime": "5s",
    "maxEjectionTime": "30s",
    "maxEjectionPercent": 50,
    "failurePercentageEjection": {"threshold": 60, "minimumHosts": 2, "requestVolume": 3},
    "childPolicy": [{"round_robin": {}}],
}
# Retries a call on another replica if a terminating one did not answer it.
_RETRY = {
    "maxAttempts": 2,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.01s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}

_BY_STATUS: dict[grpc.StatusCode, type[errors.FreshetError]] = {
    kind.status: kind
    for kind in (
        errors.InvalidRequest,
        errors.NotFound,
        errors.PreconditionFailed,
        errors.Conflict,
        errors.Overloaded,
        errors.DependencyUnavailable,
        errors.DeadlineExceeded,
    )
}
# Unauthenticated and PermissionDenied are missing: a peer's rejection is not the caller's fault. A peer of another
# version answers UNIMPLEMENTED.
_BY_STATUS[grpc.StatusCode.UNIMPLEMENTED] = errors.PreconditionFailed
_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def channel(
    target: str,
    interceptors: Sequence[Any] = (),
    *,
    shares: bool = True,
    tls: Tls | None = None,
    service: str = "",
    health: str = "",
) -> grpc.aio.Channel:
    """Return a lazy channel to host:port, or to IP addresses with ports, separated by commas.

    Calls go round-robin to the addresses. If `service` is set, only addresses that report the health service `health`
    (default `service`) as SERVING get calls. An UNAVAILABLE call of `service` is retried once, so its methods must be
    idempotent.

    shares: reuse this process's connection to the address. tls: None means plaintext.
    """
    options = [*_CHANNEL_OPTIONS, ("grpc.service_config", _service_config(service, health or service))]
    if not shares:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if "," in target:
        target = f"{'ipv6' if target.startswith('[') else 'ipv4'}:{target}"
    chosen = list(interceptors) or None
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=chosen)
    return grpc.aio.secure_channel(target, _credentials(tls), options=options, interceptors=chosen)


def _service_config(service: str, health: str) -> str:
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if service:
        config["loadBalancingConfig"] = [{"outlier_detection_experimental": _OUTLIERS}]
        config["healthCheckConfig"] = {"serviceName": health}
        config["methodConfig"] = [{"name": [{"service": service}], "retryPolicy": _RETRY}]
        config["retryThrottling"] = {"maxTokens": 20, "tokenRatio": 0.1}
    return json.dumps(config)


def blocking_channel(target: str, tls: Tls | None = None) -> grpc.Channel:
    """Return a channel for a command or a probe."""
    return grpc.insecure_channel(target) if tls is None else grpc.secure_channel(target, _credentials(tls))


def gateway_client(target: str, *, is_background: bool = False) -> "freshet_client.Client":
    """Return a command's client, with the environment's API key and certificates. Raises: ValueError for unusable
    certificates; freshet_client.InvalidArgument.
    """
    import freshet_client

    from services.platform.config import environment_tls

    files = environment_tls()
    tls = None if files is None else freshet_client.Tls(ca=files.ca, certificate=files.certificate, key=files.key)
    key = os.environ.get("FRESHET_API_KEY") or None
    return freshet_client.Client(target, api_key=key, tls=tls, is_background=is_background)


def api_key_metadata() -> tuple[tuple[str, str], ...]:
    key = os.environ.get("FRESHET_API_KEY")
    return (("authorization", f"Bearer {key}"),) if key else ()


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes())


def translate(exc: grpc.RpcError, peer: str) -> errors.FreshetError:
    """Return the FreshetError for the call's status. A status without a FreshetError means that `peer` is broken."""
    return _translated(exc.code(), exc.details(), peer)


def translate_status(number: int, reason: str, peer: str) -> errors.FreshetError:
    return _translated(_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN), reason, peer)


def _translated(code: grpc.StatusCode, details: str | None, peer: str) -> errors.FreshetError:
    message = f"{peer}: {details or code.name}"
    kind = _BY_STATUS.get(code)
    if kind is None:
        return errors.DependencyUnavailable(f"{message} ({code.name})", retriable=False)
    return kind(message)


async def call(method: Any, request: Any, *, timeout_s: float, peer: str) -> Any:
    """Await a unary method within the current deadline, at most `timeout_s`. Raises: a FreshetError."""
    timeout = request_context.bounded_timeout(timeout_s)
    if timeout <= 0:
        raise errors.DeadlineExceeded(f"{peer}: no time left to call it")
    request_id = request_context.request_id.get()
    metadata = ((request_context.REQUEST_ID_HEADER, request_id),) if request_id else None
    try:
        return await method(request, timeout=timeout, metadata=metadata)
    except grpc.aio.AioRpcError as exc:
        raise translate(exc, peer) from exc

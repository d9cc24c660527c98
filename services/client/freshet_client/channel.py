"""A gateway's endpoint: target, options, TLS and API key, for both clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from freshet_client.errors import InvalidArgument

_ALLOWED = "host:port, such as 127.0.0.1:50050, [::1]:50050 or dns:///gateway:50050; commas between IP addresses"
# The client reconnects to a restarted gateway within a second; gRPC's default backoff grows to two minutes.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


@dataclass(frozen=True)
class Tls:
    """Encrypt the connection. Fields are PEM, as bytes or a file's path.

    `ca`: trusted authorities; None means gRPC's list. `certificate`, `key`: the client's, if the gateway requires them.
    """

    ca: bytes | str | Path | None = None
    certificate: bytes | str | Path | None = None
    key: bytes | str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials for a channel. Raises: InvalidArgument."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("tls.certificate and tls.key: one of them is missing; allowed: both or neither")
        ca, key, certificate = (_pem(name, getattr(self, name)) for name in ("ca", "key", "certificate"))
        return grpc.ssl_channel_credentials(ca, key, certificate)


def _pem(name: str, value: bytes | str | Path | None) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    try:
        return Path(value).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"tls.{name}={str(value)!r} allowed: a PEM file ({error.strerror})") from error


@dataclass(frozen=True)
class Endpoint:
    """A checked target with its channel's parameters."""

    target: str
    options: Sequence[tuple[str, Any]]
    metadata: Sequence[tuple[str, str]]
    tls: Tls | None

    @classmethod
    def of(cls, target: str, *, api_key: str | None, tls: Tls | None, is_background: bool) -> Endpoint:
        """Make an endpoint. Raises: InvalidArgument for an invalid target or API key."""
        checked, hosts = _checked(target)
        options: list[tuple[str, Any]] = [*_OPTIONS, ("grpc.service_config", service_config())]
        if all(_is_loopback(host) for host in hosts):
            # An HTTP proxy cannot reach this machine's loopback.
            options.append(("grpc.enable_http_proxy", 0))
        metadata = []
        if api_key is not None:
            if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
                raise InvalidArgument("api_key=<hidden> allowed: printable ASCII without spaces")
            metadata.append(("authorization", f"Bearer {api_key}"))
        if is_background:
            metadata.append(("freshet-priority", "background"))
        return cls(checked, options, metadata, tls)


def service_config() -> str:
    """The published gRPC service config: retries, and the largest request."""
    return (files("freshet_client") / "service_config.json").read_text(encoding="utf-8")


def _checked(target: str) -> tuple[str, list[str]]:
    """Return the target in gRPC's syntax and its hosts. `unix:` and `xds:` count as loopback."""
    if not isinstance(target, str) or not target or target.startswith(("http:", "https:", "grpc:")) or " " in target:
        raise InvalidArgument.of("target", target, _ALLOWED)
    if target.startswith(("unix:", "xds:", "ipv4:", "ipv6:")):
        return target, [_host(one) for one in target.partition(":")[2].split(",")] if target[:2] == "ip" else ["::1"]
    hosts = [_host(one) for one in target.removeprefix("dns:///").split(",")]
    if len(hosts) > 1:
        return f"{'ipv6' if ':' in hosts[0] else 'ipv4'}:{target}", hosts
    return target, hosts


def _host(text: str) -> str:
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (
        not host
        or "/" in host
        or not port.isdecimal()
        or not 0 < int(port) < 65536
        or (":" in host and not is_bracketed)
    ):
        raise InvalidArgument.of("target", text, _ALLOWED)
    return host[1:-1] if is_bracketed else host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Check a process's gRPC health once.

`python -m services.platform.rpc.health_check HOST:PORT` exits with 0, or with 1 and the reason on stderr. With --alive,
any answer is enough. It runs every ten seconds in each container, so it loads the settings only for certificates (0.12
s instead of 0.29 s).
"""

import os
import sys
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from services.platform.transport import Tls

# Trailing metadata with the reason why a process is not ready.
WHY_NOT_READY = "freshet-not-ready"


def probe_grpc(address: str, tls: "Tls | None" = None, *, alive_is_enough: bool = False) -> str | None:
    """Return None if the process is SERVING, else the reason.

    alive_is_enough: accept NOT_SERVING.
    """
    with _channel(address, tls) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError as exc:
            return f"no answer at {address} ({exc.code().name})"
    if alive_is_enough or reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    problem = f"{address} answers {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"
    why_not = dict(call.trailing_metadata() or ()).get(WHY_NOT_READY)
    return f"{problem}: {why_not}" if why_not else problem


def _channel(address: str, tls: "Tls | None") -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
    from services.platform.rpc.client import blocking_channel

    return blocking_channel(address, tls)


def _environment_tls() -> "Tls | None":
    if not any(name.startswith("FRESHET_TLS_") for name in os.environ):
        return None
    from services.platform.config import environment_tls

    return environment_tls()


def main(arguments: list[str]) -> int:
    address, *flags = arguments
    problem = probe_grpc(address, tls=_environment_tls(), alive_is_enough=flags == ["--alive"])
    if problem is not None:
        sys.stderr.write(problem + "\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

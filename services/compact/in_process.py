"""Call a servicer directly instead of over gRPC, with the same messages and errors."""

import asyncio
import time
from typing import Any

import structlog

from services.platform import errors, request_context
from services.platform.rpc import client as rpc_client

log = structlog.get_logger()


class InProcess:
    """Implements the gateway's `Peer`. servicer: its methods get None as context."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """Call the servicer's method as `rpc_client.call` would; `stub` is ignored."""
        timeout = request_context.bounded_timeout(timeout_s)
        if timeout <= 0:
            raise errors.DeadlineExceeded(f"{peer}: no time left to call it")
        deadline = request_context.deadline.set(time.monotonic() + timeout)
        try:
            async with asyncio.timeout(timeout):
                return await getattr(self._servicer, method)(request, None)
        except TimeoutError as exc:
            raise errors.DeadlineExceeded(f"{peer}: no answer within {1000 * timeout:.0f} ms") from exc
        except errors.FreshetError as exc:
            raise rpc_client.translate_status(exc.status.value[0], exc.message, peer) from exc
        except Exception as exc:
            log.error("call_failed", peer=peer, method=method, exc_info=exc)
            raise errors.DependencyUnavailable(f"{peer}: internal error (INTERNAL)", retriable=False) from exc
        finally:
            request_context.deadline.reset(deadline)

    async def close(self) -> None:
        """Do nothing: the servicer's creator closes its resources."""

"""What travels with a call through a process: its request id and its deadline.

The gRPC server sets both per call, the gRPC client passes them on. Handlers may read them; nothing here knows gRPC.
"""

import secrets
import time
from contextvars import ContextVar

REQUEST_ID_HEADER = "x-request-id"

request_id: ContextVar[str] = ContextVar("request_id", default="")
# On the clock of `time.monotonic()`, in seconds; None when the caller set no deadline.
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)

# The id of the caller's API key; empty where none is asked for.
caller: ContextVar[str] = ContextVar("caller", default="")
# What that key is for; None where none is asked for, so that everybody may do everything.
roles: ContextVar[frozenset[str] | None] = ContextVar("roles", default=None)


def new_request_id() -> str:
    """Sixteen hex digits, unique enough to find one request in the logs."""
    return secrets.token_hex(8)


def remaining_seconds() -> float | None:
    """Seconds until the current call's deadline (may be negative), or None without one."""
    at = deadline.get()
    return None if at is None else at - time.monotonic()


def bounded_timeout(timeout_s: float) -> float:
    """The smaller of `timeout_s` and what is left of the current call's deadline."""
    remaining = remaining_seconds()
    return timeout_s if remaining is None else min(timeout_s, remaining)

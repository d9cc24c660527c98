"""Context of a call in a process: request id, deadline and caller.

The gRPC server sets it per call, the gRPC client passes it on. Handlers may read it. gRPC is not known here.
"""

import secrets
import time
from contextvars import ContextVar

REQUEST_ID_HEADER = "x-request-id"

request_id: ContextVar[str] = ContextVar("request_id", default="")
# On the clock of `time.monotonic()`, in seconds; None without a deadline.
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)

# The id of the caller's API key; "" if keys are not required.
caller: ContextVar[str] = ContextVar("caller", default="")
# The roles of that key; None if keys are not required, so that every call is allowed.
roles: ContextVar[frozenset[str] | None] = ContextVar("roles", default=None)


def new_request_id() -> str:
    """Return sixteen hex digits, unique enough to find one request in the logs."""
    return secrets.token_hex(8)


def remaining_seconds() -> float | None:
    """Return the seconds until the current call's deadline (may be negative), or None without one."""
    at = deadline.get()
    return None if at is None else at - time.monotonic()


def bounded_timeout(timeout_s: float) -> float:
    """Return the smaller of `timeout_s` and the time until the current call's deadline."""
    remaining = remaining_seconds()
    return timeout_s if remaining is None else min(timeout_s, remaining)

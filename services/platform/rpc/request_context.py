"""A call's request id, deadline and caller."""

import secrets
import time
from contextvars import ContextVar

REQUEST_ID_HEADER = "x-request-id"

request_id: ContextVar[str] = ContextVar("request_id", default="")
# On the clock of `time.monotonic()`, in seconds.
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)

# The API key's id; "" if keys are not required.
caller: ContextVar[str] = ContextVar("caller", default="")
# That key's roles; None if keys are not required.
roles: ContextVar[frozenset[str] | None] = ContextVar("roles", default=None)


def new_request_id() -> str:
    return secrets.token_hex(8)


def remaining_seconds() -> float | None:
    """Return the seconds until the deadline, maybe negative; None without one."""
    at = deadline.get()
    return None if at is None else at - time.monotonic()


def bounded_timeout(timeout_s: float) -> float:
    remaining = remaining_seconds()
    return timeout_s if remaining is None else min(timeout_s, remaining)

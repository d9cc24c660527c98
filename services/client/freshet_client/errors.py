"""All errors of this package.

An error is a gateway's status, or `InvalidArgument` for a request that the client refuses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freshet_client.answers import Receipt

# The gateway's format: "k=0 allowed: 1-1000", or "page_token: altered; allowed: ...".
_REFUSAL = re.compile(
    r"(?P<field>[A-Za-z_][\w.]*(?:\[[^\]]*\][\w.]*)*)(?:=(?P<value>.*?)|:.*?;)? allowed: (?P<allowed>.*)", re.DOTALL
)
_CONNECTING = ("connect", "refused", "unreachable", "dns", "socket closed", "resolution", "resolver")


class FreshetError(Exception):
    """Base of all errors of this package.

    `status` is the gRPC status code's name. `retriable`: the same call may succeed later; `retry_after_s`: the
    gateway's delay, or None. `request_id`: the call's id in the gateway's log, empty if no gateway answered.
    `target`: the called address. `receipts`: the receipts of a batch's acknowledged events.
    """

    status = "UNKNOWN"
    retriable = False

    def __init__(self, message: str, *, retry_after_s: float | None = None, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.target = ""
        self.receipts: tuple[Receipt, ...] = ()


class InvalidArgument(FreshetError):
    """The request is wrong, in any state of the gateway. `field`, `value` and `allowed` are texts, empty if unknown."""

    status = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, retry_after_s: float | None = None, request_id: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s, request_id=request_id)
        found = _REFUSAL.fullmatch(message)
        self.field = found["field"] if found else ""
        self.value = (found["value"] or "") if found else ""
        self.allowed = found["allowed"] if found else ""

    @classmethod
    def of(cls, field: str, value: Any, allowed: str) -> InvalidArgument:
        """Name a field, its value (cut to 80 characters) and what is allowed."""
        shown = repr(value)
        return cls(f"{field}={shown if len(shown) <= 80 else shown[:77] + '...'} allowed: {allowed}")


class TooLarge(InvalidArgument):
    """The request or the answer exceeds the largest message (4 MB)."""

    status = "RESOURCE_EXHAUSTED"


class Unauthenticated(FreshetError):
    """The API key is missing, unknown or has expired."""

    status = "UNAUTHENTICATED"


class PermissionDenied(FreshetError):
    """The API key's roles do not allow the method, or a token or exposure is another user's."""

    status = "PERMISSION_DENIED"


class NotFound(FreshetError):
    """A named item, version set or exposure does not exist. New users and events with unknown items are no error."""

    status = "NOT_FOUND"


class PreconditionFailed(FreshetError):
    """Something must be done first, such as making a new list."""

    status = "FAILED_PRECONDITION"


class Unsupported(FreshetError):
    """The gateway does not have the method: it is older, or no gateway."""

    status = "UNIMPLEMENTED"


class Conflict(FreshetError):
    """Somebody else changed the same thing: read again, then retry."""

    status = "ABORTED"
    retriable = True


class Overloaded(FreshetError):
    """The gateway has too much to do, or the key's rate is used up."""

    status = "RESOURCE_EXHAUSTED"
    retriable = True


class Unavailable(FreshetError):
    """The gateway cannot be reached or cannot answer. A write may have happened: repeat it with its event id."""

    status = "UNAVAILABLE"
    retriable = True


class Unreachable(Unavailable):
    """`why`: "nothing" answers, or the protocols differ ("TLS", "HTTP/1.1")."""

    def __init__(self, message: str, why: str = "nothing") -> None:
        super().__init__(message)
        self.why = why


class DeadlineExceeded(FreshetError):
    """No answer came within `timeout_s`. A write may have happened: repeat it with its event id."""

    status = "DEADLINE_EXCEEDED"
    retriable = True


class InternalError(FreshetError):
    """The gateway failed or its answer could not be read. The gateway's log has the reason under `request_id`."""

    status = "INTERNAL"


# TooLarge and Unreachable are no direct subclasses: each has another error's status.
_BY_STATUS = {kind.status: kind for kind in FreshetError.__subclasses__()} | {"OUT_OF_RANGE": InvalidArgument}


def of_call(error: Any, *, target: str, timeout_s: float | None = None) -> FreshetError:
    """Convert gRPC's error. timeout_s: the call's deadline, if it had one."""
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    status, details = error.code().name, str(error.details() or error.code().name)
    request_id, after_ms = metadata.get("x-request-id", ""), metadata.get("retry-after-ms", "")
    if status == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        what = "answer" if details.lower().startswith("received") else "request"
        found: FreshetError = TooLarge(f"the {what} is too large for {target}: {details}")
    elif status == "DEADLINE_EXCEEDED":
        why = f": {details}" if request_id else ""
        within = "" if timeout_s is None else f" within {timeout_s * 1000:.0f} ms"
        found = DeadlineExceeded(f"{target} did not answer{within}{why}")
    elif request_id:
        found = _BY_STATUS.get(status, InternalError)(details)
    else:
        # This process's gRPC made the error.
        found = _of_grpc(status, details, target)
    found.request_id, found.target = request_id, target
    found.retry_after_s = int(after_ms) / 1000 if after_ms.isdecimal() else None
    return found


def _of_grpc(status: str, details: str, target: str) -> FreshetError:
    lowered = details.lower()
    if status == "UNIMPLEMENTED":
        return Unsupported(f"{target} does not have this method, it is older than this client or no gateway: {details}")
    if status == "UNAVAILABLE":
        if "handshake" in lowered or "ssl" in lowered:
            return Unreachable(f"{target} and this client do not believe each other's certificates: {details}", "TLS")
        if "http1.x" in lowered:
            message = f"{target} speaks HTTP/1.1, not gRPC; gRPC's port is the JSON port's less 30: {details}"
            return Unreachable(message, "HTTP/1.1")
        if any(sign in lowered for sign in _CONNECTING):
            return Unreachable(f"nothing answers at {target}: {details}")
        return Unavailable(f"the connection to {target} was lost: {details}")
    return _BY_STATUS.get(status, InternalError)(details)

"""The errors, as one tree: every error of this package is a `FreshetError`.

A gateway's status becomes one of these. A request that the client itself refuses raises `InvalidArgument`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freshet_client.answers import Receipt

# The gateway's format: "k=0 allowed: 1-1000", or without a value: "page_token: altered; allowed: ...".
_REFUSAL = re.compile(
    r"(?P<field>[A-Za-z_][\w.]*(?:\[[^\]]*\][\w.]*)*)(?:=(?P<value>.*?)|:.*?;)? allowed: (?P<allowed>.*)", re.DOTALL
)
_CONNECTING = ("connect", "refused", "unreachable", "dns", "socket closed", "resolution", "resolver")


class FreshetError(Exception):
    """Base of all errors of this package.

    `message` says what happened. `status` is the gRPC status code's name. `retriable`: the same call may succeed later;
    `retry_after_s`: the delay that the gateway asks for, or None. `request_id` identifies the call in the gateway's
    log; it is empty if no gateway answered. `target`: the called address, empty if nothing was called. `receipts`:
    those of a batch's acknowledged events.
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
    """The request is wrong in any state of the gateway. `field`, `value` and `allowed` are texts, empty if unknown."""

    status = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, retry_after_s: float | None = None, request_id: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s, request_id=request_id)
        found = _REFUSAL.fullmatch(message)
        self.field = found["field"] if found else ""
        self.value = (found["value"] or "") if found else ""
        self.allowed = found["allowed"] if found else ""

    @classmethod
    def of(cls, field: str, value: Any, allowed: str) -> InvalidArgument:
        """The error that names a field, its value (cut to 80 characters) and what is allowed."""
        shown = repr(value)
        return cls(f"{field}={shown if len(shown) <= 80 else shown[:77] + '...'} allowed: {allowed}")


class TooLarge(InvalidArgument):
    """The request or the answer is larger than a message may be (4 MB)."""

    status = "RESOURCE_EXHAUSTED"


class Unauthenticated(FreshetError):
    """The API key is missing, unknown or has expired."""

    status = "UNAUTHENTICATED"


class PermissionDenied(FreshetError):
    """The API key's roles do not allow the method, or a token or an exposure is another user's."""

    status = "PERMISSION_DENIED"


class NotFound(FreshetError):
    """An item, a version set or an exposure that the call names does not exist. New users and events with unknown items
    are no error."""

    status = "NOT_FOUND"


class PreconditionFailed(FreshetError):
    """The request is valid, but something must be done first. A further page of an ended list is such a request."""

    status = "FAILED_PRECONDITION"


class Unsupported(FreshetError):
    """The gateway does not have the method: it is older than this client, or no gateway."""

    status = "UNIMPLEMENTED"


class Conflict(FreshetError):
    """Somebody else changed the same thing at the same time: read again, then retry."""

    status = "ABORTED"
    retriable = True


class Overloaded(FreshetError):
    """The gateway refused the call early because it has too much to do, or the key's rate is used up."""

    status = "RESOURCE_EXHAUSTED"
    retriable = True


class Unavailable(FreshetError):
    """The gateway cannot be reached, or cannot do this now. A write may have happened: repeat it with its event id."""

    status = "UNAVAILABLE"
    retriable = True


class Unreachable(Unavailable):
    """No gateway was reached. `why`: "nothing" if nothing answers, "TLS" or "HTTP/1.1" if the protocols differ."""

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


_BY_STATUS: dict[str, type[FreshetError]] = {
    "OUT_OF_RANGE": InvalidArgument,
    **{
        kind.status: kind
        for kind in (
            InvalidArgument,
            Unauthenticated,
            PermissionDenied,
            NotFound,
            PreconditionFailed,
            Unsupported,
            Conflict,
            Overloaded,
            Unavailable,
            DeadlineExceeded,
        )
    },
}


def of_call(error: Any, *, target: str, timeout_s: float) -> FreshetError:
    """Convert gRPC's error of a call to `target`."""
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    status, details = error.code().name, str(error.details() or error.code().name)
    request_id, after_ms = metadata.get("x-request-id", ""), metadata.get("retry-after-ms", "")
    if status == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        what = "answer" if details.lower().startswith("received") else "request"
        found: FreshetError = TooLarge(f"the {what} is too large for {target}: {details}")
    elif status == "DEADLINE_EXCEEDED":
        why = f": {details}" if request_id else ""
        found = DeadlineExceeded(f"{target} did not answer within {timeout_s * 1000:.0f} ms{why}")
    elif request_id:
        found = _BY_STATUS.get(status, InternalError)(details)
    else:
        # The error comes from this process's gRPC, not from a gateway.
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

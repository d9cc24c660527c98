"""The one tree of errors that cross a boundary, each with its gRPC status and whether a retry can help.

Adapters translate library exceptions to the most specific class here (`raise ... from exc`); `rpc_server` maps the
tree to status codes and `rpc_client` maps status codes back. A new user or an unknown item is not an error.
"""

from typing import Any, ClassVar, Self

import grpc


class FreshetError(Exception):
    """Base of the tree. `status` is what a gRPC caller sees; `retriable` says whether trying again can help.

    `retry_after_ms`, when set, goes out as trailing metadata `retry-after-ms` and `grpc-retry-pushback-ms`.
    """

    status: ClassVar[grpc.StatusCode]
    default_retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, retriable: bool | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retriable = self.default_retriable if retriable is None else retriable
        self.retry_after_ms = retry_after_ms


class InvalidRequest(FreshetError):
    """Wrong whatever our state: the caller must change the request."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    @classmethod
    def of(cls, field: str, value: Any, allowed: str) -> Self:
        """Name the field, the value found (cut to 80 characters) and the allowed range."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return cls(f"{field}={shown} allowed: {allowed}")


class Unauthenticated(FreshetError):
    """Nobody that we know: no API key, an unknown one, or one that has expired."""

    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(FreshetError):
    """We know the caller, who may not: the roles do not hold this method, or what is named is another user's."""

    status = grpc.StatusCode.PERMISSION_DENIED


class NotFound(FreshetError):
    """A named version or bundle is absent."""

    status = grpc.StatusCode.NOT_FOUND


class PreconditionFailed(FreshetError):
    """Valid, but someone must act first (an index and a model that disagree on d, say)."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class Conflict(FreshetError):
    """Lost a version race: read again, then retry."""

    status = grpc.StatusCode.ABORTED
    default_retriable = True


class Overloaded(FreshetError):
    """Our queue or permit pool is full, or the caller's own rate is used up; refused early."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_retriable = True


class DependencyUnavailable(FreshetError):
    """Redis, Kafka, the inference server or another process is down, or we are warming up."""

    status = grpc.StatusCode.UNAVAILABLE
    default_retriable = True


class DeadlineExceeded(FreshetError):
    """The caller's time budget is spent."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    default_retriable = True

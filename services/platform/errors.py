"""Errors that cross a boundary, each with its gRPC status and whether a retry can help.

Adapters raise them from library exceptions; `rpc/guard.py` and `rpc/client.py` map them to status codes and back. A new
user or an unknown item is not an error.
"""

from typing import Any, ClassVar, Self

import grpc


class FreshetError(Exception):
    """Base of the tree. retriable: whether a retry can help. retry_after_ms: sent as metadata."""

    status: ClassVar[grpc.StatusCode]
    default_retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, retriable: bool | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retriable = self.default_retriable if retriable is None else retriable
        self.retry_after_ms = retry_after_ms


class InvalidRequest(FreshetError):
    """The request is invalid, whatever the server's state."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    @classmethod
    def of(cls, field: str, value: Any, allowed: str) -> Self:
        """Return an error with field, value (cut to 80 characters) and what is allowed."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return cls(f"{field}={shown} allowed: {allowed}")


class Unauthenticated(FreshetError):
    """The API key is missing, unknown or expired."""

    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(FreshetError):
    """The caller's roles exclude the method, or the request names another user's data."""

    status = grpc.StatusCode.PERMISSION_DENIED


class NotFound(FreshetError):
    """A named version or bundle is absent."""

    status = grpc.StatusCode.NOT_FOUND


class PreconditionFailed(FreshetError):
    """The request is valid, but the caller or an operator must act before it can succeed."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class Conflict(FreshetError):
    """Another write came first: read again, then retry."""

    status = grpc.StatusCode.ABORTED
    default_retriable = True


class Overloaded(FreshetError):
    """The queue, the concurrency limit or the caller's rate limit is used up."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_retriable = True


class DependencyUnavailable(FreshetError):
    """Redis, Kafka, the inference server or a process is down or starting."""

    status = grpc.StatusCode.UNAVAILABLE
    default_retriable = True


class DeadlineExceeded(FreshetError):
    """The caller's time budget is spent."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    default_retriable = True

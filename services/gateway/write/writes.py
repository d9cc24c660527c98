"""The time limit of a write to the stream, and the retry hint."""

from services.platform.errors import DeadlineExceeded
from services.platform.rpc import request_context

RETRY_AFTER_MS = 500
_ANSWER_RESERVE_S = 0.05


def write_timeout_s(limit_s: float, what: str) -> float:
    """Return at most `limit_s`, so that the caller still learns that the stream is unavailable.

    Raises: DeadlineExceeded with too little time left to write `what`.
    """
    remaining = request_context.remaining_seconds()
    timeout_s = limit_s if remaining is None else min(limit_s, remaining - _ANSWER_RESERVE_S)
    if timeout_s <= 0:
        raise DeadlineExceeded(f"too little of the deadline is left to write {what}")
    return timeout_s

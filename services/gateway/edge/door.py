"""What `services.platform.rpc.guard` applies to each RPC: authentication and authorisation by API keys, the audit log
(`Door`), and limits of concurrent calls (`admissions`).

A key is found by its secret's digest, so response times reveal nothing. Keys may change; calls in progress continue.

The audit log has one JSON object per line, in a file or on stderr: every call of a method in `AUDITED`, and a limited
number of refusals, so that they cannot fill the disk. A line has no secret and no text of the caller, such as a user
id, an item or a query.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import structlog

from services.gateway.edge.api_keys import ApiKey, digest, read_keys
from services.gateway.edge.roles import AUDITED, ROLES_OF
from services.platform import request_context
from services.platform.config import ConfigError
from services.platform.errors import FreshetError, Overloaded, PermissionDenied, Unauthenticated
from services.platform.rpc.admission import Admission

log = structlog.get_logger()

# Most refusals logged per key, status and window of WINDOW_S. A line at the window's end counts the other refusals.
# Callers without a known key count as one caller.
MAX_REFUSALS, WINDOW_S = 20, 60.0


@dataclass(slots=True)
class _Window:
    ends_s: float
    written: int = 0
    left_out: int = 0


class AuditLog:
    """Writes lines to one file. Call `end_windows` every second, and before the process ends."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Check that the file (None: stderr) can be written. Raises: ConfigError."""
        self._path = path
        if path is not None:
            try:
                self._append("")
            except OSError as exc:
                raise ConfigError(f"FRESHET_AUDIT_LOG='{path}' allowed: a file to append to ({exc.strerror})") from exc
        self._clock = clock
        self._windows: dict[tuple[str, str], _Window] = {}

    def call(self, key_id: str, method: str, peer: str, status: str) -> None:
        self._write(key=key_id, method=method, status=status, peer=peer)

    def refusal(self, key_id: str, method: str, peer: str, status: str, reason: str) -> None:
        """Write or count a refusal. key_id: empty without a known key."""
        window = self._windows.get((key_id, status))
        if window is None:
            window = self._windows[key_id, status] = _Window(self._clock() + WINDOW_S)
        if window.written == MAX_REFUSALS:
            window.left_out += 1
            return
        window.written += 1
        self._write(key=key_id, method=method, status=status, peer=peer, reason=reason)

    def end_windows(self, *, now: bool = False) -> None:
        """Close the ended windows (all windows if `now`), and write how many refusals each omitted."""
        time_s = self._clock()
        for (key_id, status), window in list(self._windows.items()):
            if now or time_s >= window.ends_s:
                del self._windows[key_id, status]
                if window.left_out:
                    self._write(key=key_id, status=status, left_out=window.left_out)

    def _write(self, **fields: str | int) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._append(json.dumps({"time": stamp, **fields}) + "\n")
        except OSError as exc:
            # The call continues, and the process's log gets the line.
            log.error("audit_log_unwritable", problem=exc.strerror, **fields)

    def _append(self, text: str) -> None:
        if self._path is None:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        # The file is opened each time, so that it may be moved away.
        opened = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        with os.fdopen(opened, "a", encoding="utf-8") as file:
            file.write(text)


_SCHEME = "bearer "
_LOOK_EVERY_S = 1.0


class TokenBucket:
    """A sustained rate of `per_second` calls, with bursts of up to `burst`. It stores only the time at which the bucket
    will be full.
    """

    __slots__ = ("_full_s", "limits")

    def __init__(self, per_second: float, burst: int) -> None:
        self.limits = (per_second, burst)
        self._full_s = 0.0

    def take(self, now_s: float) -> float:
        """Count a call and return 0, or return the seconds until one may be made."""
        per_second, burst = self.limits
        full_s = max(self._full_s, now_s)
        wait_s = full_s - (burst - 1) / per_second - now_s
        # A shorter wait is a rounding error.
        if wait_s > 1e-6:
            return wait_s
        self._full_s = full_s + 1 / per_second
        return 0.0


class _KnownKey:
    """A key, and what a call checks: expiry time, allowed methods, rate."""

    __slots__ = ("expires_s", "key", "methods", "rate")

    def __init__(self, key: ApiKey, before: "_KnownKey | None") -> None:
        self.key = key
        self.expires_s = float("inf") if key.expires is None else key.expires.timestamp()
        self.methods = frozenset(method for method, roles in ROLES_OF.items() if roles & key.roles)
        self.rate: TokenBucket | None = None
        if key.requests_per_second is not None:
            limits = (key.requests_per_second, key.burst or max(1, int(key.requests_per_second)))
            self.rate = TokenBucket(*limits)
            if before is not None and before.rate is not None and before.rate.limits == self.rate.limits:
                # A key with unchanged limits keeps its token bucket.
                self.rate = before.rate


class Door:
    """Admits a call or raises; writes rejections and calls of `AUDITED` methods to the audit log."""

    def __init__(
        self,
        keys: Iterable[ApiKey],
        audit: AuditLog,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.audit = audit
        self._clock, self._wall_clock = clock, wall_clock
        self._by_digest: dict[bytes, _KnownKey] = {}
        self.set_keys(keys)

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """Replace the valid keys."""
        before = {holder.key.id: holder for holder in self._by_digest.values()}
        self._by_digest = {bytes.fromhex(key.sha256): _KnownKey(key, before.get(key.id)) for key in keys}

    def knows(self, metadata: Any) -> bool:
        """Return whether the metadata contain a known key, expired or not."""
        return digest(_secret_of(metadata)) in self._by_digest

    def __call__(self, method: str, context: Any) -> Callable[[str], None] | None:
        """Return a function that audits the final status; None for a method that is not audited.

        Raises: Unauthenticated, PermissionDenied; Overloaded, with the time to wait.
        """
        secret = _secret_of(context.invocation_metadata())
        holder = self._by_digest.get(digest(secret))
        if holder is None:
            why = "unknown API key" if secret else "no API key: send the metadata authorization: Bearer <key>"
            raise self._refused("", method, context, Unauthenticated(why))
        key = holder.key
        if self._wall_clock() >= holder.expires_s:
            raise self._refused(key.id, method, context, Unauthenticated(f"API key {key.id} has expired"))
        if method not in holder.methods:
            wanted = " or ".join(sorted(ROLES_OF.get(method, ()))) or "that nobody has"
            why = f"{method} needs the role {wanted}; API key {key.id} has {', '.join(sorted(key.roles))}"
            raise self._refused(key.id, method, context, PermissionDenied(why))
        if holder.rate is not None and (wait_s := holder.rate.take(self._clock())):
            why = f"API key {key.id} may make {key.requests_per_second:g} calls a second"
            raise self._refused(key.id, method, context, Overloaded(why, retry_after_ms=ceil(wait_s * 1000)))
        request_context.caller.set(key.id)
        request_context.roles.set(key.roles)
        return partial(self.audit.call, key.id, method, context.peer()) if method in AUDITED else None

    def _refused(self, key_id: str, method: str, context: Any, error: FreshetError) -> FreshetError:
        self.audit.refusal(key_id, method, context.peer(), error.status.name, error.message)
        return error


@contextlib.asynccontextmanager
async def opened_door(path: Path | None, audit_log: Path | None) -> AsyncIterator[Door | None]:
    """Yield a door that applies changes of the keys file; None without a path.

    Raises: ConfigError for an unusable keys file or audit log.
    """
    if path is None:
        log.warning(
            "no_api_keys", reason="FRESHET_API_KEYS names no file: everybody on this machine may call every method"
        )
        yield None
        return
    door = Door(await asyncio.to_thread(read_keys, path), AuditLog(audit_log))
    following = asyncio.create_task(follow_keys(path, door))
    try:
        yield door
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        door.audit.end_windows(now=True)


async def follow_keys(path: Path, door: Door) -> None:
    """Read the file again whenever it changed. While it is invalid, the earlier keys stay valid."""
    seen: tuple[int, ...] = ()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        door.audit.end_windows()
        found = await asyncio.to_thread(_look, path)
        if found == seen:
            continue
        seen = found
        try:
            keys = await asyncio.to_thread(read_keys, path)
        except Exception as exc:  # Otherwise this task would end, and no later change would apply.
            reason = str(exc) if isinstance(exc, ConfigError) else type(exc).__name__
            log.error("api_keys_refused", reason=reason, advice="the earlier keys stay valid")
            continue
        door.set_keys(keys)
        log.info("api_keys_read", keys=len(keys))


def _look(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as exc:
        return (exc.errno or 0,)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _secret_of(metadata: Any) -> bytes:
    for name, value in metadata or ():
        if name == "authorization":
            if isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
                return value[len(_SCHEME) :].strip().encode()
            break
    return b""


# A median latency up to these values is not overload (`Limit`).
QUICK_S, QUICK_WRITE_S, QUICK_SEARCH_S = 0.04, 0.05, 0.1


def admissions() -> dict[str, Admission]:
    """Return each RPC's limit: adaptive for recommendations, searches and writes, fixed for all others."""
    # Two reads at a time are some 200 a second.
    reads = Admission("recommendations", smallest=2, largest=512, surplus=32, quick_s=QUICK_S)
    # A write mostly waits for Kafka. Many concurrent writes after a short stall of the machine are not overload.
    writes = Admission("writes", smallest=128, largest=2048, smallest_yielding=2, quick_s=QUICK_WRITE_S)
    streams = Admission("streams", smallest=128, largest=128, per_caller=64)
    return {
        **dict.fromkeys(ROLES_OF, Admission("administration", smallest=32, largest=32)),
        "Recommend": reads,
        # A search has no cheaper fallback: up to 32 wait (60 ms of work on two cores), further ones are refused.
        "Search": Admission("searches", smallest=4, largest=128, queue=32, quick_s=QUICK_SEARCH_S),
        "RecordInteractions": writes,
        "RecordImpressions": writes,
        "UndoInteraction": writes,
        "StreamInteractions": streams,
        "TailInteractions": Admission("tails", smallest=8, largest=8, per_caller=4),
    }

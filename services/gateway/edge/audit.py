"""The audit log: one JSON object per line, in a file or on stderr.

It has every call of a method in `AUDITED`, and a limited number of refusals, so that they cannot fill the disk. A line
has no secret and no text of the caller, such as a user id, an item or a query.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from services.platform.config import ConfigError

log = structlog.get_logger()

# Refusals per key, status and window of so many seconds. A line at the window's end counts the others. Callers without
# a known key count as one.
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
        """Close the ended windows (with `now`, all), and write how many refusals each omitted."""
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
            # The call goes on; the line is not lost.
            log.error("audit_log_unwritable", problem=exc.strerror, **fields)

    def _append(self, text: str) -> None:
        if self._path is None:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        # Opened each time, so that the file may be moved away.
        opened = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        with os.fdopen(opened, "a", encoding="utf-8") as file:
            file.write(text)

"""Detached processes, found by pid files.

A pid file has the creation time too, so that a recycled id is never signalled. Each child leads its process group.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from services.contracts.processes import FULL_CPU_SHARES
from services.stack.errors import StackError

_WEIGHT_PER_NICENESS = 1.25  # as in Linux
_CREATION_TOLERANCE_S = 0.05
# Children outlive a Stack object; their handles are kept to reap them.
_handles: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command to run. `environment` is the whole environment; the child inherits no other variables."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path


class Children:
    """The processes of one stack, by name."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        # The launcher must reap the processes it started.
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, name: str, launch: Launch, log: Path) -> psutil.Process:
        """Start `name` detached; output goes to `log`.

        Raises: StackError if it is running, or the program cannot be executed.
        """
        running = self.find(name)
        if running is not None:
            raise StackError(name, f"runs already (pid {running.pid})")
        argv = list(launch.argv)
        try:
            with log.open("ab") as output:
                child = subprocess.Popen(
                    argv,
                    env=dict(launch.environment),
                    cwd=launch.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as exc:
            raise StackError(name, f"cannot execute {launch.argv[0]}: {exc}") from exc
        self._started[name] = child
        _handles.append(child)
        process = psutil.Process(child.pid)
        noted = _PidFile(pid=child.pid, created=process.create_time(), argv=argv)
        self._path(name).write_text(json.dumps(asdict(noted)), encoding="utf-8")
        return process

    def lower_priority(self, name: str, cpu_shares: int) -> None:
        """Give the process and its session the niceness of `cpu_shares`."""
        process = self.find(name)
        if process is not None and cpu_shares < FULL_CPU_SHARES:
            _lower_priority(process.pid, cpu_shares)

    def find(self, name: str) -> psutil.Process | None:
        """Return the running process of that name, or None."""
        child = self._started.get(name)
        if child is not None and child.poll() is not None:
            del self._started[name]
            _handles.remove(child)
        noted = self._read(name)
        if noted is None:
            return None
        try:
            process = psutil.Process(noted.pid)
            if abs(process.create_time() - noted.created) >= _CREATION_TOLERANCE_S:
                return None
            # A zombie with threads is still ending and uses its ports.
            dead = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
            return None if dead else process
        except psutil.Error:
            return None

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Send a signal to the process, or SIGKILL to its whole group. Return False if the process is not running."""
        process = self.find(name)
        if process is None:
            return False
        try:
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    def wait_gone(self, name: str, timeout_s: float) -> bool:
        """Wait until the process has ended, then delete its pid file. Return False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.find(name) is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        self.forget(name)
        return True

    def forget(self, name: str) -> None:
        """Delete the pid file."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, name: str) -> "_PidFile | None":
        try:
            return _PidFile(**json.loads(self._path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True, kw_only=True)
class _PidFile:
    pid: int
    created: float
    argv: list[str]


def _lower_priority(pid: int, cpu_shares: int) -> None:
    """Lower the priority of the process and its session, because Linux with autogroup weighs sessions."""
    niceness = min(19, round(math.log(FULL_CPU_SHARES / cpu_shares, _WEIGHT_PER_NICENESS)))
    with contextlib.suppress(OSError):  # the process has ended
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness), encoding="ascii")

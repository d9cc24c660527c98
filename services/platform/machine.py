"""Check the available memory, return freed memory to the system, and find taken TCP ports.

The memory limit is configured; otherwise it is the memory available on the machine and in its control group.
"""

import ctypes
import socket
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_MIB = 1 << 20


def available_bytes(cgroup: Path = _CGROUP) -> int:
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def require_memory(what: str, needed_bytes: int, *, limit_mb: int, variable: str) -> None:
    """Raise MemoryError unless `needed_bytes` fit. limit_mb: MiB, set by `variable`; 0 means all available memory."""
    limit = limit_mb * _MIB if limit_mb else available_bytes()
    if needed_bytes > limit:
        source = f"{variable}={limit_mb}" if limit_mb else "what is available here"
        raise MemoryError(f"{what} needs {needed_bytes / _MIB:.1f} MiB; allowed: {limit / _MIB:.1f} MiB ({source})")


def give_back_freed() -> None:
    """Return freed memory to the system: glibc keeps free blocks between allocated ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PortTaken(RuntimeError):
    """The port is taken; the message has its owner and the remedy."""

    def __init__(self, host: str, port: int, owner: str | None, *, purpose: str = "gRPC") -> None:
        owned = f"held by {owner}" if owner else "held by another process (its owner is not visible to this user)"
        super().__init__(f"port {port} on {host} ({purpose}) is taken: {owned}; stop it or choose another port")
        self.port = port
        self.owner = owner


def port_owner(port: int) -> str | None:
    """Return name and pid of the process that listens on `port`, or else has an outgoing connection from it.

    Return None if no owner is visible.
    """
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    local = [one for one in connections if one.laddr and one.laddr.port == port]
    there = sorted((one for one in local if one.pid), key=lambda one: one.status != psutil.CONN_LISTEN)
    if not there:
        is_ended = bool(local) and all(one.status == psutil.CONN_TIME_WAIT for one in local)
        return "an outgoing connection that has ended, for at most a minute" if is_ended else None
    what = "" if there[0].status == psutil.CONN_LISTEN else "an outgoing connection of "
    try:
        return f"{what}{psutil.Process(there[0].pid).name()} (pid {there[0].pid})"
    except psutil.Error:
        return f"{what}pid {there[0].pid}"


def check_port_free(host: str, port: int) -> None:
    """Raise PortTaken if host:port cannot be bound. Port 0 is always free."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A server's old connections in TIME_WAIT do not keep its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise PortTaken(host, port, port_owner(port)) from exc

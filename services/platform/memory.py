"""Check that something large fits into memory, and return freed memory.

The limit is the configured one, or else the memory available on the machine and in its control group.
"""

import ctypes
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
    """Raise MemoryError unless `needed_bytes` fit. limit_mb: MiB, set by `variable`; 0: the available memory."""
    limit = limit_mb * _MIB if limit_mb else available_bytes()
    if needed_bytes > limit:
        source = f"{variable}={limit_mb}" if limit_mb else "what is available here"
        raise MemoryError(f"{what} needs {needed_bytes / _MIB:.1f} MiB; allowed: {limit / _MIB:.1f} MiB ({source})")


def give_back_freed() -> None:
    """Return freed memory to the system: glibc keeps free blocks between allocated ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

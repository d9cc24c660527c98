"""The number of threads of a kernel call: a process-wide count, or 1 for a background thread.

NumPy's BLAS has its own threads, set before NumPy is imported (OPENBLAS_NUM_THREADS).
"""

import os
import threading


class _Counts(threading.local):
    here: int | None = None  # of this thread only


_counts = _Counts()
_process_count: int | None = None


def compute_threads() -> int:
    """Number of threads of a kernel called from this thread. The default is OMP_NUM_THREADS, else one per core."""
    if _counts.here is not None:
        return _counts.here
    return _process_count if _process_count is not None else _default_count()


def set_compute_threads(count: int) -> None:
    """Set this process's count. Raises: ValueError below 1."""
    global _process_count
    if count < 1:
        raise ValueError(f"count={count} allowed: at least 1")
    _process_count = count


def use_one_compute_thread_here() -> None:
    _counts.here = 1


def _default_count() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

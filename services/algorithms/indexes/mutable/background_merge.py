"""A thread that merges a mutable index on demand.

Its low priority and single compute thread limit the delay of searches on the same cores.
"""

import os
import sys
import threading
import time
from types import TracebackType
from typing import Self

from services.algorithms.indexes.mutable.index import MutableIndex
from services.algorithms.native.threads import use_one_compute_thread_here

_NICENESS = 3  # half of a search's CPU share: even on a busy machine a merge ends before the delta grows large
_PAUSE_S = 0.0001  # as long as a merge's slices: half of the interpreter's time is free


class BackgroundMerge:
    """Merges `index` when `merge_wanted` is set, from `start` to `close`, or inside a `with`.

    merges, seconds: totals. A failed merge is repeated after `first_retry_s`; the wait doubles after each failure, up
    to `longest_retry_s`. Meanwhile `error` is the last exception; searches work, but the delta grows.
    """

    def __init__(self, index: MutableIndex, *, first_retry_s: float = 1.0, longest_retry_s: float = 60.0) -> None:
        self._index = index
        self._first_retry_s, self._longest_retry_s = first_retry_s, longest_retry_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="merge", daemon=True)
        self.error: Exception | None = None
        self.merges = 0
        self.seconds = 0.0

    def start(self) -> None:
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish a running merge and stop. Raises: the last merge's exception, if it failed."""
        self._stopping.set()
        self._index.merge_wanted.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        _lower_priority()
        retry_s = self._first_retry_s
        while True:
            self._index.merge_wanted.wait()
            if self._stopping.is_set():
                return
            self._index.merge_wanted.clear()
            started = time.perf_counter()
            try:
                self._index.tidy(lambda: time.sleep(_PAUSE_S))
            except Exception as error:  # for monitoring and `close`
                self.error = error
                if self._stopping.wait(retry_s):
                    return
                retry_s = min(2 * retry_s, self._longest_retry_s)
                # Retry even without further changes.
                self._index.merge_wanted.set()
                continue
            self.error = None
            retry_s = self._first_retry_s
            self.merges += 1
            self.seconds += time.perf_counter() - started


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere niceness applies to the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    use_one_compute_thread_here()

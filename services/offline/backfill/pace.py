"""Limit a job to a share of one core, next to the serving processes."""

import time
from collections.abc import Callable


class Pace:
    """Call `rest` after each step: it sleeps while this process has used more processor time than its share."""

    def __init__(
        self,
        share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """share: fraction of one core, above 0, at most 1."""
        self._share, self._clock, self._used, self._sleep = share, clock, used, sleep
        self._began, self._used_before = clock(), used()

    def rest(self) -> None:
        """Sleep until the mean use since the start is at most the share."""
        due_s = (self._used() - self._used_before) / self._share - (self._clock() - self._began)
        if due_s > 0:
            self._sleep(due_s)

"""The time since a loop's last turn ended, and since the last good one.

A loop that fails or hangs exports no metric. Its thread reports each turn here; metrics and health read from other
threads.
"""

import time
from collections.abc import Callable

# A turn waits for calls that time out after seconds, and applies thousands of records at most; longer is a hang.
STUCK_S = 60.0


class TurnClock:
    """Written by one thread, read by any. clock: monotonic seconds."""

    def __init__(self, *, stuck_s: float = STUCK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_s, self._clock = stuck_s, clock
        self._ended_s = self._worked_s = clock()
        # Turns in a row that raised.
        self.failures = 0

    def ended(self, *, well: bool) -> None:
        """Note the end of a turn. well: it did not raise."""
        self._ended_s = self._clock()
        self.failures = 0 if well else self.failures + 1
        if well:
            self._worked_s = self._ended_s

    @property
    def age_s(self) -> float:
        """Seconds since the last good turn, or since construction."""
        return self._clock() - self._worked_s

    @property
    def is_stuck(self) -> bool:
        """Whether the present turn takes too long. A failing turn ends, and is not stuck."""
        return self._clock() - self._ended_s > self._stuck_s

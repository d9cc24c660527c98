"""The time since a loop's last turn, and since the last good one.

A loop that hangs exports no metric, so other threads read this clock.
"""

import time
from collections.abc import Callable

# Calls in a turn time out after seconds; longer is a hang.
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
        """Whether the turn takes too long; a failing one ends."""
        return self._clock() - self._ended_s > self._stuck_s

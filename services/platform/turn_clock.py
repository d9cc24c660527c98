"""How long ago a loop's turn last ended, and last worked, by the clock.

A loop that fails or hangs sets no figure that says so: its thread tells each turn here, and metrics and health ask from
other threads, whenever they are asked themselves.
"""

import time
from collections.abc import Callable

# A turn waits for calls that give up after seconds, and applies thousands of records at most: longer is a hang.
STUCK_S = 60.0


class TurnClock:
    """Written by one thread, read by any. `clock` gives seconds that never go back."""

    def __init__(self, *, stuck_s: float = STUCK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_s, self._clock = stuck_s, clock
        self._ended_s = self._worked_s = clock()
        # Turns in a row that raised; 0 while it works.
        self.failures = 0

    def ended(self, *, well: bool) -> None:
        """A turn is over; `well`: it worked, and did not raise."""
        self._ended_s = self._clock()
        self.failures = 0 if well else self.failures + 1
        if well:
            self._worked_s = self._ended_s

    @property
    def age_s(self) -> float:
        """Seconds since the last turn that worked; since the clock was made where none has."""
        return self._clock() - self._worked_s

    @property
    def is_stuck(self) -> bool:
        """Whether the turn at hand lasts longer than any should. One that fails ends, and is not stuck."""
        return self._clock() - self._ended_s > self._stuck_s

"""The open-loop engine: work begins when it is due, whether or not earlier work has finished.

Users of a real site do not wait because the server is slow. If calls waited for answers, a slow server would reduce its
own load. The engine neither sleeps nor sends: load tests drive it on gevent, the demo's replay on asyncio.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Work = TypeVar("Work")
OnDue = Callable[[float, Work], None]

ARRIVALS = ("poisson", "uniform")
MAX_IN_FLIGHT = 1_000
# The status of work that was due while too much was in flight.
NOT_SENT = "NOT_SENT"


def arrivals(kind: str, *, rate_per_s: float, seconds: float, rng: np.random.Generator) -> FloatArray:
    """Return due times in seconds since the start, increasing, all in [0, seconds).

    "poisson": independent users (exponential gaps); "uniform": equal gaps from a random first one, for comparable runs.
    Raises: ValueError for another kind or a negative rate.
    """
    if kind not in ARRIVALS:
        raise ValueError(f"arrivals={kind!r}; allowed: {', '.join(ARRIVALS)}")
    if rate_per_s < 0 or seconds < 0:
        raise ValueError(f"rate_per_s={rate_per_s}, seconds={seconds}; allowed: 0 or more")
    if rate_per_s == 0 or seconds == 0:
        return np.zeros(0)
    if kind == "uniform":
        return np.arange(rng.random() / rate_per_s, seconds, 1.0 / rate_per_s)
    # Given their number, the arrivals of a Poisson process are uniform: no loop over gaps.
    return np.sort(rng.random(rng.poisson(rate_per_s * seconds)) * seconds)


class OpenLoop(Generic[Work]):
    """One run over `schedule`, pairs of (seconds since the start, work).

    Due work goes to `start(due_s, work)`, or to `refuse(due_s, work)` while `in_flight` has at least `max_in_flight`
    entries; `report(due_s, work)` is called about every `report_every_s` seconds.
    """

    def __init__(
        self,
        schedule: Iterable[tuple[float, Work]],
        *,
        start: OnDue[Work],
        refuse: OnDue[Work],
        in_flight: Sized,
        max_in_flight: int,
        report: OnDue[Work],
        report_every_s: float,
    ) -> None:
        self._schedule = sorted(schedule, key=lambda entry: entry[0])
        self._start, self._refuse, self._report = start, refuse, report
        self._in_flight, self._max_in_flight = in_flight, max_in_flight
        self._report_every_s = report_every_s
        self._began = time.monotonic()
        self.peak_in_flight = 0

    def waits(self) -> Iterator[float]:
        """Start the clock; yield the seconds to sleep before each work, which begins when the next value is requested.

        Sleep also for 0 seconds: a late loop that never pauses receives no answer.
        """
        self._began = time.monotonic()
        report_at_s = self._report_every_s
        for due_s, work in self._schedule:
            yield max(due_s - self.now_s(), 0.0)
            if len(self._in_flight) >= self._max_in_flight:
                self._refuse(due_s, work)
            else:
                self._start(due_s, work)
                self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
            if due_s >= report_at_s:
                report_at_s += self._report_every_s
                self._report(due_s, work)

    def now_s(self) -> float:
        """Return seconds since the clock was started."""
        return time.monotonic() - self._began

    def latency_ms(self, due_s: float) -> float:
        """Return milliseconds since the work was due."""
        return (self.now_s() - due_s) * 1e3

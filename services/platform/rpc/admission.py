"""Adaptive concurrency limits per class of calls, fair between callers.

While the median latency is above twice the unloaded latency, the limit falls in proportion; otherwise it grows by its
square root (the gradient of Netflix's concurrency-limits and of Envoy's adaptive concurrency). The unloaded latency is
learned while few calls run, so a long overload does not count as normal. Calls that report work of higher priority also
lower the limit.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import sqrt
from statistics import median

from services.platform.errors import Overloaded

_TOLERANCE = 2.0
# Share of the limit for all callers; the rest is for callers below their fair share.
_COMMON = 0.75
_FIRST = 16
# Up to this many concurrent calls do not delay each other.
_UNHURRIED = 2
_WINDOW_S = 0.1
_WINDOW_CALLS = 20
# Largest factor for the limit after a window in which most calls yield.
_YIELD_FACTOR = 0.8
# Weight of a new window in the moving average of the unloaded latency.
_LEARNED = 0.2
_RETRY_AFTER_MS = 100
# Longest wait of a call in the queue.
_PATIENCE_S = 0.5


class Limit:
    """A concurrency limit, from `smallest` to `largest`; fixed if both are equal. Not thread-safe.

    quick_s: a median latency up to this never lowers the limit.
    smallest_yielding: the minimum while calls yield; None means `smallest`.
    """

    def __init__(
        self, smallest: int, largest: int, *, quick_s: float, smallest_yielding: int | None, clock: Callable[[], float]
    ) -> None:
        self._smallest, self._largest = min(smallest, largest), largest
        self._smallest_yielding = self._smallest if smallest_yielding is None else smallest_yielding
        self._quick_s, self._clock = quick_s, clock
        self.value = float(max(self._smallest, min(_FIRST, largest)))
        # The unloaded latency, and whether few calls ran when it was measured.
        self._unhurried_s: float | None = None
        self._is_sure = False
        # This window's latencies, number of yielding calls, and peak of concurrent calls.
        self._taken_s: list[float] = []
        self._num_yielding = 0
        self._peak = 0
        self._window_began = clock()

    def runs(self, calls: int) -> None:
        self._peak = max(self._peak, calls)

    def took(self, seconds: float, *, yields: bool, in_flight: int) -> None:
        """Record a call's end. in_flight: calls still running."""
        if self._smallest == self._largest:
            return
        self._taken_s.append(seconds)
        self._num_yielding += yields
        now = self._clock()
        if len(self._taken_s) >= _WINDOW_CALLS and now - self._window_began >= _WINDOW_S:
            self._move(median(self._taken_s))
            self._taken_s.clear()
            self._num_yielding = 0
            self._window_began, self._peak = now, in_flight

    def _move(self, taken_s: float) -> None:
        before = self._unhurried_s
        if self._peak <= _UNHURRIED:
            self._is_sure = True
            self._unhurried_s = taken_s if before is None else before + _LEARNED * (taken_s - before)
        self._unhurried_s = unhurried_s = min(taken_s, taken_s if self._unhurried_s is None else self._unhurried_s)
        enough_s = max(self._quick_s, _TOLERANCE * unhurried_s)
        gradient = min(1.0, max(0.5, enough_s / taken_s)) if taken_s else 1.0
        if 2 * self._num_yielding > len(self._taken_s):
            self.value = max(self._smallest_yielding, min(gradient, _YIELD_FACTOR) * self.value)
            return
        if gradient < 1.0 and not self._is_sure:
            self.value = self._smallest
            return
        # The limit grows only if at least half of it was used in the window.
        headroom = sqrt(self.value) if 2 * self._peak >= self.value else 0.0
        # If yielding calls put the limit below `smallest`, it returns there by its normal growth.
        least = min(self._smallest, self.value + sqrt(self.value))
        self.value = max(least, min(self._largest, gradient * self.value + headroom))


class Admission:
    """Admits the calls of one class. Not thread-safe.

    smallest, largest, quick_s, smallest_yielding: see `Limit`. per_caller: most calls in flight of one caller.
    surplus: how many calls beyond the limit may begin; they need a cheaper answer (`Slot.is_surplus`).
    queue: how many calls may wait in `admit`.
    """

    def __init__(
        self,
        name: str,
        *,
        largest: int,
        smallest: int = 2,
        smallest_yielding: int | None = None,
        per_caller: int | None = None,
        surplus: int = 0,
        queue: int = 0,
        quick_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._limit = Limit(smallest, largest, quick_s=quick_s, smallest_yielding=smallest_yielding, clock=clock)
        self._clock = clock
        self._per_caller = per_caller
        self._surplus_left = surplus
        self._queue_size = queue
        # In order of arrival: the caller, and the error if its turn does not come.
        self._queue: dict[asyncio.Future[Slot], tuple[str, Overloaded]] = {}
        self.in_flight = 0
        self._callers = Counter[str]()

    @property
    def limit(self) -> float:
        return self._limit.value

    def enter(self, caller: str, *, is_background: bool = False) -> "Slot":
        """Admit a call; its `Slot.leave` has to follow. Background calls get half of the limit.

        Raises: Overloaded.
        """
        own = self._callers[caller]
        if self._per_caller is not None and own >= self._per_caller:
            raise Overloaded(f"{own} {self.name} of this caller in flight, its limit", retry_after_ms=_RETRY_AFTER_MS)
        limit = max(1, int(self.limit / 2 if is_background else self.limit))
        others = len(self._callers) - (own > 0)
        if self.in_flight >= limit or (others and self.in_flight >= _COMMON * limit and own * (others + 1) >= limit):
            if not own:
                del self._callers[caller]
            if self._surplus_left:
                self._surplus_left -= 1
                return Slot(self, caller, self._clock, is_surplus=True)
            raise Overloaded(
                f"{self.in_flight} {self.name} in flight, as many as are answered in time",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._count(caller, 1)
        self._limit.runs(self.in_flight)
        return Slot(self, caller, self._clock, is_surplus=False)

    async def admit(self, caller: str, *, is_background: bool = False) -> "Slot":
        """Like `enter`, but wait up to `_PATIENCE_S`.

        If the queue is full, the caller with the most waiting calls loses its newest one. Raises: Overloaded.
        """
        try:
            return self.enter(caller, is_background=is_background)
        except Overloaded as exc:
            if is_background or not self._queue_size:
                raise
            refusal = exc
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Slot] = loop.create_future()
        self._queue[turn] = caller, refusal
        if len(self._queue) > self._queue_size:
            most, _ = Counter(waiting for waiting, _ in self._queue.values()).most_common(1)[0]
            self._give_up(next(turn for turn in reversed(self._queue) if self._queue[turn][0] == most))
        timer = loop.call_later(_PATIENCE_S, self._give_up, turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().leave(worked=False)
            raise
        finally:
            timer.cancel()
            self._queue.pop(turn, None)

    def _give_up(self, turn: "asyncio.Future[Slot]") -> None:
        _, refusal = self._queue.pop(turn, ("", None))
        if refusal is not None and not turn.done():
            turn.set_exception(refusal)

    def _let_in(self) -> None:
        for turn, (caller, _) in list(self._queue.items()):
            with suppress(Overloaded):
                if not turn.done():
                    turn.set_result(self.enter(caller))
                del self._queue[turn]

    def _count(self, caller: str, number: int) -> None:
        self.in_flight += number
        self._callers[caller] += number
        if not self._callers[caller]:
            del self._callers[caller]
        if number < 0 and self._queue:
            self._let_in()


class Slot:
    """An admitted call. is_surplus: it is beyond the limit and needs a cheap answer without waiting.

    yields: it reported that other work has priority (`yield_to_others`).
    """

    __slots__ = ("_admission", "_began", "_caller", "_clock", "_is_in", "is_surplus", "yields")

    def __init__(self, admission: Admission, caller: str, clock: Callable[[], float], *, is_surplus: bool) -> None:
        self._admission, self._caller, self._clock = admission, caller, clock
        self._began, self._is_in, self.is_surplus = clock(), not is_surplus, is_surplus
        self.yields = False

    def wait(self) -> None:
        """Release the slot until `go_on`; the time in between does not count as latency."""
        self._is_in = False
        self._began -= self._clock()
        self._admission._count(self._caller, -1)

    def go_on(self) -> None:
        self._is_in = True
        self._began += self._clock()
        self._admission._count(self._caller, 1)

    def leave(self, *, worked: bool) -> None:
        """End the call. worked: False for a failed call, whose latency does not measure the load."""
        if self.is_surplus:
            self._admission._surplus_left += 1
        if self._is_in:
            self._admission._count(self._caller, -1)
            if worked:
                took_s, in_flight = self._clock() - self._began, self._admission.in_flight
                self._admission._limit.took(took_s, yields=self.yields, in_flight=in_flight)


current: ContextVar[Slot | None] = ContextVar("slot", default=None)


def yield_to_others() -> None:
    """Report that other work has priority: it lowers the limit of the current call's class."""
    slot = current.get()
    if slot is not None:
        slot.yields = True


@contextmanager
def waiting() -> Iterator[None]:
    """Release the current call's slot while it only waits."""
    slot = current.get()
    if slot is None:
        yield
        return
    slot.wait()
    try:
        yield
    finally:
        slot.go_on()

"""Track dependencies of the gateway: circuit breakers, this event loop's stalls, and the lag of the applied stream.

An unavailable dependency delays only the first requests by its timeout. When half of the last calls failed, the
breaker opens for `open_seconds`. Then it admits one probe, whose success closes it. Failures during which this event
loop stalled are ignored.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from services.platform.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    FreshetError,
    InvalidRequest,
    Overloaded,
    PreconditionFailed,
)
from services.platform.stream.records import Position

log = structlog.get_logger()

T = TypeVar("T")

_REFUSALS = (Overloaded, InvalidRequest, PreconditionFailed)
_SAY_REFUSAL_EVERY_S = 10.0
# A failed call is ignored if the loop stalled for more than this share of it.
_STALL_SHARE = 0.2
_LAST_CALLS, _LAST_S = 20, 5.0
# A time-out opens the breaker if so many of the last calls failed.
_TIMEOUTS_TO_OPEN = 3
_LOOK_EVERY_S, _STALLS_KEPT = 0.02, 64
# Marks per partition, one per `_SPACING_S`: they cover several seconds.
_MAX_MARKS = 64
_SPACING_S = 0.2
# An answer is marked as not fresh if an event that was acknowledged so long ago is not applied.
GRACE_S = 2.0
# Reads yield to the encoder if the lag exceeds the first share of GRACE_S, writes if it exceeds the second. Both yield
# only if the watermark rose in the last `_MOVES_S`.
_READS_STAND_BACK, _WRITES_STAND_BACK, _MOVES_S = 0.25, 0.5, 1.0


class Breaker:
    """Guards one event loop's calls to one dependency. stalled_s: returns the seconds of stalls since a time."""

    def __init__(
        self,
        name: str,
        *,
        open_seconds: float = 0.5,
        stalled_s: Callable[[float], float] = lambda since: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._open_seconds = open_seconds
        self._stalled_s = stalled_s
        self._clock = clock
        self._open_until: float | None = None
        self._probing = False
        # When each of the last calls ended, and whether it failed.
        self._ends: deque[tuple[float, bool]] = deque(maxlen=_LAST_CALLS)
        self._reason = ""
        self._say_refusal_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether calls are admitted."""
        return self._open_until is None

    def admit(self) -> bool:
        """Admit a call; return whether it is the probe of an open breaker.

        Raises: DependencyUnavailable while open.
        """
        if self._open_until is None:
            return False
        if self._probing or self._clock() < self._open_until:
            raise DependencyUnavailable(f"{self.name} failed a moment ago: {self._reason}")
        self._probing = True
        return True

    def end(self, error: BaseException | None, *, probe: bool, patient: bool, began: float | None = None) -> None:
        """Record the end of an admitted call. patient: as in `run`. began: the call's start; None: the failure
        counts despite stalls.

        A FreshetError is a failure, except Overloaded and InvalidRequest, which do not count, and PreconditionFailed,
        which is a success: other replicas may serve this model.
        """
        if probe:
            self._probing = False
        if error is None or isinstance(error, PreconditionFailed):
            if self._open_until is not None:
                log.info("dependency_back", dependency=self.name)
                self._open_until = None
                self._ends.clear()
            self._ends.append((self._clock(), False))
        elif isinstance(error, FreshetError) and not isinstance(error, _REFUSALS):
            now = self._clock()
            if began is None or self._stalled_s(began) <= _STALL_SHARE * (now - began):
                self._failed(error, probe=probe, patient=patient)

    async def run(self, call: Callable[[], Awaitable[T]], *, patient: bool = True) -> T:
        """Call, unless the breaker is open. patient: False if the caller's deadline shortened the time limit.

        Raises: DependencyUnavailable while open; the errors of `call`.
        """
        probe, began = self.admit(), self._clock()
        try:
            result = await call()
        except BaseException as exc:
            self.end(exc, probe=probe, patient=patient, began=began)
            raise
        self.end(None, probe=probe, patient=patient)
        return result

    async def attempt(self, call: Callable[[], Awaitable[T]], *, patient: bool = True) -> T | None:
        """Run; return None instead of raising a FreshetError."""
        try:
            return await self.run(call, patient=patient)
        except (InvalidRequest, PreconditionFailed) as exc:
            # The gateway validated the request, so the peer has other limits or another model.
            self._refused(exc)
            return None
        except FreshetError:
            return None

    def _refused(self, exc: FreshetError) -> None:
        """Log rarely: during a deployment every request may be rejected."""
        now = self._clock()
        if now >= self._say_refusal_at:
            self._say_refusal_at = now + _SAY_REFUSAL_EVERY_S
            log.warning("dependency_refused", dependency=self.name, error=type(exc).__name__, reason=exc.message)

    def _failed(self, exc: FreshetError, *, probe: bool, patient: bool) -> None:
        is_timeout = isinstance(exc, DeadlineExceeded)
        if is_timeout and not patient and not probe:
            return  # a caller's short deadline is no outage
        now = self._clock()
        self._ends.append((now, True))
        ends = [failed for at, failed in self._ends if at > now - _LAST_S]
        if not probe and sum(ends) < max(_TIMEOUTS_TO_OPEN if is_timeout else 1, len(ends) / 2):
            return
        if self._open_until is None:
            log.warning("dependency_failed", dependency=self.name, error=type(exc).__name__, reason=exc.message)
        self._reason = exc.message
        self._open_until = now + self._open_seconds


class LoopStalls:
    """Stalls of the event loop: during calls, a check is due every 20 ms; a late check is a stall."""

    def __init__(self) -> None:
        self._stalls: deque[tuple[float, float]] = deque(maxlen=_STALLS_KEPT)
        self._looking: asyncio.Task[None] | None = None
        self._until = 0.0

    def watch(self, seconds: float) -> None:
        """Check for the next `seconds`."""
        self._until = max(self._until, time.monotonic() + seconds)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def since(self, began: float) -> float:
        """Return the seconds of stalls after `began` (monotonic clock)."""
        return sum(min(late_s, at - began) for at, late_s in self._stalls if at > began)

    async def _look(self) -> None:
        while time.monotonic() < self._until:
            due = time.monotonic() + _LOOK_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            if now - due > _LOOK_EVERY_S:
                self._stalls.append((now, now - due))


class AcknowledgedLag:
    """How far each partition's applied stream lags behind this gateway's writes; other producers do not count."""

    def __init__(self, *, grace_seconds: float = GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._marks: dict[int, deque[tuple[int, float]]] = {}
        # By partition: the highest watermark, and when it was found.
        self._applied: dict[int, tuple[int, float]] = {}

    def acknowledged(self, position: Position) -> None:
        marks = self._marks.setdefault(position.partition, deque())
        now = self._clock()
        if marks and position.offset <= marks[-1][0]:
            return
        if marks and now - marks[-1][1] < _SPACING_S:
            # Events of a burst share a mark, with the last offset.
            marks[-1] = (position.offset, marks[-1][1])
            return
        # The oldest marks measure the lag: beyond the limit, the newest is left out.
        if len(marks) < _MAX_MARKS:
            marks.append((position.offset, now))

    def behind(self, partition: int, watermark: int | None) -> bool:
        """Return whether an event that was acknowledged before the grace period is not applied yet."""
        return self._behind_s(partition, watermark) > self._grace_seconds

    def reads_yield(self, partition: int, watermark: int | None) -> bool:
        """Record the watermark; return whether answers will soon be `behind` although events are being applied."""
        applied = -1 if watermark is None else watermark
        if applied > self._applied.get(partition, (-1, 0.0))[0]:
            self._applied[partition] = applied, self._clock()
        return self._hurries(partition, _READS_STAND_BACK)

    def writes_yield(self, partition: int) -> bool:
        """Return the same as `reads_yield` for a larger lag and the recorded watermark."""
        return self._hurries(partition, _WRITES_STAND_BACK)

    def _hurries(self, partition: int, share: float) -> bool:
        if partition not in self._applied:
            return False
        watermark, since = self._applied[partition]
        moves = self._clock() - since < _MOVES_S
        return moves and self._behind_s(partition, watermark) > share * self._grace_seconds

    def _behind_s(self, partition: int, watermark: int | None) -> float:
        marks = self._marks.get(partition)
        if not marks:
            return 0.0
        applied = -1 if watermark is None else watermark
        while marks and marks[0][0] <= applied:
            marks.popleft()
        return self._clock() - marks[0][1] if marks else 0.0

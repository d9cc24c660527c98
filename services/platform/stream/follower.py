"""The loop of every thread that follows topics.

A failed turn is logged once and repeated after a wait; after two in a row `on_stall` is called. `turns` detects a turn
that hangs. `poison.py` decides after an exception outside the error tree.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import structlog

from services.platform.errors import FreshetError
from services.platform.stream.poison import ATTEMPTS, PoisonPolicy
from services.platform.turn_clock import TurnClock

log = structlog.get_logger()

R = TypeVar("R")


class Due:
    """True once per `every_s` (monotonic clock), first after `after_s`."""

    def __init__(self, every_s: float, *, after_s: float = 0.0) -> None:
        self._every_s, self._at = every_s, time.monotonic() + after_s if after_s else 0.0

    def __call__(self, now: float) -> bool:
        is_due = now >= self._at
        if is_due:
            self._at = now + self._every_s
        return is_due


class Follower:
    """Runs turns from `start` to `stop`.

    `on_ready`: called after `ready`, and when turns work again after `on_stall`. Without `on_stall`, what was read is
    still served during a stall.

    After several exceptions outside the error tree, `tries_alone` is True, and a poison record is set aside. `lost` may
    discard a half-applied change.
    """

    def __init__(
        self,
        name: str,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_stall: Callable[[], None] | None = None,
        backoff_s: float = 0.5,
        max_backoff_s: float = 0.5,
        lag_every_s: float = 1.0,
        turns: TurnClock | None = None,
    ) -> None:
        """name: of thread and log. The wait after a failure doubles from `backoff_s` to `max_backoff_s`."""
        self.name = name
        self.turns = turns or TurnClock()
        self.bugs = 0
        self.poison: PoisonPolicy[Any] = PoisonPolicy(name)
        self._on_ready, self._on_stall = on_ready, on_stall
        self._first_backoff_s, self._max_backoff_s, self._backoff_s = backoff_s, max_backoff_s, backoff_s
        self._lag_due = Due(lag_every_s)
        self._is_ready = self._is_stalled = False
        self._complaint = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def turn(self) -> int:
        """Read and apply records; return their number. Raises: anything; the next turn starts over."""
        raise NotImplementedError

    def lost(self, exc: Exception) -> None:
        """Called after a turn raised: records read and applied may differ."""

    @property
    def tries_alone(self) -> bool:
        """Whether to apply records one by one."""
        return self.bugs >= ATTEMPTS

    def one_by_one(
        self,
        records: Sequence[R],
        *,
        key: Callable[[R], Hashable],
        apply: Callable[[R], object],
        set_aside: Callable[[R, str], object],
        rehearse: Callable[[R], object] | None,
    ) -> None:
        """Apply records one by one; set a poison record aside.

        key: identifies a record. rehearse: `apply` without visible effects.
        Raises: as `apply`; earlier records are applied.
        """
        applied = 0
        for number, record in enumerate(records):
            try:
                apply(record)
            except FreshetError:
                raise
            except Exception as exc:
                behind = records[number + 1 :]
                if not self.poison.is_poison(
                    key(record), record, exc, behind=behind, applied=applied, rehearse=rehearse
                ):
                    raise
                set_aside(record, f"internal error: {type(exc).__name__}")
            else:
                applied += 1
                self.poison.applied([record])

    def report_lag(self, *, asks: bool) -> None:
        """Export the lag. asks: request the ends from the broker, because polls fail."""

    def finish(self) -> None:
        """Save and close, after the last turn."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the present turn, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def step(self) -> int:
        """Run one turn and log its recovery. Raises: as the turn; pass it to `fail`."""
        records = self.turn()
        self._export_lag(asks=False)
        if self._complaint:
            log.info("follower_recovered", follower=self.name, after=self._complaint)
        if self._is_stalled:
            self._is_stalled = False
            self._on_ready()
        self._complaint, self.bugs, self._backoff_s = "", 0, self._first_backoff_s
        self.turns.ended(well=True)
        return records

    def fail(self, exc: Exception) -> None:
        """Handle a turn's exception: log once, note a stall, and wait."""
        complaint = type(exc).__name__
        if not isinstance(exc, FreshetError):
            self.bugs += 1
            if complaint != self._complaint:
                log.error("follower_bug", follower=self.name, exc_info=exc)
        self.lost(exc)
        if self._complaint and self._is_ready and not self._is_stalled and self._on_stall is not None:
            self._is_stalled = True
            self._on_stall()
        if complaint != self._complaint:
            self._complaint = complaint
            log.warning("follower_waits", follower=self.name, reason=str(exc), error=complaint)
        if self._is_ready and not self._stop.is_set():
            # Only a metric; the turn's failure is logged already.
            with contextlib.suppress(Exception):
                self._export_lag(asks=True)
        self.turns.ended(well=False)
        self._stop.wait(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, self._max_backoff_s)

    def ready(self) -> None:
        """Called by the subclass when it reached its dependencies; only the first call counts."""
        if not self._is_ready:
            self._is_ready = True
            self._on_ready()

    def _export_lag(self, *, asks: bool) -> None:
        if self._lag_due(time.monotonic()):
            self.report_lag(asks=asks)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception as exc:
                self.fail(exc)
        self.finish()

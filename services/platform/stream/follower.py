"""The one loop of every thread that follows topics: turn after turn until stopped.

When a turn fails the loop says so once, waits, and tries again; it calls `on_stall` where two turns in a row failed,
and exports the lag by the clock meanwhile. A turn that hangs is known by `turns`, which health and metrics ask. What a
failure outside the error tree costs is the same in every loop (`poison.py`). What a turn reads and applies the subclass
knows: nothing here knows a topic or a client.
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
    """Says once in `every_s` that it is time, by the monotonic clock; the first time `after_s` from now."""

    def __init__(self, every_s: float, *, after_s: float = 0.0) -> None:
        self._every_s, self._at = every_s, time.monotonic() + after_s if after_s else 0.0

    def __call__(self, now: float) -> bool:
        is_due = now >= self._at
        if is_due:
            self._at = now + self._every_s
        return is_due


class Follower:
    """Takes turns from `start` to `stop`.

    `on_ready` is called once the subclass said `ready`, and again when turns work after `on_stall`. Without `on_stall`
    nothing is said of a stall: what was read is served on, under the position that it has.

    After a bug (an error outside the tree) the turn is tried again as it was; after some of them in a row it
    `tries_alone`, and a record that proves to be poison is set aside. Whatever else fails waits. `lost` may give up
    what half a change may have reached.
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
        """name: of the thread, and in the log. The wait after a failure doubles from `backoff_s` to `max_backoff_s`."""
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
        """Read and apply what came; the number of records. Raises: anything; the next turn then starts over."""
        raise NotImplementedError

    def lost(self, exc: Exception) -> None:
        """A turn raised: what was read and what was applied may differ."""

    @property
    def tries_alone(self) -> bool:
        """Whether so many turns failed for a bug that records are to be applied one by one now."""
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
        """Apply records alone, in order; one that proves to be poison is set aside with a reason.

        key: what tells a record from others. rehearse: does what `apply` does, as far as nobody else sees it.
        Raises: as `apply`; the records before the failing one are applied then.
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
        """Export how far behind this loop is. asks: polls fail and do not tell the topics' ends; ask for them."""

    def finish(self) -> None:
        """The last turn is over: keep what is to be kept, close what is open."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the turn at hand, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def step(self) -> int:
        """One turn, and what is said after it. Raises: what the turn raises; tell `fail` of it."""
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
        """A turn raised: complain once, note a stall, and wait."""
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
            # It is a figure only; why the turn failed was said.
            with contextlib.suppress(Exception):
                self._export_lag(asks=True)
        self.turns.ended(well=False)
        self._stop.wait(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, self._max_backoff_s)

    def ready(self) -> None:
        """Said by the subclass when it has reached what it needs; only the first time counts."""
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

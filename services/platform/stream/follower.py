"""The loop of every thread that follows topics, and its handling of records that make it fail.

A turn is one pass of the loop. The loop logs a failed turn once, waits and repeats it; after two failures in a row it
calls `on_stall`. Other threads read the loop's `TurnClock`, because a loop that hangs exports no metric.

A poison record fails at every attempt because of its content, while other records pass; the loop may set it aside.
After other failures (memory, a disk, a model, another version's process) the loop waits, which loses nothing.
"""

import contextlib
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from services.platform.errors import FreshetError

log = structlog.get_logger()

R = TypeVar("R")

# A turn hangs if it takes longer: its calls time out after a few seconds.
STUCK_S = 60.0
# Failures of a batch before its records are tried alone. Most causes pass during the waits in between.
ATTEMPTS = 3
# Records tried alone before and after the suspect.
NEIGHBOURS = 8
# Largest share of neighbours that may fail alone, because records of one bad producer can be neighbours. If more fail,
# the process or the model is the cause.
MAX_FAILING_NEIGHBOURS = 0.25
# Largest share of the last `WINDOW` records to set aside; `FEW` are always allowed. Above it the loop waits for an
# operator.
# Real data has fewer than one bad record in a thousand; a broken process fails at whole kinds of records.
MAX_POISON_SHARE = 0.01
FEW = 3
WINDOW = 10_000
_MAX_SUSPECTS = 1_000

# Errors that no record causes by itself.
_ENVIRONMENT = (MemoryError, OSError, RecursionError, SystemError, ImportError, EOFError, BufferError, ReferenceError)


class Due:
    """True once per `every_s` (monotonic clock), first after `after_s`."""

    def __init__(self, every_s: float, *, after_s: float = 0.0) -> None:
        self._every_s, self._at = every_s, time.monotonic() + after_s if after_s else 0.0

    def __call__(self, now: float) -> bool:
        is_due = now >= self._at
        if is_due:
            self._at = now + self._every_s
        return is_due


class TurnClock:
    """The times of a loop's last turns. One thread writes, any thread may read. clock: returns monotonic seconds."""

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
        """Whether the present turn takes longer than `stuck_s`."""
        return self._clock() - self._ended_s > self._stuck_s


def depends_on_record(exc: BaseException) -> bool:
    """Return whether a record can cause the error.

    FreshetErrors and errors of memory, files, time or the interpreter have other causes.
    """
    seen: set[int] = set()
    found: BaseException | None = exc
    while found is not None and id(found) not in seen:
        if isinstance(found, (FreshetError, *_ENVIRONMENT)) or not isinstance(found, Exception):
            return False
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return True


def signature(exc: BaseException) -> str:
    """Return what identifies a failure: the error's class, and the line that raised it."""
    frames = traceback.extract_tb(exc.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(exc).__name__}{place}"


@dataclass(slots=True)
class _Suspect:
    signature: str
    others_passed: bool = False


class PoisonPolicy(Generic[R]):
    """Decides which records of one loop are poison. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        # The records that failed alone. A partition has at most one that still fails; others were applied later.
        self._suspects: OrderedDict[Hashable, _Suspect] = OrderedDict()
        self._lately: deque[R] = deque(maxlen=NEIGHBOURS)
        # The number of processed records, and its value at each record set aside.
        self._dealt_with = 0
        self._set_aside: deque[int] = deque()
        self._logged: tuple[Hashable, str] | None = None

    def applied(self, records: Sequence[R]) -> None:
        """Count applied records, and remember the last ones as neighbours."""
        self._dealt_with += len(records)
        self._lately.extend(records[-NEIGHBOURS:])

    def is_poison(
        self,
        key: Hashable,
        record: R,
        exc: Exception,
        *,
        behind: Sequence[R] = (),
        applied: int = 0,
        rehearse: Callable[[R], object] | None = None,
    ) -> bool:
        """Return whether a record that failed alone may be set aside; if not, the caller waits and tries again.

        A record is poison at the second call with the same key and failure, if other records passed at an earlier call.
        To find out, the call passes each neighbour to `rehearse`, which does everything but the visible effects; most
        have to pass. Neighbours are the first records of `behind` and the records applied last. If `rehearse` is None,
        or the record does not fail in it the same way, the neighbours are not tried. Then `applied` has to be above 0;
        it is the number of records applied alone just before.

        Raises: a FreshetError of `rehearse`.
        """
        reason = self._innocent_because(key, record, exc, behind, applied, rehearse)
        if reason:
            if self._logged != (key, reason):
                self._logged = (key, reason)
                log.error("record_holds_stream", follower=self._name, record=str(key), reason=reason, exc_info=exc)
            return False
        self._suspects.pop(key, None)
        self._logged = None
        self._dealt_with += 1
        self._set_aside.append(self._dealt_with)
        log.error("record_set_aside", follower=self._name, record=str(key), reason=signature(exc), exc_info=exc)
        return True

    def _innocent_because(
        self,
        key: Hashable,
        record: R,
        exc: Exception,
        behind: Sequence[R],
        applied: int,
        rehearse: Callable[[R], object] | None,
    ) -> str:
        if not depends_on_record(exc):
            return f"{type(exc).__name__}: no record causes this; waiting until it has passed"
        failure = signature(exc)
        known = self._suspects.get(key)
        if known is None or known.signature != failure:
            known = self._suspects[key] = _Suspect(failure)
            if len(self._suspects) > _MAX_SUSPECTS:
                self._suspects.popitem(last=False)
        elif known.others_passed:
            while self._set_aside and self._set_aside[0] <= self._dealt_with - WINDOW:
                self._set_aside.popleft()
            allowed = max(FEW, int(MAX_POISON_SHARE * min(WINDOW, self._dealt_with)))
            if len(self._set_aside) < allowed:
                return ""
            return (
                f"{failure}: {len(self._set_aside)} of the last {min(WINDOW, self._dealt_with)} records were set aside "
                f"already, allowed are {allowed}: the process or the model fails, not the records"
            )
        if rehearse is None or _failure(rehearse, record) != failure:
            known.others_passed |= applied > 0
            return f"{failure}: it fails alone; waiting until other records pass alone"
        neighbours = [*self._lately, *behind[:NEIGHBOURS]]
        failing = sum(bool(_failure(rehearse, one)) for one in neighbours)
        healthy = bool(neighbours) and failing <= MAX_FAILING_NEIGHBOURS * len(neighbours)
        known.others_passed |= healthy
        if healthy:
            return f"{failure}: it fails alone, {len(neighbours) - failing} others pass; it is tried once more"
        return f"{failure}: {failing} of {len(neighbours)} other records fail alone, too, or there are none"


def _failure(rehearse: Callable[[R], object], record: R) -> str:
    try:
        rehearse(record)
    except FreshetError:
        raise
    except Exception as exc:
        return signature(exc)
    return ""


class Follower:
    """Runs turns from `start` to `stop`.

    on_ready: called after `ready`, and when turns work again after `on_stall`. Without `on_stall`, the process serves
    as before during a stall.

    After `ATTEMPTS` exceptions that are not FreshetErrors, `tries_alone` is True: the subclass then applies records one
    by one and sets a poison record aside.
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
        """Read and apply records; return their number. Raises: anything; the next turn starts over."""
        raise NotImplementedError

    def lost(self, exc: Exception) -> None:
        """Called after a turn raised. A subclass discards a half-applied change."""

    @property
    def tries_alone(self) -> bool:
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
        Raises: what `apply` raises; the records before are applied.
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
        """Export the lag. asks: whether to ask the broker for the ends, because polls fail and do not tell them."""

    def finish(self) -> None:
        """Save and close, after the last turn."""
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the present turn, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def step(self) -> int:
        """Run one turn; log if turns work again. Raises: what `turn` raises; the caller passes it to `fail`."""
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
        """Handle a turn's exception: log it once, call `on_stall` if needed, and wait."""
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
            # This is only a metric, and the turn's failure is logged already.
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

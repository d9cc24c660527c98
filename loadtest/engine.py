"""Locust with a clock: a single Locust user drives the open loop, one greenlet per call, and records every call.

Locust's own users wait for answers (closed loop), which hides a stall. Run it in a process of its own: `enable_gevent`
patches the standard library.
"""

import gc
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .open_loop import MAX_IN_FLIGHT, NOT_SENT, FloatArray, OpenLoop
from .results import OK, Call, Conclusion, Outcome, RunResults

MAX_CALLS = 2_000_000
_PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Calls of one kind: due times `arrivals_s` (increasing); `call` makes one and reads its answer.

    Every exception of `call` is counted; none stops the run.
    """

    name: str
    arrivals_s: FloatArray
    call: Callable[[], Outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """A scenario's plan; without `seconds` the command line sets the length.

    `set_up` runs before the clock starts, `tear_down` always follows, `conclude` evaluates the scenario's observations.
    """

    streams: Sequence[Stream]
    seconds: float | None = None
    set_up: Callable[[], None] = lambda: None
    tear_down: Callable[[], None] = lambda: None
    conclude: Callable[[RunResults], Conclusion] = lambda results: Conclusion()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Bounds of a run. Raises: ValueError if a scenario's own length is out of range."""

    seconds: float
    warmup_s: float = 2.0
    max_in_flight: int = MAX_IN_FLIGHT
    # How long to wait for answers after the last arrival.
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.seconds <= 3_600:
            raise ValueError(f"seconds={self.seconds}; allowed: 0.1 to 3600")


def enable_gevent() -> None:
    """Patch the standard library and grpc for greenlets. Call first in the process, before any channel is made."""
    from gevent import monkey

    monkey.patch_all()
    import grpc.experimental.gevent as grpc_gevent

    grpc_gevent.init_gevent()


def run(
    streams: Sequence[Stream], settings: EngineSettings, *, host: str = "", locust_report: Path | None = None
) -> RunResults:
    """Send every stream's calls at their due times and wait for the answers.

    locust_report: path of Locust's own HTML page; host: its name of the target.
    Raises: ValueError if more than MAX_CALLS calls are scheduled.
    """
    total = sum(len(stream.arrivals_s) for stream in streams)
    if total > MAX_CALLS:
        raise ValueError(f"{total} calls are scheduled; allowed: at most {MAX_CALLS}")
    import gevent
    from locust import User, task
    from locust.env import Environment
    from locust.exception import StopUser
    from locust.html import get_html_report
    from locust.stats import stats_history

    driver = _Driver(streams, settings)

    class ClockUser(User):
        @task
        def drive(self) -> None:
            driver.drive()
            raise StopUser

    environment = Environment(user_classes=[ClockUser], host=host)
    runner = environment.create_local_runner()
    driver.report = environment.events.request.fire
    history = gevent.spawn(stats_history, runner)
    # Not KeyboardInterrupt: Python raises that in any running greenlet, where a call's error handling may catch it.
    interruption = gevent.signal_handler(signal.SIGINT, driver.stop_early)
    gc.collect()
    gc.freeze()
    try:
        runner.start(1, spawn_rate=1)
        driver.finished.wait()
    finally:
        interruption.cancel()
        gc.unfreeze()
        if locust_report is not None:
            page = get_html_report(environment, show_download_link=False)  # type: ignore[no-untyped-call]
            locust_report.write_text(page, encoding="utf-8")
        history.kill()
        runner.quit()
    return driver.results


class _Driver:
    def __init__(self, streams: Sequence[Stream], settings: EngineSettings) -> None:
        from gevent.event import Event
        from gevent.pool import Group

        self.finished = Event()
        self.report: Callable[..., Any] = lambda **_: None
        self.results = RunResults(
            seconds=settings.seconds, warmup_s=settings.warmup_s, calls={stream.name: [] for stream in streams}
        )
        self._settings = settings
        self._in_flight = Group()
        self._loop = OpenLoop(
            ((float(due_s), stream) for stream in streams for due_s in stream.arrivals_s),
            start=self._start,
            refuse=lambda due_s, stream: self._file(stream, due_s, self._loop.now_s(), NOT_SENT, None),
            in_flight=self._in_flight,
            max_in_flight=settings.max_in_flight,
            report=self._print_progress,
            report_every_s=_PROGRESS_EVERY_S,
        )

    def drive(self) -> None:
        import gevent

        try:
            for wait_s in self._loop.waits():
                gevent.sleep(wait_s)
            gevent.sleep(max(self._settings.seconds - self._loop.now_s(), 0.0))
            self._in_flight.join(timeout=self._settings.drain_s)
            self._in_flight.kill()
        finally:
            self.results.peak_in_flight = self._loop.peak_in_flight
            self.finished.set()

    def stop_early(self) -> None:
        """End the run now: earlier measurements count, over the time until now."""
        self.results.interrupted = True
        self.results.seconds = round(max(self._loop.now_s(), self.results.warmup_s), 3)
        self.results.peak_in_flight = self._loop.peak_in_flight
        self._in_flight.kill(block=False)
        self.finished.set()

    def _start(self, due_s: float, stream: Stream) -> None:
        import gevent

        self._in_flight.start(gevent.Greenlet(self._send, stream, due_s))

    def _send(self, stream: Stream, due_s: float) -> None:
        import grpc

        sent_s = self._loop.now_s()
        try:
            outcome = stream.call()
        except grpc.RpcError as exc:
            self._file(stream, due_s, sent_s, exc.code().name, exc)
        except Exception as exc:
            self._file(stream, due_s, sent_s, f"CLIENT_{type(exc).__name__}", exc)
        except BaseException:
            # Killed at the end of the drain: the answer never came.
            self._file(stream, due_s, sent_s, "NO_ANSWER", None)
            raise
        else:
            self._file(stream, due_s, sent_s, OK, outcome)

    def _file(self, stream: Stream, due_s: float, sent_s: float, status: str, got: Outcome | Exception | None) -> None:
        if self.results.interrupted:  # the run has ended, and with it the calls in flight
            return
        outcome = got if isinstance(got, Outcome) else None
        call = Call(due_s=due_s, sent_s=sent_s, latency_ms=self._loop.latency_ms(due_s), status=status, outcome=outcome)
        self.results.calls[stream.name].append(call)
        error = None if status == OK else got or RuntimeError(status)
        # Locust's own statistics, for its page.
        self.report(
            request_type="grpc",
            name=stream.name,
            response_time=call.latency_ms,
            response_length=0,
            exception=error,
            context={},
        )

    def _print_progress(self, due_s: float, _: Stream) -> None:
        parts = []
        for name, calls in self.results.calls.items():
            failed = sum(call.status != OK for call in calls)
            parts.append(f"{name} {len(calls):,} done, {failed:,} failed")
        sys.stderr.write(f"  {due_s:5.0f} / {self._settings.seconds:.0f} s   {'   '.join(parts)}\n")

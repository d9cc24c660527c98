"""Slow clients: silent streams, and a client that does not read, next to ordinary visitors, in turns with none.

Do clients that occupy connections delay the others' answers? In every other window a separate process opens the
streams, requests answers of a thousand items, and then stops (SIGSTOP).
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import psutil

from loadtest import visitors
from loadtest.contract import at_most
from loadtest.engine import LoadPlan, Stream
from loadtest.options import Option, add_options, check_options
from loadtest.results import Conclusion, Outcome, RunResults
from loadtest.visitors import Visitors
from loadtest.windows import interleaved, percentile_per_window, ratio

SUMMARY = "silent streams and a client that does not read, in turns with none"
_OPTIONS = (
    Option("idle-streams", 2_000, 1, 20_000, "streams that say nothing"),
    Option("unread", 100, 0, 10_000, "answers of a thousand items that are not read"),
    Option("windows", 8, 2, 1_000, "how many windows take turns, an even number"),
    Option("window-seconds", 10.0, 3, 600, "how long each is"),
)
_SETTLE_S, _ALLOWED = 2.0, 1.2
_SAYS = "Recommend p99 beside slow clients over without, median of neighbouring windows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    visitors.add_arguments(parser)
    add_options(parser, _OPTIONS)


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Return the plan. Raises: ValueError naming the option and what is allowed."""
    check_options(arguments, _OPTIONS)
    windows = interleaved(
        begin_s=_SETTLE_S, num_windows=arguments.windows, seconds=arguments.window_seconds, settle_s=_SETTLE_S, rng=rng
    )
    arguments.seconds = windows[-1].end_s
    slow = SlowClients(arguments)
    treated = iter([window.treated for window in windows])

    def switch() -> Outcome:
        slow.end()
        if next(treated):
            slow.begin()
        return Outcome()

    def conclude(results: RunResults) -> Conclusion:
        p99s_ms = percentile_per_window(results.calls["recommend"], windows, 99)
        found = ratio(p99s_ms, windows) if slow.missed == 0 else None
        return Conclusion(
            claims=[at_most(_SAYS, None if found is None else found.median, _ALLOWED)],
            findings={
                "p99_ms": p99s_ms,
                "ratio": None if found is None else dataclasses.asdict(found),
                "windows_that_slow_clients_missed": slow.missed,
            },
        )

    plan = Visitors(arguments, channel, rng).plan(seconds=arguments.seconds, tear_down=slow.end, conclude=conclude)
    turns = Stream(name="switch", arrivals_s=np.array([window.start_s for window in windows]), call=switch)
    return dataclasses.replace(plan, streams=[*plan.streams, turns])


class SlowClients:
    """A separate process, because it must stop without stopping this one.

    `missed`: how often it had not yet stopped at its window's end.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._command = [
            sys.executable, "-m", "loadtest.idle", arguments.target,
            str(arguments.idle_streams), str(arguments.unread),
        ]  # fmt: skip
        self._running: subprocess.Popen[bytes] | None = None
        self.missed = 0

    def begin(self) -> None:
        self._running = subprocess.Popen(self._command)

    def end(self) -> None:
        if self._running is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.missed += psutil.Process(self._running.pid).status() != psutil.STATUS_STOPPED
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running.pid, signal.SIGKILL)
            self._running.wait()
            self._running = None

"""Soak: a steady load for twenty minutes, and each process's growth in memory from the warm state to the end."""

import argparse
import time
from typing import Any

import numpy as np

from loadtest import visitors
from loadtest.contract import at_most
from loadtest.engine import LoadPlan, Stream
from loadtest.machine import processes, resident
from loadtest.options import Option, add_options, add_state, check_options
from loadtest.results import Conclusion, Outcome, RunResults
from loadtest.visitors import Visitors

SUMMARY = "a steady load for twenty minutes, and whose memory grows"
_OPTIONS = (
    Option("minutes", 20.0, 0.05, 60, "length of the run"),
    Option("warm-minutes", 5.0, 0.01, 30, "when memory is looked at first"),
)
_ALLOWED = 0.02
_LOOKS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    visitors.add_arguments(parser)
    add_options(parser, _OPTIONS)
    add_state(parser)


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Return the plan. Raises: ValueError naming the option and what is allowed."""
    check_options(arguments, _OPTIONS)
    seconds, warm_s = 60 * arguments.minutes, 60 * arguments.warm_minutes
    if 2 * warm_s > seconds:
        raise ValueError(f"--warm-minutes={arguments.warm_minutes:g}; allowed: at most half of --minutes")
    pids = processes(arguments.state)
    seen: list[tuple[float, dict[str, int]]] = []

    def look() -> Outcome:
        seen.append((time.monotonic(), {name: resident(pid) for name, pid in pids.items()}))
        return Outcome()

    def conclude(results: RunResults) -> Conclusion:
        # Medians over a tenth of the run, because memory that the next garbage collection frees is not growth.
        began = seen[0][0]
        at_warm = [memory for at_s, memory in seen if warm_s <= at_s - began < warm_s + seconds / 10]
        at_end = [memory for at_s, memory in seen if at_s - began >= seconds - seconds / 10]
        claims, findings = [], {}
        for name in pids:
            first, last = (float(np.median([one[name] for one in when])) for when in (at_warm, at_end))
            findings[name] = {"warm_mb": round(first / 2**20, 1), "end_mb": round(last / 2**20, 1)}
            says = f"growth of {name}, {findings[name]['warm_mb']} MB to {findings[name]['end_mb']} MB"
            claims.append(at_most(says, last / first - 1, _ALLOWED))
        return Conclusion(claims=claims, findings=findings)

    arguments.seconds = seconds
    plan = Visitors(arguments, channel, rng).plan(seconds=seconds, conclude=conclude)
    looks = Stream(name="look", arrivals_s=np.linspace(0.0, seconds, _LOOKS, endpoint=False), call=look)
    return LoadPlan(streams=[*plan.streams, looks], seconds=seconds, conclude=conclude)

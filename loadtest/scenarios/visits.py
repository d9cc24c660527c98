"""Scenarios that differ only in who calls, and in how the rates change during the run.

Their questions:
- steady: what does Recommend cost while events are written at the system's design rate?
- ramp: at which rate do latencies begin to rise?
- spike: what does a sudden crowd cost the users before it, and how long does the effect last?
- event_storm: how stale do answers become while the stream is flooded (NOT_FRESH)?
- flash_crowd: does one item, whose state changes with every update, delay the others?
- hot_user: does one user's queue delay the others? A user's events are in one partition.
- cold_cache: what does an answer without cached data cost?
- long_histories: what do long histories cost reads (seen items) and writes?
"""

import argparse
import itertools
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import Parts, Visitors

_STEPS = 20  # of the ramp
_AHEAD = 500  # users of cold_cache who have written before the clock starts
_EVENTS, _MOST_USERS = 1_000, 100  # of long_histories


def _middle(times: float) -> Parts:
    return (0.4, 1.0), (0.2, times), (0.4, 1.0)


def _crowd(parts: Parts, visitors: Visitors, rng: np.random.Generator) -> LoadPlan:
    return visitors.plan(recommend=parts, record=parts)


def _storm(visitors: Visitors, rng: np.random.Generator) -> LoadPlan:
    return visitors.plan(record=_middle(10.0))


def _flash_crowd(visitors: Visitors, rng: np.random.Generator) -> LoadPlan:
    anyone, item_id = visitors.writer, visitors.item_ids[int(rng.integers(len(visitors.item_ids)))]
    visitors.writer = lambda: (anyone()[0], item_id)
    return _crowd(_middle(3.0), visitors, rng)


def _hot_user(visitors: Visitors, rng: np.random.Generator) -> LoadPlan:
    anyone, hot = visitors.reader, visitors.user_ids[0]

    def draw() -> tuple[str, str]:
        user_id, item_id = anyone()
        return (hot if rng.random() < 0.5 else user_id), item_id

    visitors.reader = visitors.writer = draw
    return visitors.plan()


def _cold_cache(visitors: Visitors, rng: np.random.Generator) -> LoadPlan:
    """Every user writes one event and asks once, later. Each run has new users."""
    anyone, run, writes, reads = visitors.writer, uuid.uuid4().hex[:12], itertools.count(), itertools.count()
    visitors.writer = lambda: (f"loadtest-{run}-{next(writes)}", anyone()[1])
    visitors.reader = lambda: (f"loadtest-{run}-{next(reads)}", "")

    def set_up() -> None:
        visitors.write([visitors.event(*visitors.writer()) for _ in range(_AHEAD)])

    return visitors.plan(set_up=set_up)


def _long_histories(visitors: Visitors, rng: np.random.Generator) -> LoadPlan:
    def set_up() -> None:
        for user_id in visitors.user_ids[:_MOST_USERS]:
            visitors.write([visitors.event(user_id, visitors.writer()[1]) for _ in range(_EVENTS)])

    return visitors.plan(set_up=set_up)


_RAMP: Parts = [(1 / _STEPS, 2 * (step + 1) / _STEPS) for step in range(_STEPS)]
# Name: summary, plan.
VISITS: dict[str, tuple[str, Callable[[Visitors, np.random.Generator], LoadPlan]]] = {
    "cold_cache": ("nobody comes twice", _cold_cache),
    "event_storm": ("ten times as many events in the middle of the run", _storm),
    "flash_crowd": ("a crowd that is interested in one item alone", _flash_crowd),
    "hot_user": ("every second call is of one and the same user", _hot_user),
    "long_histories": ("users with a thousand interactions each", _long_histories),
    "ramp": ("rates that rise from nothing to twice what is asked for", partial(_crowd, _RAMP)),
    "spike": ("ten times the rates in the middle of the run", partial(_crowd, _middle(10.0))),
    "steady": ("recommendations and event writes together, at constant rates", partial(_crowd, ((1.0, 1.0),))),
}


def build(name: str, arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Return the plan of one of VISITS. Raises: ValueError naming the option and what is allowed."""
    if name == "long_histories":
        arguments.num_users = min(arguments.num_users, _MOST_USERS)
    return VISITS[name][1](Visitors(arguments, channel, rng), rng)

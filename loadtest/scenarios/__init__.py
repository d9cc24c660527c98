"""The scenarios by name. A scenario reads its inputs and schedules its calls."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from loadtest import visitors
from loadtest.engine import LoadPlan
from loadtest.scenarios import freshness, search, slow_clients, soak, visits


class Scenario(NamedTuple):
    """`add_arguments(parser)` adds options; `build(arguments, channel, rng)` returns the plan."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    build: Callable[[argparse.Namespace, Any, np.random.Generator], LoadPlan]


SCENARIOS = dict(
    sorted(
        {
            module.__name__.rpartition(".")[2]: Scenario(module.SUMMARY, module.add_arguments, module.build)
            for module in (freshness, search, slow_clients, soak)
        }.items()
        | {
            name: Scenario(summary, visitors.add_arguments, partial(visits.build, name))
            for name, (summary, _) in visits.VISITS.items()
        }.items()
    )
)

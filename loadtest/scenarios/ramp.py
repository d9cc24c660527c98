"""Ramp: from nothing to twice the rates, in twenty steps.

The question: where do latencies begin to rise, and do answers stay the same until then?
"""

import argparse
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "rates that rise from nothing to twice what is asked for"
_STEPS = 20


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    parts = [(1 / _STEPS, 2 * (step + 1) / _STEPS) for step in range(_STEPS)]
    return Visitors(arguments, channel, rng).plan(recommend=parts, record=parts)

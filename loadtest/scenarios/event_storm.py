"""Event storm: ten times as many events in the middle of the run, and recommendations at the same rate.

The question: do answers stay in time while the stream is flooded, and how stale do they become (NOT_FRESH)?
"""

import argparse
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import MIDDLE, Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "ten times as many events in the middle of the run"


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    return Visitors(arguments, channel, rng).plan(record=list(zip(MIDDLE, (1.0, 10.0, 1.0), strict=True)))

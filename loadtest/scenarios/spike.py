"""Spike: ten times the rates, for the fifth of the run that is in its middle.

The question: what does a sudden crowd cost those who were there before, and how long does it last after it?
"""

import argparse
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import MIDDLE, Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "ten times the rates in the middle of the run"


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    parts = list(zip(MIDDLE, (1.0, 10.0, 1.0), strict=True))
    return Visitors(arguments, channel, rng).plan(recommend=parts, record=parts)

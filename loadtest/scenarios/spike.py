"""Spike: ten times the rates, in the middle fifth of the run.

The question: what does a sudden crowd cost the users before it, and how long does the effect last?
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

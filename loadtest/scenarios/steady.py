"""Steady: recommendations and event writes side by side, each at its own constant rate.

The question: what does Recommend cost while the stream is written at the system's design rate? Both kinds of calls go
to the gateway, from the same users, so reads meet changing states.
"""

import argparse
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "recommendations and event writes together, at constant rates"


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    return Visitors(arguments, channel, rng).plan()

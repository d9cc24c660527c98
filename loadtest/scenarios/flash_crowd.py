"""Flash crowd: three times the rates in the middle of the run, and every event is about one item.

The question: does one item, whose state then changes with every update, delay the others?
"""

import argparse
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import MIDDLE, Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "a crowd that is interested in one item alone"


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    visitors = Visitors(arguments, channel, rng)
    anyone, item_id = visitors.writer, visitors.item_ids[int(rng.integers(len(visitors.item_ids)))]
    visitors.writer = lambda: (anyone()[0], item_id)
    parts = list(zip(MIDDLE, (1.0, 3.0, 1.0), strict=True))
    return visitors.plan(recommend=parts, record=parts)

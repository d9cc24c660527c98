"""Cold cache: no user comes twice, so cached data of a user never helps.

The question: what is the cost of an answer without cached data? Every user writes one event, and asks once, later. Each
run has new users.
"""

import argparse
import itertools
import uuid
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "nobody comes twice"
_AHEAD = 500


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    visitors = Visitors(arguments, channel, rng)
    anyone, run, writes, reads = visitors.writer, uuid.uuid4().hex[:12], itertools.count(), itertools.count()
    visitors.writer = lambda: (f"loadtest-{run}-{next(writes)}", anyone()[1])
    visitors.reader = lambda: (f"loadtest-{run}-{next(reads)}", "")

    def set_up() -> None:
        visitors.write([visitors.event(*visitors.writer()) for _ in range(_AHEAD)])

    return visitors.plan(set_up=set_up)

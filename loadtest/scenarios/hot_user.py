"""Hot user: every second call is of one user (a crawler, a shared account, a forgotten test).

The question: does one user's queue delay the others? All events of one user are in one partition.
"""

import argparse
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "every second call is of one and the same user"


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    visitors = Visitors(arguments, channel, rng)
    anyone, hot = visitors.reader, visitors.user_ids[0]

    def draw() -> tuple[str, str]:
        user_id, item_id = anyone()
        return (hot if rng.random() < 0.5 else user_id), item_id

    visitors.reader = visitors.writer = draw
    return visitors.plan()

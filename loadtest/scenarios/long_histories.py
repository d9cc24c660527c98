"""Long histories: every user has a thousand interactions before the clock starts.

The question: what do long histories cost reads (seen items) and writes (the state is made of the newest)?
"""

import argparse
from typing import Any

import numpy as np

from loadtest.engine import LoadPlan
from loadtest.visitors import Visitors, add_arguments

__all__ = ["SUMMARY", "add_arguments", "build"]

SUMMARY = "users with a thousand interactions each"
_EVENTS, _MOST_USERS = 1_000, 100


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    if arguments.num_users > _MOST_USERS:
        arguments.num_users = _MOST_USERS
    visitors = Visitors(arguments, channel, rng)

    def set_up() -> None:
        for user_id in visitors.user_ids[:_MOST_USERS]:
            visitors.write([visitors.event(user_id, visitors.writer()[1]) for _ in range(_EVENTS)])

    return visitors.plan(set_up=set_up)

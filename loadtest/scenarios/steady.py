"""Steady: recommendations and event writes side by side, each at its own constant rate.

The question: what does Recommend cost while the stream is written at the rate the system is built for? Both kinds of
calls go to the gateway, from the same users, so reads meet states that are changing.
"""

import argparse
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from freshet.v1 import common_pb2, events_pb2, gateway_pb2

from loadtest.calls import gateway, recommended, streams
from loadtest.engine import LoadPlan
from loadtest.open_loop import ARRIVALS, arrivals
from loadtest.options import Option, add_options, check_options
from loadtest.population import Draws, Population, made_up_users, read_items, read_users
from loadtest.results import Outcome

SUMMARY = "recommendations and event writes together, at constant rates"
_OPTIONS = (
    Option("recommend-rate", 40.0, 0, 5_000, "Recommend calls a second", "PER_S"),
    Option("event-rate", 200.0, 0, 5_000, "interactions per second", "PER_S"),
    Option("k", 10, 1, 1_000, "recommendations per call"),
    Option("num-users", 200, 1, 1_000_000, "how many users to make up without --users"),
    Option("with-token", 0.0, 0, 1, "share of Recommend calls that carry the token of the user's last write", "SHARE"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _OPTIONS)
    parser.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="how calls are spread over time")
    parser.add_argument("--items", type=Path, default=Path(".freshet/bundle"), metavar="PATH",
                        help="bundle folder, items.parquet or a text file with one item id per line")  # fmt: skip
    parser.add_argument("--users", type=Path, metavar="PATH",
                        help="users.parquet or a text file; without it, users are made up")  # fmt: skip


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Raises: ValueError naming the option and what is allowed."""
    check_options(arguments, _OPTIONS)
    if arguments.recommend_rate == arguments.event_rate == 0:
        raise ValueError("--recommend-rate and --event-rate are both 0; nothing would be sent")
    item_ids, weights = read_items(arguments.items)
    user_ids = made_up_users(arguments.num_users) if arguments.users is None else read_users(arguments.users)
    population = Population(user_ids=user_ids, item_ids=item_ids, item_weights=weights)
    visitors = _Visitors(arguments, gateway(channel), Draws(population, rng), rng)
    return LoadPlan(
        streams=streams(
            {
                name: (arrivals(arguments.arrivals, rate_per_s=rate, seconds=arguments.seconds, rng=rng), call)
                for name, rate, call in (
                    ("recommend", arguments.recommend_rate, visitors.recommend),
                    ("record", arguments.event_rate, visitors.record),
                )
            }
        )
    )


class _Visitors:
    """Makes the calls of all users; remembers each user's last token where tokens are asked for."""

    def __init__(self, arguments: argparse.Namespace, stub: Any, draws: Draws, rng: np.random.Generator) -> None:
        self._k = arguments.k
        self._timeout_s = arguments.timeout_ms / 1e3
        self._token_share = arguments.with_token
        self._gateway = stub
        self._draws = draws
        self._rng = rng
        self._tokens: dict[str, common_pb2.FreshnessToken] = {}
        self._run = uuid.uuid4().hex[:12]
        self._num_written = 0

    def recommend(self) -> Outcome:
        user_id, _ = self._draws.draw()
        request = gateway_pb2.RecommendRequest(user_id=user_id, k=self._k)
        counts = []
        if self._token_share and user_id in self._tokens and self._rng.random() < self._token_share:
            request.freshness_token.CopyFrom(self._tokens[user_id])
            counts.append("token_sent")
        answer = self._gateway.Recommend(request, timeout=self._timeout_s)
        if counts and answer.token_honoured:
            counts.append("token_honoured")
        counts.append(f"state_{answer.state_source or 'unnamed'}")
        if len(answer.items) < self._k:
            counts.append("short_answers")
        return recommended(answer, counts)

    def record(self) -> Outcome:
        user_id, item_id = self._draws.draw()
        self._num_written += 1
        interaction = events_pb2.Interaction(
            event_id=f"loadtest-{self._run}-{self._num_written}",
            user_id=user_id,
            item_id=item_id,
            type="rating",
            value=float(self._num_written % 5 + 1),
        )
        interaction.event_time.FromNanoseconds(time.time_ns())
        request = gateway_pb2.RecordInteractionsRequest(interactions=[interaction])
        answer = self._gateway.RecordInteractions(request, timeout=self._timeout_s)
        if self._token_share:
            self._tokens[user_id] = answer.receipts[0].token
        return Outcome()

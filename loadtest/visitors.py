"""The visitors of most scenarios: users who get recommendations and write events, at rates that change over the run."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from freshet.v1 import common_pb2, events_pb2, gateway_pb2

from loadtest.engine import LoadPlan
from loadtest.open_loop import ARRIVALS, FloatArray, arrivals
from loadtest.options import Option, add_items, add_options, check_options
from loadtest.population import Draws, Population, made_up_users, read_items, read_users
from loadtest.requests import gateway, interaction, recommended, streams
from loadtest.results import Outcome

# Parts of a run: (share of its length, factor of the rate).
Parts = Sequence[tuple[float, float]]
STEADY: Parts = ((1.0, 1.0),)
# The subject of a call: (user id, item id).
Draw = Callable[[], tuple[str, str]]

_OPTIONS = (
    Option("recommend-rate", 40.0, 0, 5_000, "Recommend calls a second", "PER_S"),
    Option("event-rate", 200.0, 0, 5_000, "interactions per second", "PER_S"),
    Option("k", 10, 1, 1_000, "recommendations per call"),
    Option("num-users", 200, 1, 1_000_000, "how many users to make up without --users"),
    Option("with-token", 0.0, 0, 1, "share of Recommend calls that carry the token of the user's last write", "SHARE"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for rates, users and items."""
    add_options(parser, _OPTIONS)
    parser.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="how calls are spread over time")
    add_items(parser, "bundle folder, items.arrow or a text file with one item id per line")
    parser.add_argument("--users", type=Path, metavar="PATH",
                        help="users.parquet or a text file; without it, users are made up")  # fmt: skip


class Visitors:
    """Makes the calls of all users; stores each user's last token if tokens are requested.

    `reader` and `writer` return the next user and item; a scenario may replace them.
    Raises: ValueError naming the option and what is allowed.
    """

    def __init__(self, arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> None:
        check_options(arguments, _OPTIONS)
        if arguments.recommend_rate == arguments.event_rate == 0:
            raise ValueError("--recommend-rate and --event-rate are both 0; nothing would be sent")
        self.item_ids, weights = read_items(arguments.items)
        self.user_ids = made_up_users(arguments.num_users) if arguments.users is None else read_users(arguments.users)
        population = Population(user_ids=self.user_ids, item_ids=self.item_ids, item_weights=weights)
        self.reader: Draw = Draws(population, rng).draw
        self.writer = self.reader
        self.gateway = gateway(channel)
        self._arguments, self._rng = arguments, rng
        self._tokens: dict[str, common_pb2.FreshnessToken] = {}

    def plan(self, *, recommend: Parts = STEADY, record: Parts = STEADY, **more: Any) -> LoadPlan:
        """Return both kinds of calls at the options' rates times the run's parts; `more` goes to LoadPlan."""
        due = {
            name: (self._due(parts, rate), call)
            for name, parts, rate, call in (
                ("recommend", recommend, self._arguments.recommend_rate, self.recommend),
                ("record", record, self._arguments.event_rate, self.record),
            )
        }
        return LoadPlan(streams=streams(due), **more)

    def _due(self, parts: Parts, rate: float) -> FloatArray:
        due, began_s = [np.zeros(0)], 0.0
        for share, times in parts:
            seconds = share * self._arguments.seconds
            part = arrivals(self._arguments.arrivals, rate_per_s=times * rate, seconds=seconds, rng=self._rng)
            due.append(began_s + part)
            began_s += seconds
        return np.concatenate(due)

    def recommend(self) -> Outcome:
        user_id, _ = self.reader()
        request = gateway_pb2.RecommendRequest(user_id=user_id, k=self._arguments.k)
        counts = []
        share = self._arguments.with_token
        if share and user_id in self._tokens and self._rng.random() < share:
            request.freshness_token.CopyFrom(self._tokens[user_id])
            counts.append("token_sent")
        answer = self.gateway.Recommend(request, timeout=self._arguments.timeout_ms / 1e3)
        if counts and answer.token_honoured:
            counts.append("token_honoured")
        counts.append(f"state_{answer.state_source or 'unnamed'}")
        if len(answer.items) < self._arguments.k:
            counts.append("short_answers")
        return recommended(answer, counts)

    def record(self) -> Outcome:
        user_id, item_id = self.writer()
        answer = self.write([self.event(user_id, item_id)])
        if self._arguments.with_token:
            self._tokens[user_id] = answer.receipts[0].token
        return Outcome()

    def event(self, user_id: str, item_id: str) -> events_pb2.Interaction:
        """Return a rating of one to five stars that happens now."""
        return interaction(user_id, item_id, "rating", value=float(self._rng.integers(1, 6)))

    def write(self, interactions: Sequence[events_pb2.Interaction]) -> gateway_pb2.RecordInteractionsResponse:
        """Raises: grpc.RpcError."""
        request = gateway_pb2.RecordInteractionsRequest(interactions=interactions)
        answer: gateway_pb2.RecordInteractionsResponse = self.gateway.RecordInteractions(
            request, timeout=self._arguments.timeout_ms / 1e3
        )
        return answer

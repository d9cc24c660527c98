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
from freshet.v1 import common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc

from loadtest.engine import Plan, Stream
from loadtest.open_loop import ARRIVALS, arrivals
from loadtest.population import Draws, Population, made_up_users, read_items, read_users
from loadtest.results import Outcome

SUMMARY = "recommendations and event writes together, at constant rates"
_MAX_RATE_PER_S = 5_000.0
_STAGES = ("queue", "encode", "first_stage", "rerank", "transport")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recommend-rate", type=float, default=40.0, metavar="PER_S", help="Recommend calls a second")
    parser.add_argument("--event-rate", type=float, default=200.0, metavar="PER_S", help="interactions per second")
    parser.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="how calls are spread over time")
    parser.add_argument("--k", type=int, default=10, help="recommendations per call")
    parser.add_argument("--items", type=Path, default=Path(".freshet/bundle"), metavar="PATH",
                        help="bundle folder, items.parquet or a text file with one item id per line")  # fmt: skip
    parser.add_argument("--users", type=Path, metavar="PATH",
                        help="users.parquet or a text file; without it, users are made up")  # fmt: skip
    parser.add_argument("--num-users", type=int, default=200, help="how many users to make up without --users")
    parser.add_argument("--with-token", type=float, default=0.0, metavar="SHARE",
                        help="share of Recommend calls that carry the token of the user's last write")  # fmt: skip


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> Plan:
    """Raises: ValueError naming the option and what is allowed."""
    _check("--recommend-rate", arguments.recommend_rate, 0, _MAX_RATE_PER_S)
    _check("--event-rate", arguments.event_rate, 0, _MAX_RATE_PER_S)
    _check("--k", arguments.k, 1, 1_000)
    _check("--num-users", arguments.num_users, 1, 1_000_000)
    _check("--with-token", arguments.with_token, 0, 1)
    if arguments.recommend_rate == arguments.event_rate == 0:
        raise ValueError("--recommend-rate and --event-rate are both 0; nothing would be sent")
    item_ids, weights = read_items(arguments.items)
    user_ids = made_up_users(arguments.num_users) if arguments.users is None else read_users(arguments.users)
    population = Population(user_ids=user_ids, item_ids=item_ids, item_weights=weights)
    gateway = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
    visitors = _Visitors(arguments, gateway, Draws(population, rng), rng)
    streams = [
        Stream(
            name=name,
            arrivals_s=arrivals(arguments.arrivals, rate_per_s=rate, seconds=arguments.seconds, rng=rng),
            call=call,
        )
        for name, rate, call in (
            ("recommend", arguments.recommend_rate, visitors.recommend),
            ("record", arguments.event_rate, visitors.record),
        )
        if rate > 0
    ]
    return Plan(streams=streams)


class _Visitors:
    """Makes the calls of all users; remembers each user's last token where tokens are asked for."""

    def __init__(self, arguments: argparse.Namespace, gateway: Any, draws: Draws, rng: np.random.Generator) -> None:
        self._k = arguments.k
        self._timeout_s = arguments.timeout_ms / 1e3
        self._token_share = arguments.with_token
        self._gateway = gateway
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
        return Outcome(
            stages_ms={stage: getattr(answer.stage_times, f"{stage}_ms") for stage in _STAGES},
            degradations=[
                gateway_pb2.Degradation.Name(mark).removeprefix("DEGRADATION_") for mark in answer.degradations
            ],
            counts=counts,
        )

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


def _mark(degradation: gateway_pb2.Degradation) -> str:
    return str(gateway_pb2.Degradation.Name(degradation)).removeprefix("DEGRADATION_")


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value:g}; allowed: {low:g} to {high:g}")

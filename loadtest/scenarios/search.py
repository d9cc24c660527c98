"""Search: items by words at a constant rate, and whether a click changes the next answer.

Does Search maintain its latency while users also request recommendations, and does a choice for some words move the
item up for these words within seconds? A probe searches for its own words, lets a few users choose an item far down the
answer, and asks again until it has moved. It compares ranks in the source that learns, so it needs a stack with a text
model ("text_mol" loaded).
"""

import argparse
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from freshet.v1 import gateway_pb2

from loadtest.contract import at_most, p99_s
from loadtest.engine import LoadPlan
from loadtest.open_loop import ARRIVALS, arrivals
from loadtest.options import Option, add_items, add_options, check_options
from loadtest.population import Draws, Population, made_up_users, read_items, title_words
from loadtest.requests import degradations, gateway, interaction, streams
from loadtest.results import OK, Claim, Conclusion, Outcome, RunResults, SetUpError, percentiles_ms

SUMMARY = "items by words at a constant rate; a click has to change the next answer"
MAX_P99_MS = 60.0
MAX_CLICK_S = 5.0
LEARNS = "text_mol"
_DEPTH = 100
_CLICKERS = 3
# From this rank on, only clicks, not another order of ties, halve an item's rank.
_FROM_RANK = 10
# Number of interactions of each user before the clock starts, so that their searches are personal.
_HISTORY = 5
_AT_ONCE = 1_000
_KNOWN_WITHIN_S = 60.0


_OPTIONS = (
    Option("search-rate", 40.0, 0.1, 5_000, "Search calls a second", "PER_S"),
    Option("k", 10, 1, 1_000, "results per call"),
    Option("with-user", 0.5, 0, 1, "share of searches that are ordered for a user", "SHARE"),
    Option("num-users", 200, 1, 1_000_000, "how many users to make up"),
    Option("click-rate", 0.5, 0, 20, "click probes a second; 0: none", "PER_S"),
    Option("wait-seconds", 10.0, 0, 300, "how long a click's effect is looked for"),
    Option("poll-ms", 50.0, 5, 5_000, "how often it is looked for"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _OPTIONS)
    parser.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="how calls are spread over time")
    add_items(parser, "bundle folder or items.arrow: users' histories, titles to take words from")
    parser.add_argument("--queries", type=Path, metavar="PATH",
                        help="a text file with one query per line, instead of words of titles")  # fmt: skip


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Return the plan. Raises: ValueError naming the option and what is allowed."""
    check_options(arguments, _OPTIONS)
    words = read_queries(arguments.queries) if arguments.queries else title_words(arguments.items)
    if arguments.with_user:
        read_items(arguments.items)  # rejected here instead of during the set-up
    searchers = _Searchers(arguments, gateway(channel), words, rng)
    rows = {
        name: (arrivals(arguments.arrivals, rate_per_s=rate, seconds=arguments.seconds, rng=rng), call)
        for name, rate, call in (
            ("search", arguments.search_rate, searchers.search),
            ("click", arguments.click_rate, searchers.click),
        )
    }
    return LoadPlan(streams=streams(rows), set_up=searchers.set_up, conclude=searchers.conclude)


def read_queries(path: Path) -> list[list[str]]:
    """Return the lines of a text file. Raises: ValueError naming the path if it has none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"--queries={path} cannot be read: {exc}") from exc
    if not any(lines):
        raise ValueError(f"--queries={path} holds no query; expected one per line")
    return [[line] for line in lines if line]


def click_claim(lags_s: Sequence[float], *, unseen: int) -> Claim:
    """Claim a limit for the time from a click's acknowledgement to an answer in which the item has half its rank."""
    says = "seconds from a click's acknowledgement to a search that it changed, p99"
    return at_most(says, p99_s(lags_s), MAX_CLICK_S, unseen=unseen)


def latency_claim(latencies_ms: Sequence[float]) -> Claim:
    """Claim a limit for successful searches, from their due time."""
    return at_most("milliseconds of a search, p99", percentiles_ms(latencies_ms)["p99"], MAX_P99_MS)


class _Searchers:
    def __init__(
        self, arguments: argparse.Namespace, stub: Any, words: list[list[str]], rng: np.random.Generator
    ) -> None:
        self._options = arguments
        self._timeout_s = arguments.timeout_ms / 1e3
        self._gateway = stub
        self._words = words
        self._rng = rng
        self._users = made_up_users(arguments.num_users)
        self._lags_s: list[float] = []
        self._unseen: list[dict[str, Any]] = []
        self._sources: dict[str, str] = {}

    def set_up(self) -> None:
        """Find the sources, and give the users histories.

        Raises: SetUpError if no source answers, none learns from clicks, or users stay unknown.
        """
        request = gateway_pb2.GatewayServiceSearchRequest(query=self._query(), k=1)
        answer = self._gateway.Search(request, timeout=5)
        self._sources = {spent.source: spent.failure for spent in answer.sources}
        if self._options.click_rate and self._sources.get(LEARNS, "absent"):
            raise SetUpError(
                f"source {LEARNS} does not answer ({self._sources.get(LEARNS, 'absent')}), and nothing else learns "
                "from clicks; start the stack with a text bundle, or --click-rate 0"
            )
        if self._options.with_user:
            self._make_users_known()

    def _make_users_known(self) -> None:
        """Write the users' histories, and wait for an answer ordered for the last one."""
        item_ids, weights = read_items(self._options.items)
        draws = Draws(Population(user_ids=["anybody"], item_ids=item_ids, item_weights=weights), self._rng)
        histories = [interaction(user_id, draws.draw()[1], "view") for user_id in self._users for _ in range(_HISTORY)]
        for start in range(0, len(histories), _AT_ONCE):
            request = gateway_pb2.RecordInteractionsRequest(interactions=histories[start : start + _AT_ONCE])
            self._gateway.RecordInteractions(request, timeout=10)
        last = gateway_pb2.GatewayServiceSearchRequest(query=self._query(), user_id=self._users[-1], k=1)
        until = time.monotonic() + _KNOWN_WITHIN_S
        while not self._gateway.Search(last, timeout=5).model_version:
            if time.monotonic() > until:
                raise SetUpError(
                    f"user {last.user_id} is not known to the stack {_KNOWN_WITHIN_S:g} s after {_HISTORY} "
                    "interactions; is the encoder running? --with-user 0 searches for nobody"
                )
            time.sleep(0.1)

    def search(self) -> Outcome:
        user_id = ""
        if self._rng.random() < self._options.with_user:
            user_id = self._users[int(self._rng.integers(len(self._users)))]
        request = gateway_pb2.GatewayServiceSearchRequest(query=self._query(), user_id=user_id, k=self._options.k)
        answer = self._gateway.Search(request, timeout=self._timeout_s)
        counts = ["for_a_user" if answer.model_version else "for_everybody"]
        if not answer.results:
            counts.append("empty_answers")
        return Outcome(
            stages_ms={spent.source: spent.milliseconds for spent in answer.sources if not spent.failure},
            degradations=degradations(answer),
            counts=counts,
        )

    def click(self) -> Outcome:
        """Run one probe, from the first search to the answer that has changed."""
        query = f"{self._query()} {self._query()}"
        ranks = self._ranks(query)
        behind = [item_id for item_id, rank in ranks.items() if rank >= _FROM_RANK]
        if not behind:
            return Outcome(counts=["probes_that_found_too_little"])
        item_id = behind[int(self._rng.integers(len(behind)))]
        clickers = [f"loadtest-clicker-{uuid.uuid4().hex}" for _ in range(_CLICKERS)]
        clicks = [interaction(user_id, item_id, "search_click", value=1.0, query=query) for user_id in clickers]
        self._gateway.RecordInteractions(
            gateway_pb2.RecordInteractionsRequest(interactions=clicks), timeout=max(self._timeout_s, 2.0)
        )
        acknowledged = time.monotonic()
        rank = ranks[item_id]
        while time.monotonic() - acknowledged < self._options.wait_seconds:
            rank = self._ranks(query).get(item_id, _DEPTH)
            if rank <= ranks[item_id] // 2:
                self._lags_s.append(time.monotonic() - acknowledged)
                return Outcome(counts=["clicks_seen"])
            time.sleep(self._options.poll_ms / 1e3)
        self._unseen.append({"query": query, "item_id": item_id, "from_rank": ranks[item_id], "to_rank": rank})
        return Outcome(counts=["clicks_unseen"])

    def conclude(self, results: RunResults) -> Conclusion:
        """Return both claims, and the sources."""
        latencies_ms = [call.latency_ms for call in results.measured("search") if call.status == OK]
        return Conclusion(
            claims=[latency_claim(latencies_ms), click_claim(self._lags_s, unseen=len(self._unseen))],
            findings={
                "sources": {source: failure or "answers" for source, failure in sorted(self._sources.items())},
                "click_to_answer_ms": percentiles_ms([lag_s * 1e3 for lag_s in self._lags_s]),
                "probes": len(self._lags_s) + len(self._unseen),
                "unseen": len(self._unseen),
                "unseen_probes": self._unseen,
                "poll_ms": self._options.poll_ms,
            },
        )

    def _query(self) -> str:
        """Return up to four successive words of one title, or a whole query of a file."""
        words = self._words[int(self._rng.integers(len(self._words)))]
        start = int(self._rng.integers(len(words)))
        return " ".join(words[start : start + 4]).encode()[:512].decode(errors="ignore")

    def _ranks(self, query: str) -> dict[str, int]:
        request = gateway_pb2.GatewayServiceSearchRequest(query=query, k=_DEPTH)
        answer = self._gateway.Search(request, timeout=max(self._timeout_s, 2.0))
        return {
            result.item_id: found.rank
            for result in answer.results
            for found in result.found_by
            if found.source == LEARNS
        }

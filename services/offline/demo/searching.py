"""The demo's search: a user searches for a word, chooses an item far down, and the same search answers differently:
within a second the choice is part of the user's history.

The word is a pure function of titles and history; the rest are real calls of the gateway.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freshet.v1 import events_pb2, gateway_pb2
from freshet_client import FreshetError

from services.offline.demo.calls import connected

K = 10
_RECENT = 30
# Titles with the word: enough to choose among, few enough to be specific.
_TITLES_WANTED = range(5, 60)
_MIN_LETTERS = 4
_WAIT_S = 10.0
# The first call connects to the generator, which may exceed a source's time limit.
_PATIENCE_S = 30.0
_LOOK_AGAIN_S = 0.2


@dataclass(kw_only=True)
class Searched:
    """seconds: from the acknowledged choice to the second answer."""

    user_id: str
    query: str
    before: gateway_pb2.GatewayServiceSearchResponse
    chosen: str = ""
    after: gateway_pb2.GatewayServiceSearchResponse | None = None
    seconds: float | None = None

    def rank(self, answer: gateway_pb2.GatewayServiceSearchResponse | None) -> int | None:
        """Return the chosen item's rank, from 1."""
        return _ranks(answer).get(self.chosen)

    @property
    def moved(self) -> int:
        """Items of the first answer with another rank in the second."""
        now = _ranks(self.after)
        return sum(now.get(item_id) != rank for item_id, rank in _ranks(self.before).items())

    @property
    def rescored(self) -> int:
        """Items whose similarity to the user changed."""
        was, now = _similarities(self.before), _similarities(self.after)
        return sum(was[item_id] != now[item_id] for item_id in was.keys() & now.keys())

    @property
    def sources(self) -> list[str]:
        """The first answer's sources."""
        return [spent.source for spent in self.before.sources if not spent.failure]

    def summary(self) -> dict[str, Any]:
        """Return the summary's entry, without the user's id."""
        return {
            "query": self.query,
            "found": len(self.before.results),
            "sources": self.sources,
            "degradations": sorted({*_degradations(self.before), *_degradations(self.after)}),
            "milliseconds": round(self.before.total_ms, 3),
            "chosen": self.chosen or None,
            "place_before": self.rank(self.before),
            "place_after": self.rank(self.after),
            "moved": None if self.after is None else self.moved,
            "rescored": None if self.after is None else self.rescored,
            "seconds_to_the_changed_answer": None if self.seconds is None else round(self.seconds, 3),
        }


def choose_query(titles: Mapping[str, str], history: Sequence[str]) -> str | None:
    """Return the word in most titles of the user's recent items, among those that some but not many titles have; None
    if no word fits. `history`: item ids, oldest first.
    """
    holding = Counter(word for title in titles.values() for word in set(_words(title)))
    mine = Counter(word for item_id in history[-_RECENT:] for word in set(_words(titles.get(item_id, ""))))
    fitting = [word for word in mine if holding[word] in _TITLES_WANTED]
    return min(fitting, key=lambda word: (-mine[word], -holding[word], word), default=None)


def ask_choose_ask(user_id: str, query: str, *, run_id: str, gateway: str) -> Searched:
    """Search, record the choice of the last result, search again once the user's state reflects it."""
    with connected(gateway) as call:

        def look() -> gateway_pb2.GatewayServiceSearchResponse:
            request = gateway_pb2.GatewayServiceSearchRequest(query=query, user_id=user_id, k=K)
            deadline = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    answer: gateway_pb2.GatewayServiceSearchResponse = call("Search", request)
                    return answer
                except FreshetError as error:
                    if not error.retriable or time.monotonic() > deadline:
                        raise
                    time.sleep(_LOOK_AGAIN_S)

        found = Searched(user_id=user_id, query=query, before=look())
        if not found.before.results:
            return found
        found.chosen = found.before.results[-1].item_id
        click = events_pb2.Interaction(
            event_id=f"{run_id}-search-click",
            user_id=user_id,
            item_id=found.chosen,
            type="search_click",
            value=1.0,
            query=query,
        )
        recorded = call("RecordInteractions", gateway_pb2.RecordInteractionsRequest(interactions=[click]))
        acknowledged = time.monotonic()
        # With the token this call waits until the choice is in the user's state.
        reached = gateway_pb2.RecommendRequest(user_id=user_id, k=1, freshness_token=recorded.receipts[0].token)
        if call("Recommend", reached, timeout_s=_WAIT_S).token_honoured:
            found.after = look()
            found.seconds = time.monotonic() - acknowledged
    return found


def report(found: Searched) -> list[str]:
    """Return the result as sentences."""
    items = found.before.results
    if not items:
        return [f"{found.query!r} finds nothing"]
    named = {result.item_id: result.title or result.item_id for result in items}
    says = [
        f"{found.query!r} finds {len(items)} items for user {found.user_id} by {', '.join(found.sources)} in "
        f"{found.before.total_ms:.0f} ms: {'; '.join(list(named.values())[:3])}",
        f"chosen: {named[found.chosen]}, at rank {found.rank(found.before)}",
    ]
    if found.seconds is None:
        return [*says, "the choice was not in the user's state in time"]
    rank = found.rank(found.after)
    where = f"at rank {rank}" if rank else f"not among the first {K}"
    return [
        *says,
        f"{found.seconds * 1000:.0f} ms after the choice was acknowledged it is {where}; "
        f"{found.moved} of {len(items)} ranks and {found.rescored} similarities changed",
    ]


def _ranks(answer: gateway_pb2.GatewayServiceSearchResponse | None) -> dict[str, int]:
    return {} if answer is None else {result.item_id: rank for rank, result in enumerate(answer.results, start=1)}


def _similarities(answer: gateway_pb2.GatewayServiceSearchResponse | None) -> dict[str, float]:
    return {
        result.item_id: found.score
        for result in (() if answer is None else answer.results)
        for found in result.found_by
        if found.source == "mol"
    }


def _degradations(answer: gateway_pb2.GatewayServiceSearchResponse | None) -> list[str]:
    found = () if answer is None else answer.degradations
    return [gateway_pb2.Degradation.Name(one).removeprefix("DEGRADATION_").lower() for one in found]


def _words(title: str) -> list[str]:
    return [word for word in re.findall(r"[^\W\d_]+", title.lower()) if len(word) >= _MIN_LETTERS]

"""The freshness contract as claims about a run's observations: lags, new items, tokens, and their cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freshet.v1 import common_pb2, gateway_pb2

from .results import Claim, Conclusion, percentiles_ms
from .windows import Window, ratio

MAX_LAG_S = 2.0
MAX_NEW_ITEM_S = 5.0
MAX_COST = 1.3

Part = tuple[str, Claim, dict[str, Any]]


def conclude(*parts: Part) -> Conclusion:
    """Return the parts as one conclusion."""
    return Conclusion(claims=[claim for _, claim, _ in parts], findings={name: found for name, _, found in parts})


def at_most(says: str, value: float | None, limit: float, *, unseen: int | None = None) -> Claim:
    """Claim that `value` is at most `limit`; if probes were sent, none of them may be `unseen`."""
    return Claim(
        says=says,
        value=value,
        allowed=f"at most {limit:g}" + ("" if unseen is None else ", every probe seen"),
        held=None if value is None and not unseen else value is not None and value <= limit and not unseen,
    )


def all_of(says: str, num: int, total: int) -> Claim:
    """Claim that `num` is all of `total`. A total of 0 claims nothing."""
    share = num / total if total else None
    return Claim(says=says, value=share, allowed="1", held=None if share is None else share == 1.0)


def p99_s(seconds: Sequence[float]) -> float | None:
    """Return the 99th percentile; None without values."""
    found = percentiles_ms([value * 1e3 for value in seconds])["p99"]
    return None if found is None else found / 1e3


def lag(lags_s: Sequence[float], *, unseen: int, told_s: Sequence[float], poll_ms: float) -> Part:
    """Claim a limit for the time from an event's acknowledgement to another user's answer that shows it.

    told_s: lags reported by the index.
    """
    says = "seconds from an event's acknowledgement to an answer that everybody gets from it, p99"
    found = {
        "served_ms": percentiles_ms([lag_s * 1e3 for lag_s in lags_s]),
        "probes": len(lags_s),
        "unseen": unseen,
        "poll_ms": poll_ms,
        "told_by_the_index_ms": percentiles_ms([seconds * 1e3 for seconds in told_s]),
        "changes_of_the_index": len(told_s),
    }
    return "event_to_index", at_most(says, p99_s(lags_s), MAX_LAG_S, unseen=unseen), found


def new_items(found_s: Sequence[float | None], *, waited_s: float, top: int) -> Part:
    """Claim that every user finds every new item in time.

    found_s: seconds from an item's third interaction to a user's top; None: not within `waited_s`.
    """
    known = [seconds for seconds in found_s if seconds is not None]
    in_time = sum(seconds <= MAX_NEW_ITEM_S for seconds in known)
    says = (
        f"share of users who like near items with a new one in their top {top} within {MAX_NEW_ITEM_S:g} s of its "
        "third interaction"
    )
    found = {
        "users": len(found_s),
        "in_time": in_time,
        "milliseconds": percentiles_ms([seconds * 1e3 for seconds in known]),
        "not_found": len(found_s) - len(known),
        "waited_seconds": waited_s,
    }
    return "new_items", all_of(says, in_time, len(found_s)), found


def tokens(verdicts: Mapping[str, int], *, unanswered: int) -> Part:
    """Claim that every answer honours its token or says that it could not.

    verdicts: answers by `judge_token`; unanswered: failed calls, which claim nothing.
    """
    answers = sum(verdicts.values())
    kept = verdicts.get("honoured", 0) + verdicts.get("said_so", 0)
    says = f"share of {answers:,} answers to a token that honour it or say that they could not"
    found = {"answers": answers, "unanswered": unanswered, "verdicts": dict(sorted(verdicts.items()))}
    return "tokens", all_of(says, kept, answers), found


def judge_token(token: common_pb2.FreshnessToken, item_id: str, answer: gateway_pb2.RecommendResponse) -> str:
    """Return "honoured", "said_so", or why the answer's claim is false.

    A claim is false if the state is older than the token, if the answer still recommends the recorded item, or if it
    neither honours the token nor says so.
    """
    said_so = gateway_pb2.DEGRADATION_TOKEN_NOT_HONOURED in answer.degradations
    if not answer.token_honoured:
        return "said_so" if said_so else "silently_not_honoured"
    if said_so:
        return "both_honoured_and_not"
    if not answer.HasField("state_position"):
        return "honoured_without_a_state"
    position = answer.state_position
    if position.partition != token.partition or position.offset < token.offset:
        return "honoured_from_an_older_state"
    if any(scored.item_id == item_id for scored in answer.items):
        return "recommends_what_was_recorded"
    return "honoured"


def cost(p99s_ms: Sequence[float], windows: Sequence[Window]) -> Part:
    """Claim a limit for the ratio of Recommend's p99 with refresh to without; p99s_ms: by window, NaN without calls."""
    found = ratio(p99s_ms, windows)
    says = "Recommend p99 beside a working refresher over beside a stopped one, median of neighbouring windows"
    table = [
        {"pair": window.pair, "refresh": window.treated, "p99_ms": None if math.isnan(p99) else round(p99, 3)}
        for window, p99 in zip(windows, p99s_ms, strict=True)
    ]
    return (
        "refresh_cost",
        at_most(says, None if found is None else round(found.median, 4), MAX_COST),
        {
            "ratios": [] if found is None else found.per_pair,
            "interval_95": None if found is None else [round(found.low, 4), round(found.high, 4)],
            "windows": table,
        },
    )


@dataclass(slots=True)
class _Item:
    score: float | None = None
    evidence: int = 0
    written_s: float | None = None


@dataclass(slots=True)
class ProbeBoard:
    """Items in rotation; each has at most one pending interaction."""

    item_ids: list[str]
    lags_s: list[float] = field(default_factory=list)
    _items: dict[str, _Item] = field(init=False)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._items = {item_id: _Item() for item_id in self.item_ids}

    def baseline(self, item_id: str, score: float, evidence: int) -> None:
        """Set the item's served score and evidence before its interaction."""
        self._items[item_id] = _Item(score=score, evidence=evidence)

    def take(self) -> str | None:
        """Return the next item to write to; None while all are pending or have no baseline."""
        for _ in self.item_ids:
            item_id = self.item_ids[self._turn % len(self.item_ids)]
            self._turn += 1
            item = self._items[item_id]
            if item.written_s is None and item.score is not None:
                return item_id
        return None

    def written(self, item_id: str, now_s: float) -> None:
        """Record that the item's interaction was acknowledged at `now_s`."""
        self._items[item_id].written_s = now_s

    @property
    def under_way(self) -> list[str]:
        """Items whose interaction has not been seen yet."""
        return [item_id for item_id, item in self._items.items() if item.written_s is not None]

    def moved(self, item_id: str, score: float) -> bool:
        """Whether an answer has another score than before."""
        item = self._items[item_id]
        return item.written_s is not None and score != item.score

    def confirm(self, item_id: str, score: float, evidence: int, seen_s: float) -> bool:
        """Handle a score that changed at `seen_s`; return True and record the lag if the evidence has grown too.

        A score may change for another reason, such as the memory's votes: then it is the new baseline.
        """
        item = self._items[item_id]
        item.score = score
        if item.written_s is None or evidence <= item.evidence:
            return False
        self.lags_s.append(seen_s - item.written_s)
        item.evidence, item.written_s = evidence, None
        return True

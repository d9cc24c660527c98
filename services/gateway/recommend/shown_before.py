"""What a user was shown lately, and what follows: items left out for a while, and scores that impressions lower.

An impression takes d from its item's score for that person, half of it after a half-life, a quarter after two. It never
counts as liking, and other people's scores do not change. The order stays exact: of the K + |S| best, where S are the
items with a discount, the best K after discounts are the best K of the whole catalogue, since K of those K + |S| have
none and whatever was left out scores below them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from services.algorithms.scoring import impressions
from services.gateway.domain import NotAgain, Ranking

MAX_ANSWERS, MAX_ITEMS_OF_ANSWER = 50, 200
ANSWERS_KEPT_S = 24 * 3600
MAX_IMPRESSIONS = 100
# The most items that a person has discounts for, the latest; the answer is searched that much deeper.
MAX_DISCOUNTED = 1_000
# Then a discount is below a thousandth.
HALF_LIVES_KEPT = 10
_TIME_BYTES = 6


def packed_items(shown_ms: int, item_ids: Iterable[str]) -> bytes:
    """An entry: Unix milliseconds, and what was shown."""
    return shown_ms.to_bytes(_TIME_BYTES, "big") + "\0".join(item_ids).encode()


def _unpacked(entry: bytes) -> tuple[int, list[str]]:
    return int.from_bytes(entry[:_TIME_BYTES], "big"), entry[_TIME_BYTES:].decode().split("\0")


def not_again(entries: Sequence[bytes], asked: NotAgain, now_ms: int) -> list[str]:
    """The items to leave out, of entries that are newest first."""
    found: dict[str, None] = {}
    for number, (shown_ms, item_ids) in enumerate(map(_unpacked, entries)):
        if number < asked.answers or now_ms - shown_ms < asked.minutes * 60_000:
            found.update(dict.fromkeys(item_ids))
    return list(found)


def discounts_of(entries: Sequence[bytes], now_ms: int, *, discount: float, half_life_s: float) -> dict[str, float]:
    """By item what its impressions take from its score: discount · Σ 2^(-age / half-life). entries: newest first."""
    found: Counter[str] = Counter()
    # An impression that was sent again made an equal entry.
    for shown_ms, item_ids in map(_unpacked, dict.fromkeys(entries)):
        if len(found) >= MAX_DISCOUNTED:
            break
        weight = float(impressions.discount((now_ms - shown_ms) / 1000, each=discount, half_life_s=half_life_s))
        for item_id in item_ids:
            found[item_id] += weight  # type: ignore[assignment]
    return dict(found.most_common(MAX_DISCOUNTED))


def discounted(ranking: Ranking, discounts: Mapping[str, float], k: int) -> Ranking:
    """The best k after discounts, of the k + |discounts| best."""
    items = [replace(item, score=item.score - discounts.get(item.item_id, 0.0)) for item in ranking.items]
    items.sort(key=lambda item: -item.score)
    return replace(ranking, items=items[:k])

"""A user's recent exposures: items to leave out, and discounts of scores by impressions.

A discount halves with each half-life. The order stays exact. With |S| discounted items, a search returns the K + |S|
best. At least K of these have no discount, and omitted items score below those K, so no omitted item is among the K
best.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from services.gateway.domain import NotAgain, Ranking

MAX_ANSWERS, MAX_ITEMS_OF_ANSWER = 50, 200
ANSWERS_TTL_S = 24 * 3600
MAX_IMPRESSIONS = 100
# Limit of discounted items per user. For each, a search returns one more item.
MAX_DISCOUNTED = 1_000
# After so many half-lives, less than a thousandth of a discount is left.
TTL_HALF_LIVES = 10
_TIME_BYTES = 6


def packed_items(shown_ms: int, item_ids: Iterable[str]) -> bytes:
    """Return an entry: Unix milliseconds, and the shown items."""
    return shown_ms.to_bytes(_TIME_BYTES, "big") + "\0".join(item_ids).encode()


def _unpacked(entry: bytes) -> tuple[int, list[str]]:
    return int.from_bytes(entry[:_TIME_BYTES], "big"), entry[_TIME_BYTES:].decode().split("\0")


def not_again(entries: Sequence[bytes], asked: NotAgain, now_ms: int) -> list[str]:
    """Return the items to leave out. entries: newest first."""
    found: dict[str, None] = {}
    for number, (shown_ms, item_ids) in enumerate(map(_unpacked, entries)):
        if number < asked.answers or now_ms - shown_ms < asked.minutes * 60_000:
            found.update(dict.fromkeys(item_ids))
    return list(found)


def discounts_of(entries: Sequence[bytes], now_ms: int, *, discount: float, half_life_s: float) -> dict[str, float]:
    """Return each item's discount: discount · Σ 2^(-age / half-life). entries: newest first."""
    found: Counter[str] = Counter()
    # A repeated impression has an equal entry and counts once.
    for shown_ms, item_ids in map(_unpacked, dict.fromkeys(entries)):
        if len(found) >= MAX_DISCOUNTED:
            break
        weight = discount * 2 ** (-max(0.0, (now_ms - shown_ms) / 1000) / half_life_s)
        for item_id in item_ids:
            found[item_id] += weight  # type: ignore[assignment]
    return dict(found.most_common(MAX_DISCOUNTED))


def discounted(ranking: Ranking, discounts: Mapping[str, float], k: int) -> Ranking:
    """Return the k best after discounts. ranking: the k + |discounts| best."""
    items = [replace(item, score=item.score - discounts.get(item.item_id, 0.0)) for item in ranking.items]
    items.sort(key=lambda item: -item.score)
    return replace(ranking, items=items[:k])

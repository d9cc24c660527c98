"""What the stream says is popular reaches answers, and goes on to be answered while the state store is away."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from structlog.testing import capture_logs

from services.algorithms.items.popularity import level_of
from services.algorithms.rules.filters import ItemFilter
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.popular_now import faded_counts, follow_popularity
from services.platform.errors import DependencyUnavailable
from services.user_state.values import Popularity

NOW_MS, HOUR_S = 1_800_000_000_000, 3600.0


def catalogue() -> PopularItems:
    return PopularItems(["a", "b", "c"], np.array([1_000, 100, 0]), [("x",), (), ("x",)])


def order(popular: PopularItems) -> list[str]:
    return [item.item_id for item in popular.top(10, ItemFilter(), [], 0)]


def partition(**taken: float) -> Popularity:
    """Each item taken so often two half-lives ago."""
    ago_ms = NOW_MS - 2 * 3_600_000
    return Popularity(half_life_s=HOUR_S, levels={item: level_of(n, ago_ms, HOUR_S) for item, n in taken.items()})


def test_partitions_add_up_and_fade() -> None:
    popular = catalogue()
    popular.take(faded_counts([partition(c=80.0), partition(b=60.0, c=60.0)], NOW_MS))
    # Training's 1,000 and 100 count 30 and 3; 140 and 60 of two half-lives ago 35 and 15.
    found = popular.top(10, ItemFilter(), [], 0)
    assert [item.item_id for item in found] == ["c", "a", "b"]
    assert [item.score * 83 for item in found] == pytest.approx([35, 30, 18])
    assert [item.item_id for item in popular.top(1, ItemFilter(allow_categories=("x",)), [], 0)] == ["c"]


@pytest.mark.parametrize("failure", [DependencyUnavailable("Redis does not answer"), ValueError("half a reply")])
async def test_the_last_answer_stands_while_there_is_no_other_and_equal_failures_are_logged_once(
    failure: Exception,
) -> None:
    popular, reads = catalogue(), 0
    answers: list[Sequence[Popularity] | Exception] = [[partition(c=9_000.0)], failure, failure, [partition(b=9_000.0)]]

    async def read() -> Sequence[Popularity]:
        nonlocal reads
        answer = answers[min(reads, len(answers) - 1)]
        reads += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    following = asyncio.create_task(follow_popularity(read, popular, every_s=0.001, clock_ms=lambda: NOW_MS))
    seen = []
    with capture_logs() as logs:
        async with asyncio.timeout(10):
            while not seen or seen[-1] != "b":
                first = order(popular)[0]
                if not seen or seen[-1] != first:
                    seen.append(first)
                await asyncio.sleep(0)
    following.cancel()
    assert [one["reason"] for one in logs if one["event"] == "popularity_not_read"] == [str(failure)]
    assert seen in (["a", "c", "b"], ["c", "b"])
    assert reads >= 4

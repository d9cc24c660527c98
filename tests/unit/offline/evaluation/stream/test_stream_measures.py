"""Rates by kind of event, and intervals that know that events of one item are not independent."""

import numpy as np
import pytest
from stream_scene import interactions_of

from services.offline.evaluation.stream.measures import EventColumns, columns, estimates, joined, kinds
from services.offline.evaluation.stream.page import sliding_rate
from services.offline.evaluation.stream.walk import IntArray, StreamSetting, stream_setting


def _table(items: list[int]) -> EventColumns:
    count = len(items)
    return EventColumns(
        items=np.array(items),
        places=np.arange(count),
        nth=np.ones(count, dtype=np.int64),
        past_events=np.ones(count, dtype=np.int64),
        past_of_user=np.ones(count, dtype=np.int64),
        predictable=np.ones(count, dtype=bool),
    )


def _setting() -> StreamSetting:
    """Ten events before the split and ten after; item 2 is new in the stream."""
    items = [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 2, 0, 2, 2, 1, 2, 0, 2, 1, 2]
    users = [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 0, 6, 1, 6, 2, 7, 7, 3, 8, 8]
    data = interactions_of(users, items, 10**9 + 40_000 * np.arange(20), np.ones(20), (9, 3))
    return stream_setting(data, seed=0, withheld_share=0, stream_share=0.5)


def test_columns_count_what_was_there_before_each_event() -> None:
    setting = _setting()
    table = columns(setting, np.arange(setting.num_streamed), np.ones(setting.num_streamed, dtype=bool))
    assert table.nth.tolist() == [1, 1, 2, 3, 1, 4, 2, 5, 2, 6]
    assert table.past_events.tolist() == [0, 6, 0, 0, 4, 0, 6, 0, 4, 0]
    assert table.past_of_user.tolist() == [2, 0, 2, 0, 1, 0, 0, 2, 0, 0]


def test_kinds_divide_the_predictable_events() -> None:
    setting = _setting()
    predictable = np.ones(setting.num_streamed, dtype=bool)
    predictable[4] = False
    found = kinds(columns(setting, np.arange(setting.num_streamed), predictable))
    assert found["all"].tolist() == predictable.tolist()
    for parts in (("new items", "items of the training"), ("users of the training", "users new in the stream")):
        assert sum(found[part].astype(int) for part in parts).tolist() == predictable.astype(int).tolist()
    ages = sum(mask.astype(int) for kind, mask in found.items() if kind.startswith("new item's interaction"))
    assert ages.tolist() == found["new items"].astype(int).tolist()
    assert found["new items, from their 3rd interaction"].sum() == 4


def test_an_interval_is_as_wide_as_items_differ_not_as_events_are_many() -> None:
    # 20 items with 500 events each, all hits or all misses: 20 coins, not 10,000.
    items = np.repeat(np.arange(20), 500)
    ranks: IntArray = np.where(items % 2 == 0, 0, 100)
    found = estimates(_table(items.tolist()), {"model": ranks}, np.ones(len(items), dtype=bool), seed=0)
    mean, low, high = found["model"]["hr@10"]
    assert mean == 0.5
    by_coins = 1.96 * 0.5 / np.sqrt(20)
    assert high - mean == pytest.approx(by_coins, rel=0.25)
    assert mean - low == pytest.approx(by_coins, rel=0.25)


def test_one_item_in_several_seeds_is_one_cluster() -> None:
    items = list(range(30)) * 3
    ranks: IntArray = np.where(np.array(items) % 3 == 0, 0, 100)
    thrice = joined([_table(items[:30])] * 3)
    once = estimates(_table(items[:30]), {"model": ranks[:30]}, np.ones(30, dtype=bool), seed=5)
    found = estimates(thrice, {"model": ranks}, np.ones(90, dtype=bool), seed=5)
    assert found["model"]["hr@10"] == pytest.approx(once["model"]["hr@10"])


def test_a_difference_is_paired_on_the_same_items() -> None:
    rng = np.random.default_rng(7)
    items = rng.integers(0, 40, 4000)
    # Items differ wildly, and one contender is better by one rank everywhere.
    base: IntArray = rng.integers(0, 400, 40)[items]
    mask = np.ones(len(items), dtype=bool)
    ranks = {"worse": base + 1, "better": base}
    _, low, high = estimates(_table(items.tolist()), ranks, mask, minus="worse", seed=1)["better"]["mrr"]
    _, alone_low, alone_high = estimates(_table(items.tolist()), ranks, mask, seed=1)["better"]["mrr"]
    assert low > 0
    assert high - low <= alone_high - alone_low
    same = estimates(_table(items.tolist()), {"a": base, "b": base}, mask, minus="a", seed=1)["b"]["mrr"]
    assert same == [0, 0, 0]


def test_no_events_make_no_estimate() -> None:
    assert estimates(_table([1, 2]), {"model": np.zeros(2, dtype=np.int64)}, np.zeros(2, dtype=bool), seed=0) == {}


def test_a_sliding_rate_is_the_mean_of_its_window() -> None:
    places = np.random.default_rng(0).permutation(1000)
    hits = places < 500
    found = sliding_rate(places, hits, centres=np.array([100.0, 500.0, 900.0, 5000.0]), width=200)
    assert found[:3] == pytest.approx([1.0, 0.5, 0.0], abs=0.01)
    assert np.isnan(found[3])

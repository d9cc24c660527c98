"""The demo's arithmetic, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from services.offline.demo.plan import answered_ranks, hit_rate, percentile, percentiles, rolling_rate
from services.offline.demo.summary import hit_rates


def test_a_hit_is_the_item_among_the_first_ten() -> None:
    answer = [str(n) for n in range(20)]
    ranks = answered_ranks([answer, answer, answer, []], ["0", "9", "10", "0"])
    assert ranks[:3].tolist() == [0, 9, 10]
    assert hit_rates({"model": ranks})[1]["model"].tolist() == [True, True, False, False]


def test_hit_rate_is_the_share_and_none_without_predictions() -> None:
    assert hit_rate(np.array([True, False, False, True])) == 0.5
    assert hit_rate(np.array([], dtype=bool)) is None


def test_a_missing_answer_cannot_shift_the_others() -> None:
    with pytest.raises(ValueError, match="2 answers for 3 events"):
        answered_ranks([["a"], ["b"]], ["a", "b", "c"])


def test_rolling_rate_looks_back_over_its_window_only() -> None:
    hit = np.array([True, True, False, False, True])
    assert rolling_rate(hit, window=2).tolist() == [1.0, 1.0, 0.5, 0.0, 0.5]
    assert rolling_rate(hit, window=100)[-1] == pytest.approx(3 / 5)


def test_percentiles_are_values_that_occurred() -> None:
    values = np.arange(1.0, 101.0)
    np.random.default_rng(0).shuffle(values)
    assert percentiles(values) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentile(np.array([7.0]), 0.99) == 7.0
    assert percentile(np.array([1.0, 2.0]), 0.99) == 2.0


def test_what_was_not_measured_is_none_and_not_a_number() -> None:
    assert percentile(np.array([]), 0.5) is None
    assert percentile(np.array([math.nan, 3.0]), 0.5) == 3.0

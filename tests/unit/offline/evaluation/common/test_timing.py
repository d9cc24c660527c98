"""Timing and recall that all benchmarks share."""

import time

import numpy as np
import pytest

from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.timing import Times


def test_calls_to_warm_up_are_made_and_not_counted() -> None:
    asked: list[int] = []
    times = Times.of(asked.append, range(7), warm_up=3)
    assert asked == list(range(7))
    assert len(times.wall) == len(times.cpu) == 4


def test_waiting_costs_time_and_no_processor() -> None:
    times = Times()
    assert times.call(lambda seconds: time.sleep(seconds) or "answer", 0.05) == "answer"  # type: ignore[func-returns-value]
    assert times.wall[0] >= 0.05
    assert times.cpu[0] < times.wall[0]


def test_median_and_quantiles_are_in_milliseconds() -> None:
    times = Times(wall=[0.001, 0.002, 0.003], cpu=[0.001, 0.001, 0.004])
    assert (times.median_ms, times.cpu_ms) == (2.0, 1.0)
    assert times.quantile_ms(0.95) == pytest.approx(2.9)


def test_recall_counts_exact_answers_in_any_order_and_no_filling() -> None:
    found = np.array([[3, 1, 9], [7, -1, -1], [5, 6, 7]])
    exact = np.array([[1, 2, 3], [7, 8, -1], [7, 6, 5]])
    assert recall(found, exact) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert recall([["a", "b"]], [["b"]]) == 1.0
    assert recall([[1]], [[]]) == 0.0


def test_another_number_of_queries_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        recall([[1]], [[1], [2]])

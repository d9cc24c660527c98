"""Ranking metrics against cases small enough to do by hand."""

import math

import numpy as np
import pytest

from services.offline.evaluation.engine.metrics import METRICS, gains, summary, target_ranks


def test_a_rank_counts_the_allowed_items_that_score_higher() -> None:
    scores = np.array([[0.9, 0.5, 0.7, 0.1], [0.9, 0.5, 0.7, 0.1]])
    seen = np.array([[False] * 4, [True, False, False, False]])
    assert target_ranks(scores, np.array([1, 1]), seen).tolist() == [2, 1]


def test_equal_scores_are_ordered_by_item_index() -> None:
    scores = np.zeros((3, 3))
    assert target_ranks(scores, np.array([0, 1, 2]), np.zeros((3, 3), dtype=bool)).tolist() == [0, 1, 2]


def test_a_target_that_was_seen_before_still_has_a_rank() -> None:
    scores = np.array([[0.2, 0.9]])
    assert target_ranks(scores, np.array([0]), np.array([[True, True]])).tolist() == [0]


def test_a_target_without_a_number_is_an_error_and_not_a_hit() -> None:
    with pytest.raises(ValueError, match="1 targets have the score NaN"):
        target_ranks(np.array([[np.nan, 0.1]]), np.array([0]), np.zeros((1, 2), dtype=bool))


def test_the_papers_row_by_hand() -> None:
    ranks = np.array([0, 1, 9, 10, 200])
    assert summary(ranks) == {
        "hr@1": 1 / 5,
        "hr@10": 3 / 5,
        "hr@50": 4 / 5,
        "hr@200": 4 / 5,
        "ndcg@10": pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(11)) / 5),
        "mrr": pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11 + 1 / 201) / 5),
    }


def test_values_are_those_of_ir_measures() -> None:
    measures = pytest.importorskip("ir_measures", reason="a test requirement: `make setup` installs it")
    names = {f"hr@{k}": f"Success@{k}" for k in (1, 10, 50, 200)} | {"ndcg@10": "nDCG@10", "mrr": "RR"}
    scores = np.random.default_rng(0).random((40, 300))
    targets = np.random.default_rng(1).integers(0, 300, 40)
    run = {f"q{row}": {f"d{item}": float(one) for item, one in enumerate(found)} for row, found in enumerate(scores)}
    wanted = {f"q{row}": {f"d{item}": 1} for row, item in enumerate(targets.tolist())}
    ranks = target_ranks(scores, targets)
    parsed = [measures.parse_measure(name) for name in names.values()]
    expected = {(str(one.measure), one.query_id): one.value for one in measures.iter_calc(parsed, wanted, run)}
    assert set(names) == set(METRICS)
    for metric, theirs in names.items():
        oracle = [expected[theirs, f"q{row}"] for row in range(40)]
        assert gains(ranks, metric).tolist() == pytest.approx(oracle, abs=1e-9)


def test_nothing_predicted_is_not_a_number() -> None:
    assert math.isnan(summary(np.array([], dtype=np.int64))["mrr"])

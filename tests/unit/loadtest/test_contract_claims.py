"""The freshness contract's arithmetic: windows in turns, ratios of neighbours, probes' books, verdicts on tokens."""

import math

import numpy as np
import pytest
from freshet.v1 import common_pb2, gateway_pb2

from loadtest import contract
from loadtest.contract import ProbeBoard
from loadtest.population import neighbourhoods
from loadtest.results import OK, Call
from loadtest.windows import interleaved, percentile_per_window, ratio


def test_windows_take_turns_without_gaps_and_each_pair_has_both() -> None:
    windows = interleaved(begin_s=100, num_windows=20, seconds=30, settle_s=5, rng=np.random.default_rng(0))
    assert [window.start_s for window in windows] == [100 + 30 * place for place in range(20)]
    assert all(window.settled_s - window.start_s == 5 for window in windows)
    orders = {tuple(w.treated for w in windows if w.pair == pair) for pair in range(10)}
    assert orders == {(True, False), (False, True)}


def test_a_ratio_is_the_median_over_neighbouring_windows_whatever_the_machine_does_in_between() -> None:
    windows = interleaved(begin_s=0, num_windows=20, seconds=30, settle_s=5, rng=np.random.default_rng(1))
    # The machine gets slower all the time; refresh costs a fifth.
    p99s = [(10 + 5 * window.pair) * (1.2 if window.treated else 1.0) for window in windows]
    found = ratio(p99s, windows)
    assert found is not None
    assert (found.median, found.low, found.high) == pytest.approx((1.2, 1.2, 1.2))
    assert len(found.per_pair) == 10


def test_a_pair_with_an_empty_window_is_left_out() -> None:
    windows = interleaved(begin_s=0, num_windows=4, seconds=10, settle_s=0, rng=np.random.default_rng(2))
    p99s = [10.0, 10.0, 10.0, math.nan]
    found = ratio(p99s, windows)
    assert found is not None
    assert found.per_pair == [1.0]
    assert ratio([math.nan] * 4, windows) is None


def test_calls_count_for_the_window_they_were_due_in_after_it_has_settled() -> None:
    windows = interleaved(begin_s=0, num_windows=2, seconds=10, settle_s=2, rng=np.random.default_rng(3))
    calls = [
        Call(due_s=due_s, sent_s=due_s, latency_ms=latency_ms, status=status)
        for due_s, latency_ms, status in ((1, 500, OK), (3, 5, OK), (4, 900, "UNAVAILABLE"), (13, 7, OK))
    ]
    assert percentile_per_window(calls, windows, 99) == [5.0, 7.0]
    assert all(math.isnan(value) for value in percentile_per_window([], windows, 99))


def test_a_probe_counts_when_score_and_evidence_have_moved() -> None:
    board = ProbeBoard(["a", "b"])
    assert board.take() is None  # nothing is known of them yet
    board.baseline("a", 0.5, 3)
    assert board.take() == "a"
    board.written("a", 10.0)
    assert board.take() is None  # one at a time
    assert not board.moved("a", 0.5)
    assert board.moved("a", 0.6)
    assert not board.confirm("a", 0.6, 3, 10.5)  # something else moved it
    assert board.under_way == ["a"]
    assert not board.moved("a", 0.6)
    assert board.confirm("a", 0.7, 4, 11.25)
    assert (board.lags_s, board.under_way, board.take()) == ([1.25], [], "a")


TOKEN = common_pb2.FreshnessToken(epoch="e", partition=3, offset=41)


def answer(*, honoured: bool, said_so: bool = False, offset: int | None = 41, item: str = "x") -> object:
    message = gateway_pb2.RecommendResponse(token_honoured=honoured)
    if said_so:
        message.degradations.append(gateway_pb2.DEGRADATION_TOKEN_NOT_HONOURED)
    if offset is not None:
        message.state_position.partition, message.state_position.offset = 3, offset
    message.items.add(item_id=item)
    return message


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"honoured": True}, "honoured"),
        ({"honoured": False, "said_so": True, "offset": 2}, "said_so"),
        ({"honoured": False}, "silently_not_honoured"),
        ({"honoured": True, "said_so": True}, "both_honoured_and_not"),
        ({"honoured": True, "offset": 40}, "honoured_from_an_older_state"),
        ({"honoured": True, "offset": None}, "honoured_without_a_state"),
        ({"honoured": True, "item": "recorded"}, "recommends_what_was_recorded"),
    ],
)
def test_an_answer_to_a_token_is_judged_by_what_it_shows(given: dict, verdict: str) -> None:
    assert contract.judge_token(TOKEN, "recorded", answer(**given)) == verdict


def test_one_probe_that_was_never_seen_breaks_the_promise() -> None:
    for lags_s, unseen, held in (([0.5] * 100, 0, True), ([0.5] * 100, 1, False), ([0.5] * 10 + [9.0], 0, False)):
        _, claim, _ = contract.lag(lags_s, unseen=unseen, told_s=[], poll_ms=50)
        assert claim.held is held
    assert contract.lag([], unseen=0, told_s=[], poll_ms=50)[1].held is None


def test_nearest_items_begin_with_the_anchor_and_leave_out_who_may_not_be() -> None:
    vectors = np.array([[1, 0], [0.9, 0.1], [0, 1], [0.8, 0.2]], np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    (found,) = neighbourhoods(["a", "b", "c", "d"], vectors, np.array([0]), size=2, among=np.array([0, 2, 3]))
    assert found == ["a", "d"]


def test_one_broken_token_breaks_the_promise() -> None:
    assert contract.tokens({"honoured": 9_999, "said_so": 1}, unanswered=3)[1].held is True
    assert contract.tokens({"honoured": 9_999, "silently_not_honoured": 1}, unanswered=0)[1].held is False


def test_one_late_user_breaks_the_promise_of_new_items() -> None:
    assert contract.new_items([1.0, 4.9], waited_s=15, top=50)[1].held is True
    for late in (5.1, None):
        _, claim, found = contract.new_items([1.0, late], waited_s=15, top=50)
        assert (claim.held, claim.value, found["in_time"]) == (False, 0.5, 1)

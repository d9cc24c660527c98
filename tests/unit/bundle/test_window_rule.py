"""The window rule: counts alone decide, and appending is stable."""

import pytest

from services.algorithms.encoding.history import trim, window_start


@pytest.mark.parametrize("max_history", [4, 8, 100])
def test_trimming_event_by_event_equals_the_rule_on_the_whole_history(max_history: int) -> None:
    kept: list[int] = []
    for count in range(5 * max_history):
        start = window_start(count, max_history)
        assert kept == list(range(start, count))
        kept = list(trim([*kept, count], max_history))


@pytest.mark.parametrize("max_history", [4, 8, 100])
def test_appending_many_events_at_once_gives_the_same_window_as_one_by_one(max_history: int) -> None:
    for before in range(3 * max_history):
        for appended in (1, 2, max_history, 3 * max_history + 1):
            whole = range(before + appended)
            kept = list(trim(whole[:before], max_history))
            assert list(trim([*kept, *whole[before:]], max_history)) == list(trim(whole, max_history))


@pytest.mark.parametrize("max_history", [4, 100])
def test_a_full_history_drops_its_oldest_quarter(max_history: int) -> None:
    assert window_start(max_history - 1, max_history) == 0
    assert window_start(max_history, max_history) == max_history // 4
    assert window_start(max_history + max_history // 4, max_history) == max_history // 2


def test_an_unusable_length_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_history=6; allowed: a multiple of 4"):
        window_start(3, 6)
    with pytest.raises(ValueError, match="num_events=-1"):
        window_start(-1, 8)

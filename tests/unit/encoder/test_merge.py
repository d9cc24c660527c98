"""The rules by which one user's records become a history."""

from collections.abc import Mapping, Sequence

import pytest
from streams import NOW_MS, interaction

from services.algorithms.bundles.event_schema import EventSchema
from services.platform.stream.records import Position
from services.user_state.merging import RECENT_IDS, Arrival, Merge, Outcome, Prefix, Undone, rounds
from services.user_state.merging import merge as merge_by
from services.user_state.values import UserHistory

L = 8
SCHEMA = EventSchema.parse(
    b"""
    types:
      click: {role: positive}
      rating: {role: positive, weight: 0.5, centre: 3}
      dislike: {role: negative}
      impression: {role: exposure}
      banner: {role: exposure, seen: true}
      passed: {role: positive, history: false}
      glance: {role: neutral}
    """,
    "events.yaml",
)


def merge(
    history: UserHistory, arrivals: Sequence[Arrival], max_history: int, forgotten: Mapping[int, int] | None = None
) -> Merge:
    return merge_by(history, arrivals, max_history, SCHEMA, forgotten)


def arrivals(*changes: dict[str, object], partition: int = 0, first_offset: int = 0) -> list[Arrival]:
    found = []
    for number, change in enumerate(changes):
        offset = first_offset + number
        fields: dict[str, object] = {"item": number, "event_id": f"e{offset}", "event_time_ms": NOW_MS + offset}
        found.append(Arrival(partition, offset, NOW_MS, interaction(0, **(fields | change))))  # type: ignore[arg-type]
    return found


def after(result: Merge) -> UserHistory:
    return UserHistory(events=result.events, recent=result.recent, positions=result.positions)


def items(result: Merge) -> list[str]:
    return [event.item_id.removeprefix("item-") for event in result.events]


def test_events_append_in_time_order_and_each_names_what_preceded_it() -> None:
    result = merge(UserHistory(), arrivals({}, {}, {}), L)
    assert items(result) == ["0", "1", "2"]
    assert result.preceding == {0: Prefix(0, 0), 1: Prefix(0, 1), 2: Prefix(0, 2)}
    assert result.positions == {0: 2}
    assert len(result.sequences) == 1


def test_the_window_slides_by_a_quarter_when_it_is_full() -> None:
    result = merge(UserHistory(), arrivals(*[{}] * 9), L)
    assert items(result) == ["2", "3", "4", "5", "6", "7", "8"]
    # The eighth event was preceded by the whole window, the ninth by the one that had slid.
    assert result.preceding[7] == Prefix(0, 7)
    assert result.preceding[8] == Prefix(1, 6)
    assert [event.item_id for event in result.sequences[0]][:2] == ["item-0", "item-1"]


def test_a_late_event_is_inserted_where_it_belongs() -> None:
    result = merge(UserHistory(), arrivals({}, {}, {"event_time_ms": NOW_MS}), L)
    assert items(result) == ["0", "2", "1"]
    assert result.preceding[2] == Prefix(0, 1)
    assert result.outcomes == [Outcome.APPLIED] * 3


def test_an_event_before_a_history_that_never_slid_is_inserted_first() -> None:
    result = merge(UserHistory(), arrivals({}, {"event_time_ms": NOW_MS - 5}), L)
    assert items(result) == ["1", "0"]


def test_an_event_older_than_a_full_window_is_only_seen() -> None:
    history = after(merge(UserHistory(), arrivals(*[{}] * 9), L))
    result = merge(history, arrivals({"event_time_ms": NOW_MS - 5, "item": 40}, first_offset=9), L)
    assert result.outcomes == [Outcome.LATE]
    assert result.seen_times == {"item-40": NOW_MS - 5}
    assert not result.changed
    assert result.news


def test_a_known_event_id_at_another_position_is_a_duplicate() -> None:
    history = after(merge(UserHistory(), arrivals({}), L))
    result = merge(history, arrivals({"event_id": "e0", "item": 9}, first_offset=1), L)
    assert result.outcomes == [Outcome.DUPLICATE]
    assert items(result) == ["0"]
    assert result.positions == {0: 1}


def test_a_position_delivered_again_keeps_its_outcome_and_changes_nothing() -> None:
    first = merge(UserHistory(), arrivals({}, {"event_id": "e0"}, {"item_id": "", "undoes_event_id": "e0"}), L)
    again = merge(after(first), arrivals({}, {"event_id": "e0"}, {"item_id": "", "undoes_event_id": "e0"}), L)
    assert first.outcomes == again.outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.UNDONE]
    assert not again.news
    assert again.recent == first.recent


def test_an_applied_record_that_is_no_recent_one_has_the_outcome_of_its_type() -> None:
    kinds = ("click", "dislike", "banner", "impression", "glance")
    again = arrivals(*({"type": kind} for kind in kinds), {"item_id": "", "undoes_event_id": "e9"})
    result = merge(UserHistory(positions={0: 9}), again, L, forgotten={0: 0})
    kept_out = [Outcome.KEPT_OUT, Outcome.KEPT_OUT_UNSEEN, Outcome.KEPT_OUT_UNSEEN]
    assert result.outcomes == [Outcome.FORGOTTEN, Outcome.APPLIED, *kept_out, Outcome.APPLIED]
    assert (result.news, result.changed) == (False, False)


def test_an_undo_removes_its_event_and_what_it_made_seen() -> None:
    history = after(merge(UserHistory(), arrivals({}, {}), L))
    result = merge(history, arrivals({"item_id": "", "undoes_event_id": "e1"}, first_offset=2), L)
    assert result.outcomes == [Outcome.UNDONE]
    assert items(result) == ["0"]
    assert result.unseen == {"item-1"}
    assert result.seen_times == {}
    assert result.undone == {0: Undone("item-1", Position(0, 1), history.events[1])}


def test_an_undo_leaves_an_item_seen_that_another_event_holds() -> None:
    result = merge(UserHistory(), arrivals({"item": 5}, {"item": 5}, {"item_id": "", "undoes_event_id": "e1"}), L)
    assert result.seen_times == {"item-5": NOW_MS}
    assert items(result) == ["5"]


def test_an_undone_event_that_is_sent_again_stays_undone() -> None:
    history = after(merge(UserHistory(), arrivals({}, {"item_id": "", "undoes_event_id": "e0"}), L))
    result = merge(history, arrivals({"event_id": "e0"}, first_offset=2), L)
    assert result.outcomes == [Outcome.DUPLICATE]
    assert items(result) == []


def test_an_event_id_is_forgotten_after_as_many_records_as_the_window_holds() -> None:
    history = UserHistory()
    for start in range(0, RECENT_IDS, 32):
        history = after(merge(history, arrivals(*[{}] * 32, first_offset=start), L))
    known = merge(history, arrivals({"event_id": "e0"}, first_offset=RECENT_IDS), L)
    assert known.outcomes == [Outcome.DUPLICATE]
    history = after(merge(history, arrivals({}, first_offset=RECENT_IDS), L))
    forgotten = merge(history, arrivals({"event_id": "e0"}, first_offset=RECENT_IDS + 1), L)
    assert forgotten.outcomes == [Outcome.APPLIED]
    assert len(forgotten.recent) == RECENT_IDS


def test_records_are_cut_so_that_no_part_holds_too_many_of_one_user() -> None:
    users = ["a", "b", "a", "", "a", "b", "a", "", "", ""]
    assert rounds([(0, user) for user in users], 2) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert rounds([], 2) == []


def test_a_partition_with_little_does_not_wait_for_one_with_much_of_a_user() -> None:
    places = [*[(0, "a")] * 5, (0, "b"), (1, "c"), (1, "a"), (1, "")]
    # What is behind `a` in its own partition stays behind it.
    assert rounds(places, 2) == [[0, 1, 6], [2, 3], [4, 5, 7, 8]]


def slid() -> UserHistory:
    """Nine events: the first two have left the window, their ids are recent."""
    return after(merge(UserHistory(), arrivals(*[{}] * 9), L))


def test_an_undo_names_an_event_that_has_left_the_window_but_is_recent() -> None:
    result = merge(slid(), arrivals({"item_id": "", "undoes_event_id": "e0"}, first_offset=9), L)
    assert (result.outcomes, result.undone) == ([Outcome.UNDONE], {0: Undone("item-0", Position(0, 0))})
    assert (result.changed, result.news, result.unseen) == (False, True, {"item-0"})
    again = merge(after(result), arrivals({"item_id": "", "undoes_event_id": "e0"}, first_offset=10), L)
    assert again.outcomes == [Outcome.UNDO_WITHOUT_EVENT]


def test_an_undo_outside_the_window_leaves_seen_what_another_recent_event_holds() -> None:
    history = merge(UserHistory(), arrivals({"item": 0}, {"item": 0}, *[{}] * 7), L)
    result = merge(after(history), arrivals({"item_id": "", "undoes_event_id": "e0"}, first_offset=9), L)
    assert (result.outcomes, result.unseen, result.seen_times) == ([Outcome.UNDONE], set(), {})


def test_an_event_whose_id_is_no_longer_recent_cannot_be_undone() -> None:
    history = slid()
    for start in range(9, 9 + RECENT_IDS, 32):
        history = after(merge(history, arrivals(*[{}] * 32, first_offset=start), L))
    offset = history.positions[0] + 1
    result = merge(history, arrivals({"item_id": "", "undoes_event_id": "e0"}, first_offset=offset), L)
    assert (result.outcomes, result.undone) == ([Outcome.UNDO_WITHOUT_EVENT], {})


@pytest.mark.parametrize(
    ("kind", "outcome", "is_seen", "is_attributed"),
    [
        ("impression", Outcome.KEPT_OUT_UNSEEN, False, False),
        ("banner", Outcome.KEPT_OUT, True, False),
        ("passed", Outcome.KEPT_OUT, True, True),
        ("glance", Outcome.KEPT_OUT_UNSEEN, False, True),
        ("unheard of", Outcome.KEPT_OUT_UNSEEN, False, True),
    ],
)
def test_what_histories_do_not_keep_changes_none(
    kind: str, outcome: Outcome, is_seen: bool, is_attributed: bool
) -> None:
    before = after(merge(UserHistory(), arrivals({}, {}), L))
    result = merge(before, arrivals({"item": 9, "type": kind}, {"item": 5}, first_offset=2), L)
    assert result.outcomes == [outcome, Outcome.APPLIED]
    assert items(result) == ["0", "1", "5"]
    assert ("item-9" in result.seen_times) == is_seen
    assert (result.preceding.get(0) == Prefix(0, 2)) == is_attributed
    alone = merge(before, arrivals({"item": 9, "type": kind}, first_offset=2), L)
    assert not alone.changed
    assert alone.news
    assert merge(after(alone), arrivals({"event_id": "e2"}, first_offset=3), L).outcomes == [Outcome.DUPLICATE]


def test_what_was_disliked_stays_in_the_history_and_is_seen() -> None:
    result = merge(UserHistory(), arrivals({}, {"type": "dislike"}), L)
    assert items(result) == ["0", "1"]
    assert set(result.seen_times) == {"item-0", "item-1"}
    assert result.outcomes == [Outcome.APPLIED] * 2


def test_an_event_that_histories_do_not_keep_can_be_undone() -> None:
    undo = {"item_id": "", "undoes_event_id": "e0"}
    for kind in ("banner", "passed"):
        result = merge(UserHistory(), arrivals({"type": kind}, undo), L)
        assert result.outcomes == [Outcome.KEPT_OUT, Outcome.UNDONE]
        assert result.unseen == {"item-0"}
        assert not result.seen_times
        assert result.undone == {1: Undone("item-0", Position(0, 0))}
    result = merge(UserHistory(), arrivals({"type": "glance"}, undo), L)
    assert result.outcomes == [Outcome.KEPT_OUT_UNSEEN, Outcome.UNDONE]
    assert result.undone == {1: Undone("item-0", Position(0, 0))}
    assert not result.unseen
    # Nobody heard of it, and nothing changed by it.
    result = merge(UserHistory(), arrivals({"type": "impression"}, undo), L)
    assert result.outcomes == [Outcome.KEPT_OUT_UNSEEN, Outcome.UNDO_WITHOUT_EVENT]


def test_an_item_stays_seen_while_another_event_of_it_says_so() -> None:
    undo = {"item_id": "", "undoes_event_id": "e0"}
    for first, second, stays in (
        ("glance", "click", True),
        ("click", "banner", True),
        ("banner", "click", True),
        ("click", "glance", False),
        ("click", "impression", False),
    ):
        result = merge(UserHistory(), arrivals({"type": first}, {"item": 0, "type": second}, undo), L)
        assert ("item-0" in result.seen_times) == stays, (first, second)
        assert not (stays and "item-0" in result.unseen - set(result.seen_times))


def test_a_late_event_that_histories_do_not_keep_is_seen_alone_where_nothing_before_it_is_known() -> None:
    history = after(merge(UserHistory(), arrivals(*[{}] * 9), L))
    late = {"event_time_ms": NOW_MS - 5, "item": 40}
    for kind, outcome in (("passed", Outcome.LATE), ("glance", Outcome.LATE), ("banner", Outcome.KEPT_OUT)):
        result = merge(history, arrivals(late | {"type": kind}, first_offset=9), L)
        assert result.outcomes == [outcome]
        assert not result.preceding
        assert ("item-40" in result.seen_times) == (kind != "glance")

"""Clicks on the way from their topic into answers: applied once, taken back, set aside where unreadable, rebuilt."""

import time
from pathlib import Path

import pytest
from fakes.generator import MemoryClicks
from generator_scene import Running, click, forget, make_running, undo
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.search_clicks import SearchClick
from services.generator.domain.requests import Asked, Scored
from services.generator.domain.text_mol import TextMol
from services.generator.followers import ClicksFollower
from services.platform.errors import DependencyUnavailable
from services.platform.stream import topic_follower


def text_of(running: Running) -> TextMol:
    assert running.sources.text is not None
    return running.sources.text


def answer(running: Running, query: str, k: int = 6) -> Scored:
    (found,) = text_of(running).find([Asked(query=query, k=k, filter=ItemFilter())])
    return found


def test_a_click_changes_the_next_answer_to_the_same_and_to_a_near_query(films: Path) -> None:
    running = make_running(films)
    before = {query: answer(running, query) for query in ("galaxy film", "galaxy movie", "toy")}
    assert all(found.item_ids[0] != "5" for found in before.values())
    running.take(click(0, "galaxy film", "5"))
    for query in ("galaxy film", "galaxy movie"):
        found = answer(running, query)
        assert found.item_ids[0] == "5"
        assert text_of(running).clicks == 1
    assert answer(running, "toy").item_ids[0] == before["toy"].item_ids[0]


def test_what_is_undone_or_forgotten_leaves_the_answers_of_never_having_been(films: Path) -> None:
    never, lived = make_running(films), make_running(films)
    lived.take(click(0, "galaxy film", "5"), click(1, "dog", "4", user="v"), undo(2, 0))
    lived.take(forget("v", 1))
    assert text_of(lived).digest() == text_of(never).digest()
    for query in ("galaxy film", "dog", "space"):
        assert answer(lived, query).item_ids == answer(never, query).item_ids
        assert answer(lived, query).scores == answer(never, query).scores


def test_an_undo_or_a_forget_that_comes_first_holds_for_what_comes_later(films: Path) -> None:
    running = make_running(films)
    running.take(undo(2, 0), forget("v", 1), click(0, "galaxy film", "5"), click(1, "dog", "4", user="v"))
    assert text_of(running).num_clicks == 0
    running.take(click(3, "dog", "4", user="v"))
    assert text_of(running).num_clicks == 1


RECORDS = st.lists(
    st.one_of(
        st.builds(
            click,
            st.integers(0, 9),
            st.sampled_from(["space", "dog", "galaxy film", "😀"]),
            st.sampled_from(["1", "5", "99"]),
            st.sampled_from(["u", "v"]),
        ),
        st.builds(undo, st.integers(20, 29), st.integers(0, 9)),
        st.builds(forget, st.sampled_from(["u", "v"]), st.integers(0, 9)),
        st.just(b"unreadable"),
    ),
    max_size=10,
)


@settings(deadline=None, max_examples=15)
@given(RECORDS, st.integers(0, 10))
def test_reading_the_topic_again_from_its_start_makes_the_same_digest(
    films: Path, records: list[bytes], cut: int
) -> None:
    """However the records were cut into polls; a place holds one click, as `interactions` does."""
    # A click begins with its event id: tag, length, text.
    unique = list(
        {record[: 2 + record[1]] if record.startswith(b"\n\x02e") else record: record for record in records}.values()
    )
    lived = make_running(films)
    lived.take(*unique[:cut])
    lived.take(*unique[cut:])
    again = make_running(films, topic=MemoryClicks())
    again.take(*unique)
    assert text_of(again).digest() == text_of(lived).digest()
    assert text_of(again).clicks == len(unique)


def test_unreadable_records_are_set_aside_with_the_reason_and_the_others_apply(films: Path) -> None:
    running = make_running(films)
    running.take(b"\xff\xff", b"", click(0, "galaxy film", "5"), click(1, "", "5"))
    assert [letter.offset for letter in running.topic.dead_letters] == [0, 1, 3]
    assert "value=" in running.topic.dead_letters[0].reason
    assert "query=" in running.topic.dead_letters[2].reason
    assert (text_of(running).num_clicks, text_of(running).clicks) == (1, 4)
    assert running.sample("freshet_generator_records_total", kind="unreadable_click") == 3
    assert running.sample("freshet_generator_records_total", kind="click") == 1


def test_it_is_ready_once_the_end_that_it_found_is_applied(films: Path) -> None:
    running, ready = make_running(films), []
    topic = MemoryClicks()
    for offset in range(3):
        topic.append(click(offset, "space", "3"))
    follower = ClicksFollower(
        topic, text_of(running), running.metrics, on_ready=lambda: ready.append(text_of(running).clicks), poll_s=0
    )
    assert follower.is_behind
    follower.step()
    follower.step()
    assert ready == [3]
    assert not follower.is_behind


def test_an_empty_topic_is_ready_at_once_and_one_that_is_away_never(films: Path) -> None:
    running, ready = make_running(films), []
    topic = MemoryClicks()
    follower = ClicksFollower(topic, text_of(running), running.metrics, on_ready=lambda: ready.append(True), poll_s=0)
    topic.down = True
    with pytest.raises(DependencyUnavailable):
        follower.step()
    assert ready == []
    topic.down = False
    follower.step()
    assert ready == [True]


def test_a_topic_made_anew_is_read_from_its_start_and_the_old_clicks_are_gone(films: Path) -> None:
    running = make_running(films)
    plain = answer(running, "galaxy film").scores
    running.take(click(0, "galaxy film", "5"), click(1, "galaxy film", "5"))
    running.topic.log.clear()
    running.topic.append(b"")
    assert running.clicks is not None
    running.clicks.lost(DependencyUnavailable("gone"))
    for _ in range(2):
        running.clicks.step()
    assert (text_of(running).num_clicks, text_of(running).clicks) == (0, 1)
    assert answer(running, "galaxy film").scores == plain


def test_a_topic_made_anew_and_filled_further_than_it_was_read_is_noticed(
    films: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_follower, "_LOOK_EVERY_S", 0.0)
    running, restarted = make_running(films), make_running(films)
    running.take(click(0, "galaxy film", "5"))
    anew = [click(offset, "space", "3") for offset in range(3)]
    running.topic.log.clear()
    running.take(*anew)
    for _ in range(2):
        assert running.clicks is not None
        running.clicks.step()
    restarted.take(*anew)
    assert text_of(running).digest() == text_of(restarted).digest()


def test_a_thread_follows_until_it_is_stopped(films: Path) -> None:
    running = make_running(films)
    assert running.clicks is not None
    running.clicks.start()
    for offset in range(5):
        running.topic.append(click(offset, "space", "3"))
    try:
        deadline = time.monotonic() + 30
        while text_of(running).clicks < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        running.clicks.stop()
    assert text_of(running).num_clicks == 5


def test_a_click_that_fails_alone_is_set_aside_and_the_others_count(films: Path) -> None:
    running = make_running(films)
    text, clicks = text_of(running), running.clicks
    assert clicks is not None
    apply = text.apply

    def fails_on_one(records: list[SearchClick], *, next_offset: int) -> None:
        if any(record.item_id == "3" for record in records):
            raise KeyError("a bug")
        apply(records, next_offset=next_offset)

    text.apply = fails_on_one  # type: ignore[method-assign, assignment]
    for offset, item in enumerate(("5", "3", "4")):
        running.topic.append(click(offset, "space", item))
    with capture_logs():
        for _ in range(8):
            try:
                clicks.step()
            except KeyError as exc:
                clicks.fail(exc)
    assert [(letter.offset, letter.reason) for letter in running.topic.dead_letters] == [
        (1, "internal error: KeyError")
    ]
    assert (text.num_clicks, text.clicks, clicks.turns.failures) == (2, 3, 0)
    assert running.sample("freshet_generator_records_total", kind="click") == 2
    assert running.sample("freshet_generator_records_total", kind="poison_click") == 1

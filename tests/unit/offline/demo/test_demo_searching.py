"""The demo's search: the word comes from the person's own titles, and what it says is what the gateway answered."""

import pytest
from freshet_client import InvalidArgument

from services.offline.demo.searching import ask_choose_ask, choose_query, report
from tests.unit.cli.gateway_on_loopback import running_gateway

TITLES = {f"s{n}": f"Star Ship {n} (19{n:02})" for n in range(8)} | {f"d{n}": f"The Dark Night {n}" for n in range(70)}


def test_the_word_is_shared_by_some_titles_but_not_by_many() -> None:
    assert choose_query(TITLES, ["d1", "d2", "d3", "s1", "s2"]) in ("star", "ship")
    # "dark" and "night" are in 70 titles, "the" is too short, years are no words.
    assert choose_query(TITLES, ["d1", "d2"]) is None
    assert choose_query(TITLES, []) is None
    assert choose_query({}, ["unknown"]) is None


def test_only_recent_titles_count_and_ties_are_settled_by_the_word() -> None:
    assert choose_query(TITLES, ["s1", *["d1"] * 30]) is None
    assert choose_query(TITLES, ["s1"]) == "ship"


def test_a_choice_is_recorded_with_its_words_and_the_second_answer_waits_for_it() -> None:
    with running_gateway() as (target, server):
        found = ask_choose_ask("u1", "star", run_id="r1", gateway=target)
    (click,) = server.recorded[0].interactions
    assert (click.type, click.query, click.item_id, click.user_id) == ("search_click", "star", "new", "u1")
    assert server.asked[0].HasField("freshness_token")
    assert len(server.searched) == 2
    summary = found.summary()
    assert (summary["found"], summary["place_before"], summary["place_after"], summary["moved"]) == (2, 2, 2, 0)
    assert summary["rescored"] == 1
    assert summary["sources"] == ["phrases", "lexical"]
    assert "u1" not in str(summary)
    says = report(found)
    assert "'star' finds 2 items" in says[0]
    assert "at rank 2" in says[1]
    assert "0 of 2 ranks and 1 similarities changed" in says[2]


def test_words_that_find_nothing_end_the_step() -> None:
    with running_gateway() as (target, server):
        found = ask_choose_ask("u1", "nothing", run_id="r1", gateway=target)
    assert server.recorded == []
    assert report(found) == ["'nothing' finds nothing"]
    assert found.summary()["chosen"] is None


def test_a_generator_that_is_not_reached_yet_is_asked_again() -> None:
    with running_gateway() as (target, server):
        server.searches_to_refuse = 2
        found = ask_choose_ask("u1", "star", run_id="r1", gateway=target)
    assert len(server.searched) == 4
    assert found.summary()["found"] == 2


def test_a_refused_search_ends_the_demo_at_once() -> None:
    with running_gateway() as (target, server), pytest.raises(InvalidArgument, match="query="):
        ask_choose_ask("u1", "", run_id="r1", gateway=target)
    assert len(server.searched) == 1

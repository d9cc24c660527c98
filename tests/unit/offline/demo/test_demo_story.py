"""The demo's story: users, item and word are chosen by taste, and the summaries are what the gateway answered."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from freshet_client import InvalidArgument

from services.offline.demo.story import NUM_EARLY, Person, Scene, Story, choose_query, choose_scene
from services.platform.rpc.client import gateway_client
from tests.unit.cli.gateway_on_loopback import running_gateway

ITEMS = [f"i{row}" for row in range(40)]
# Two tastes: the first twenty items lie near the one axis, the others near the other.
VECTORS = np.array([[1, row / 100] if row < 20 else [row / 1000, 1] for row in range(40)], np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)
TITLES = {f"s{n}": f"Star Ship {n} (19{n:02})" for n in range(8)} | {f"d{n}": f"The Dark Night {n}" for n in range(70)}
PERSON = Person("u1", ["s1"], last_s=900)
SCENE = Scene("s0", ["a", "b", "c"], ["reader"])


def bundle(untrained: frozenset[str] = frozenset()) -> Any:
    ids = list(TITLES)
    return SimpleNamespace(
        item_ids=ids, titles=list(TITLES.values()), untrained=untrained, categories=[("c",)] * len(ids),
        item_index={item_id: row for row, item_id in enumerate(ids)},
    )  # fmt: skip


def test_the_people_chosen_recently_liked_three_items_near_one_that_many_like() -> None:
    liked = {f"u{n}": [f"i{row}" for row in (n % 3, 1 + n % 3, 2 + n % 3, 30)] for n in range(9)}
    scene = choose_scene(ITEMS, VECTORS, liked | {"other": ["i25", "i26", "i27"], "unknown": ["x"], "few": ["i0"]})
    assert scene is not None
    assert {*scene.early, *scene.readers} == set(liked)
    assert len(scene.early) == NUM_EARLY
    long_ago = {user: [*items, *["i39"] * 30] for user, items in liked.items()}
    for few in (long_ago, dict(list(liked.items())[:3]), {}):
        assert choose_scene(ITEMS, VECTORS, few) is None


def test_the_word_is_in_some_recent_titles_but_not_in_many() -> None:
    assert choose_query(TITLES, ["d1", "d2", "d3", "s1", "s2"]) == choose_query(TITLES, ["s1"]) == "ship"
    # "dark" and "night" are in 70 titles, "the" is too short, years are no words.
    for history in (["d1", "d2"], ["s1", *["d1"] * 30], ["unknown"], []):
        assert choose_query(TITLES, history) is None


def test_a_choice_is_recorded_with_its_words_and_the_second_search_waits_for_it() -> None:
    said: list[str] = []
    with running_gateway() as (target, server), gateway_client(target) as client:
        server.searches_to_refuse = 2
        found = Story(client, bundle(), "r1", said.append).search(PERSON)
        with pytest.raises(InvalidArgument, match="query="):
            Story(client, bundle(), "r1", said.append)._search("", "u1")
    (click,) = server.recorded[0].interactions
    assert (click.type, click.query, click.item_id, click.user_id) == ("search_click", "ship", "new", "u1")
    assert server.asked[0].HasField("freshness_token")
    assert found is not None
    assert (found["found"], found["chosen"], found["moved"], found["rescored"]) == (2, "new", 0, 1)
    assert found["sources"] == ["phrases", "lexical"]
    assert "'ship' finds 2 items" in said[0]
    assert "it is at rank 2; 0 of 2 ranks and 1 similarities changed" in said[2]


def test_the_best_trained_recommendation_is_disliked_and_the_second_page_asked_for() -> None:
    said: list[str] = []
    with running_gateway() as (target, server), gateway_client(target) as client:
        found = Story(client, bundle(frozenset({"1193"})), "r1", said.append).dislike(PERSON)
        none = Story(client, bundle(frozenset({"1193", "661", "914"})), "r2", said.append).dislike(PERSON)
    assert none is None
    assert found is not None
    (request,) = server.recorded
    (event,) = request.interactions
    assert (event.type, event.item_id, event.user_id) == ("dislike", "661", "u1")
    assert server.asked[0].as_of.ToSeconds() == 900
    assert server.asked[1].HasField("freshness_token")
    assert (server.asked[3].page_depth, server.asked[4].page_token) == (20, "page-2")
    assert (found["item_id"], found["near_in_the_first_answer"], found["items_on_both_pages"]) == ("661", 0, 3)
    assert "it is still recommended" in said[1]


@pytest.mark.parametrize("by_title", [True, False])
def test_a_new_item_is_found_explained_and_no_longer_served_once_one_of_three_is_forgotten(
    by_title: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.offline.demo.story._WAIT_S", 2.0)
    said: list[str] = []
    with running_gateway() as (target, server), gateway_client(target) as client:
        server.newcomers_need, server.newcomers_by_title = NUM_EARLY, by_title
        story = Story(client, bundle(), "r1", said.append)
        new = story.new_item(SCENE)
        forgotten = story.forget(SCENE, new["item_id"])
    assert [request.interactions[0].user_id for request in server.recorded] == list(SCENE.early)
    assert [request.user_id for request in server.forgotten] == ["c"]
    assert (new["item_id"], new["rank_by_title"], new["rank"]) == ("r1-new", 4 if by_title else None, 1)
    assert set(forgotten["left"].values()) == {0}
    assert forgotten["new_item_without_interactions"]
    assert not any(user in str(new) + str(forgotten) for user in ("'a'", "'b'", "'c'", "reader"))
    assert ("at rank 4 for user reader" if by_title else "no reader has it among the first 200") in said[0]

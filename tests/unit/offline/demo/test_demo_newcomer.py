"""The demo's new item: who takes part is chosen by taste, and what it says is what the gateway answered."""

import numpy as np

from services.offline.demo.newcomer import NUM_EARLY, Newcomer, arrival, arrive, choose_scene, forget_one, forgetting
from tests.unit.cli.gateway_on_loopback import running_gateway

ITEMS = [f"i{row}" for row in range(40)]
# Two tastes: the first twenty items lie near the one axis, the others near the other.
VECTORS = np.array([[1, row / 100] if row < 20 else [row / 1000, 1] for row in range(40)], np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


def test_the_people_chosen_like_three_items_near_one_that_many_like() -> None:
    liked = {f"u{n}": [f"i{row}" for row in (n % 3, 1 + n % 3, 2 + n % 3, 30)] for n in range(9)}
    liked |= {"other": ["i25", "i26", "i27"], "unknown": ["nowhere"], "few": ["i0"]}
    scene = choose_scene(ITEMS, VECTORS, liked)
    assert scene is not None
    assert len(scene.near) == 8
    assert scene.anchor in scene.near
    people = [*scene.early, *scene.readers]
    assert len(people) == len(set(people)) == 9
    assert len(scene.early) == NUM_EARLY
    for user in people:
        assert len(set(liked[user]).intersection(scene.near)) >= 3


def test_only_what_they_liked_lately_counts() -> None:
    liked = {f"u{n}": ["i0", "i1", "i2", *["i39"] * 30] for n in range(9)}
    assert choose_scene(ITEMS, VECTORS, liked) is None


def test_fewer_than_four_people_make_no_scene() -> None:
    assert choose_scene(ITEMS, VECTORS, {f"u{n}": ["i0", "i1", "i2"] for n in range(3)}) is None
    assert choose_scene(ITEMS, VECTORS, {}) is None


def test_a_new_item_is_put_liked_found_explained_and_gone_when_one_of_three_is_forgotten() -> None:
    scene = choose_scene(ITEMS, VECTORS, {f"u{n}": ["i0", "i1", "i2"] for n in range(6)})
    assert scene is not None
    with running_gateway() as (target, server):
        server.newcomers_need = NUM_EARLY
        news = arrive(scene, run_id="r1", title="New", categories=["c"], gateway=target, wait_s=0.2)
        assert [item.item_id for item in server.items] == ["r1-new"]
        assert [request.interactions[0].user_id for request in server.recorded] == list(scene.early)
        assert (news.reader, news.rank) == (scene.readers[0], 1)
        forget_one(scene, news, gateway=target)
    assert [request.user_id for request in server.forgotten] == [scene.early[-1]]
    assert news.gone is True
    summary = news.summary()
    assert (summary["rank"], summary["gone_after_forgetting_one_of_three"]) == (1, True)
    assert summary["shares"] is not None
    forgotten = news.forget_summary()
    assert forgotten is not None
    assert set(forgotten["left"].values()) == {0}
    assert not any(user in str(summary) + str(forgotten) for user in (*scene.early, *scene.readers))
    assert "by its title it is among nobody's first 200" in arrival(news)[0]
    assert "liked by 3: rank 1 for user" in arrival(news)[1]
    assert "rests on two people now and is served no more" in forgetting(news)[1]
    news.stays_by_title = True
    assert "its title speaks for it again" in forgetting(news)[1]


def test_a_new_item_is_found_by_its_title_before_anybody_likes_it() -> None:
    scene = choose_scene(ITEMS, VECTORS, {f"u{n}": ["i0", "i1", "i2"] for n in range(6)})
    assert scene is not None
    with running_gateway() as (target, server):
        server.newcomers_need, server.newcomers_by_title = NUM_EARLY, True
        news = arrive(scene, run_id="r1", title="New", categories=["c"], gateway=target, wait_s=5)
        assert (news.titled_reader, news.titled_rank) == (scene.readers[0], 4)
        assert (news.reader, news.rank) == (scene.readers[0], 1)
        forget_one(scene, news, gateway=target)
    assert (news.gone, news.stays_by_title) == (True, True)
    assert "by its title at rank 4 for user" in arrival(news)[0]
    assert news.summary()["rank_by_title"] == 4


def test_an_item_that_nobody_found_is_told_so() -> None:
    news = Newcomer(item_id="n", title="New")
    assert arrival(news)[1] == "liked by 3: in nobody's top 50 after 15 s"
    assert (news.summary()["found_after_seconds"], news.forget_summary()) == (None, None)

"""The demo's dislike: what is recorded, what is asked, and what it says of the answers."""

from services.offline.demo.disliking import DEPTH, Disliked, dislike_best, report
from tests.unit.cli.gateway_on_loopback import running_gateway


def test_the_best_answer_is_disliked_and_the_second_answer_waits_for_it() -> None:
    with running_gateway() as (target, server):
        found = dislike_best("u1", untrained=frozenset(), run_id="r1", gateway=target, as_of_s=900)
    assert found is not None
    assert [asked.as_of.ToSeconds() for asked in server.asked if asked.HasField("as_of")] == [900]
    (event,) = server.recorded[0].interactions
    assert (event.type, event.item_id, event.user_id) == ("dislike", found.before[0], "u1")
    assert server.similar[0].item_id == found.item_id == found.before[0]
    assert found.near == ["2571", "new"]
    assert not server.asked[0].HasField("freshness_token")
    assert server.asked[1].HasField("freshness_token")
    assert found.after
    assert (server.asked[2].k, server.asked[2].page_depth, server.asked[3].page_token) == (10, 20, "page-2")
    assert found.pages == [["1193", "661", "914"]] * 2
    assert "3 of page one" in report(found, {})[2]
    assert "u1" not in str(found.summary())


def test_a_best_answer_that_training_never_saw_is_passed_over() -> None:
    """The encoder leads no state away from it, so nothing like it would fall."""
    with running_gateway() as (target, server):
        found = dislike_best("u1", untrained={"1193"}, run_id="r1", gateway=target)
        none = dislike_best("u1", untrained={"1193", "661", "914"}, run_id="r2", gateway=target)
    assert none is None
    assert found is not None
    (request,) = server.recorded
    assert [event.item_id for event in request.interactions] == ["661"]
    assert [asked.item_id for asked in server.similar] == [found.item_id] == ["661"]
    assert found.before[0] == "1193"
    assert "disliked: 661, the best for this person of what training saw; like it" in report(found, {})[0]


def test_what_it_says_is_what_fell() -> None:
    found = Disliked(
        item_id="x", before=["x", "a", "b", "c"], near=["b", "c", "elsewhere"], after=["a", "c", "b"], seconds=0.05
    )
    assert found.moved == [1, -1]
    assert found.summary() | {"item_id": "x"} == {
        "item_id": "x",
        "near_in_the_first_answer": 2,
        "fallen": 1,
        "mean_places": 0.0,
        "seconds_to_the_changed_answer": 0.05,
        "pages": [],
        "items_on_both_pages": None,
    }
    found.after = ["a", "b"]
    assert found.moved == [0, DEPTH - 2]
    says = report(found, {"x": "Ex"})
    assert "disliked: Ex, the best for this person; like it" in says[0]
    assert "2 were among the first 100: 1 fell, by +49.0 places" in says[1]
    assert "not answered again" in says[1]
    found.after = ["x"]
    assert "still answered" in report(found, {})[1]
    found.near = ["elsewhere"]
    assert "none was among the first 100" in report(found, {})[1]
    found.seconds = None
    assert "not in the person's state in time" in report(found, {})[1]
    assert found.summary()["mean_places"] is None

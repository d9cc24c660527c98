"""The gateway in memory keeps the client's promises, and does what a test tells it to."""

import math
import re
from pathlib import Path

import pytest
from client_suite import *  # noqa: F403
from client_suite import Scene
from freshet_client import Certificate, Conflict, InvalidArgument, Item, Overloaded, Rule, SetShare, Unavailable
from freshet_client.testing import FakeGateway


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway(Item(str(row), f"Title {row}", [f"category {row % 7}"]) for row in range(200))


@pytest.fixture
def scene(gateway: FakeGateway) -> Scene:
    return Scene(gateway.client(), [str(row) for row in range(200)], gateway.async_client)


def test_a_write_that_is_held_back_is_not_reflected_and_the_answer_says_so(gateway: FakeGateway) -> None:
    session = gateway.client().session("ann")
    session.record("7", "like")
    gateway.hold_back()
    session.record("8", "like")
    behind = session.recommend(k=200)
    assert (behind.token_honoured, behind.degradations) == (False, ("token_not_honoured",))
    assert "8" in behind.item_ids
    gateway.catch_up()
    answer = session.recommend(k=200)
    assert (answer.token_honoured, answer.degradations) == (True, ())
    assert "8" not in answer.item_ids


def test_a_failure_that_a_test_asks_for_comes_once(gateway: FakeGateway) -> None:
    session = gateway.client().session("ann")
    gateway.fail(Unavailable("down"), Overloaded("busy", retry_after_s=0.5))
    with pytest.raises(Unavailable, match=r"^down$"):
        session.record("7", "like")
    with pytest.raises(Overloaded) as refused:
        session.recommend()
    assert refused.value.retry_after_s == 0.5
    session.record("7", "like", event_id="mine")
    assert [(one.item_id, one.event_id) for one in gateway.interactions("ann")] == [("7", "mine")]


def test_a_batch_that_breaks_off_says_what_was_acknowledged(gateway: FakeGateway) -> None:
    client = gateway.client()
    batch = [Interaction("ann", str(row % 200)) for row in range(1_001)]  # noqa: F405
    sent = []
    call = gateway.call

    def break_off(method, request, timeout_s):
        sent.append(request)
        if len(sent) == 2:
            raise Unavailable("down")
        return call(method, request, timeout_s)

    gateway.call = break_off
    with pytest.raises(Unavailable) as failed:
        client.record(*batch)
    assert [one.event_id for one in failed.value.receipts] == [one.event_id for one in batch[:1000]]
    client.record(*batch)
    assert [one.event_id for one in gateway.interactions("ann")] == [one.event_id for one in batch]


def test_what_is_recorded_names_the_exposure_that_showed_it(gateway: FakeGateway) -> None:
    session = gateway.client().session("ann")
    answer = session.recommend(k=3)
    session.record(answer.item_ids[1], "like")
    session.record("150", "like")
    session.seen(answer.item_ids[2])
    written = [(one.item_id, one.exposure_id, one.type) for one in gateway.interactions("ann")]
    assert written == [
        (answer.item_ids[1], answer.exposure_id, "like"),
        ("150", "", "like"),
        (answer.item_ids[2], answer.exposure_id, "impression"),
    ]


def test_a_list_may_end_between_two_pages(gateway: FakeGateway) -> None:
    session = gateway.client().session("ann")
    session.record("7", "like")
    session.recommend(k=3, page_depth=9)
    gateway.end_lists()
    with pytest.raises(PreconditionFailed, match="its list is gone"):  # noqa: F405
        session.next_page()


def test_withdrawn_items_are_answered_to_nobody(gateway: FakeGateway) -> None:
    client = gateway.client()
    assert client.put_items([Item("7", withdrawn=True), Item("8", available=False), Item("new", "Space Odyssey")]) == 3
    answer = client.recommend("ann", k=201).item_ids
    assert {"7", "8"} & set(answer) == set()
    assert "new" in answer
    assert [one.item_id for one in client.search("space").results] == ["new"]


def test_a_gap_is_asked_for_and_the_answer_says_whether_it_is_proven(gateway: FakeGateway) -> None:
    client = gateway.client()
    answer = client.recommend("ann", k=3, max_gap=0.05)
    assert answer.certificate == Certificate("estimate", asked_gap=0.05)
    assert answer.degradations == ("popular_fallback", "gap_not_proven")
    client.session("ann").record("7", "like")
    answer = client.recommend("ann", k=3, max_gap=0.0)
    assert answer.certificate == Certificate("exact", gap=0.0, asked_gap=0.0)
    assert answer.degradations == ()
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(InvalidArgument, match=r"max_gap=.* allowed: a finite number, at least 0"):
            client.recommend("ann", k=3, max_gap=wrong)


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "clients.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FakeGateway" in block)
    exec(example, {})


def test_rules_are_put_once_for_each_revision() -> None:
    with FakeGateway(["a"]).client() as client:
        rule = Rule("first", item_ids=("a",), pin=1)
        assert client.put_rules([rule], expected_revision=0).revision == 1
        with pytest.raises(Conflict, match="expected_revision=0 allowed: 1"):
            client.put_rules([], expected_revision=0)
        with pytest.raises(InvalidArgument, match="rules='9 rules' allowed: at most 8"):
            client.put_rules([rule] * 9, expected_revision=1)
        found = client.rules()
        assert (found.revision, found.rules) == (1, (rule,))


def test_an_operator_takes_steps_with_a_staged_set_and_each_names_the_revision_before_it() -> None:
    gateway = FakeGateway(["a"])
    gateway.stage("new")
    with gateway.client() as client:

        def take(change: str, name: str = "new", share: float = 0.0):
            revision = client.version_sets().revision
            assert client.change_version_set(change, name, share=share, expected_revision=revision).is_applied
            return client.version_sets()

        assert [one.set.name for one in client.version_sets().sets] == ["in-memory", "new"]
        assert take("shadow", share=0.5).shadow == SetShare("new", 0.5)
        assert take("canary", share=0.1).canary == SetShare("new", 0.1)
        with pytest.raises(PreconditionFailed, match="end the canary first"):  # noqa: F405
            take("retire")
        assert take("roll_back", "").canary is None
        found = take("promote")
        assert (found.serving, found.before, found.shadow) == ("new", "in-memory", None)
        with pytest.raises(Conflict, match="expected_revision=1 allowed: 5"):
            client.change_version_set("roll_back", expected_revision=1)
        with pytest.raises(PreconditionFailed, match="'new' serves"):  # noqa: F405
            take("retire")
        assert take("roll_back", "").serving == "in-memory"
        with pytest.raises(PreconditionFailed, match="no predecessor"):  # noqa: F405
            take("roll_back", "")
        with pytest.raises(InvalidArgument, match="share=2"):
            take("canary", share=2.0)
        assert [one.set.name for one in take("retire").sets] == ["in-memory"]
        with pytest.raises(NotFound, match="set='new' allowed: in-memory"):  # noqa: F405
            take("promote")

"""What `freshet-client` promises, whichever gateway answers: run on the one in memory and on real stacks.

A module that imports these tests has a fixture `scene`.
"""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import pytest
from freshet_client import (
    AsyncClient,
    Client,
    Filter,
    FreshnessToken,
    HistoryEvent,
    Impression,
    Interaction,
    InvalidArgument,
    Item,
    NotAgain,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
)

T = TypeVar("T")


@dataclass
class Scene:
    """A gateway and at least 200 items of its catalogue."""

    client: Client
    items: list[str]
    make_async: Callable[[], AsyncClient]

    @staticmethod
    def new_user() -> str:
        return f"client-{uuid.uuid4().hex[:12]}"

    def known_user(self) -> str:
        """One with a stored history that is applied."""
        session = self.client.session(self.new_user())
        for item_id in self.items[:12]:
            session.record(item_id, "like")
        assert session.recommend().token_honoured
        return session.user_id


def until(ask: Callable[[], T]) -> T:
    """The first answer that is not empty: who follows the catalogue is a moment behind."""
    ends = time.monotonic() + 20
    while not (found := ask()) and time.monotonic() < ends:
        time.sleep(0.02)
    return found


def history_of(scene: Scene, user: str) -> list[str]:
    return [past.item_id for past in scene.client.explain(user, scene.items[100]).history]


def test_an_answer_of_a_session_reflects_what_was_recorded_before(scene: Scene) -> None:
    session = scene.client.session(scene.new_user())
    recorded = []
    for _ in range(5):
        item_id = session.recommend(k=1).item_ids[0]
        receipt = session.record(item_id, "like")
        assert receipt is not None
        assert receipt.token == session.token
        recorded.append(item_id)
        answer = session.recommend(k=50)
        assert answer.token_honoured
        assert answer.provenance.state_source == "stored"
        assert not set(answer.item_ids) & set(recorded)
    assert history_of(scene, session.user_id) == recorded[::-1]
    assert answer.certificate is not None
    assert answer.certificate.kind == "exact"
    assert answer.degradations == ()
    assert [item.score for item in answer.items] == sorted((item.score for item in answer.items), reverse=True)


def test_a_new_user_is_answered_popular_items(scene: Scene) -> None:
    answer = scene.client.recommend(scene.new_user(), k=5)
    assert {item.source for item in answer.items} == {"popular"}
    assert answer.provenance.state_source == "none"
    assert answer.degradations == ("popular_fallback",)
    assert len(set(answer.item_ids)) == 5


def test_an_interaction_that_is_recorded_again_counts_once(scene: Scene) -> None:
    user = scene.new_user()
    first, second = (Interaction(user, item_id, "like") for item_id in scene.items[:2])
    scene.client.record(first, second)
    (receipt,) = scene.client.record(first)
    assert receipt.event_id == first.event_id
    assert scene.client.recommend(user, freshness_token=receipt.token).token_honoured
    assert history_of(scene, user) == [second.item_id, first.item_id]


def test_receipts_of_a_large_batch_are_in_its_order(scene: Scene) -> None:
    users = [scene.new_user() for _ in range(25)]
    batch = [Interaction(users[row % 25], scene.items[row % 100], "like") for row in range(2_500)]
    receipts = scene.client.record(*batch, timeout_s=30)
    assert [one.event_id for one in receipts] == [one.event_id for one in batch]


def test_pages_repeat_nothing_and_end(scene: Scene) -> None:
    session = scene.client.session(scene.known_user())

    def one_version() -> list[list[str]]:
        """The first page and the whole list; others' events change the index meanwhile."""
        found = session.recommend(k=5, page_depth=18), scene.client.recommend(session.user_id, k=18)
        is_one = len({answer.provenance.index_version for answer in found}) == 1
        return [answer.item_ids for answer in found] if is_one else []

    first, whole = until(one_version)
    pages = [first]
    while page := session.next_page():
        assert page.provenance.state_source == "page"
        pages.append(page.item_ids)
    assert [len(page) for page in pages] == [5, 5, 5, 3]
    assert sorted(item_id for page in pages for item_id in page) == sorted(whole)
    assert not session.has_next_page


@pytest.mark.parametrize("is_visitor", [True, False])
def test_a_list_that_no_gateway_keeps_goes_on_with_what_was_not_shown(scene: Scene, is_visitor: bool) -> None:
    session = scene.client.session("" if is_visitor else scene.new_user())
    if is_visitor:
        session.record(scene.items[3], "like")
    shown = session.recommend(k=5, page_depth=12).item_ids
    pages = []
    while page := session.next_page():
        pages.append(page.item_ids)
    assert [len(page) for page in pages] == [5, 2]
    assert len({*shown, *pages[0], *pages[1]}) == 12


def test_a_page_token_is_one_users_own_and_cannot_be_altered(scene: Scene) -> None:
    user = scene.known_user()
    token = scene.client.recommend(user, k=5, page_depth=10).next_page_token
    with pytest.raises(InvalidArgument) as refused:
        scene.client.recommend(user, k=5, page_token=f"{token[:-1]}{'A' if token[-1] != 'A' else 'B'}")
    assert (refused.value.field, refused.value.allowed) == (
        "page_token",
        "next_page_token of an earlier answer, unchanged",
    )
    with pytest.raises(PermissionDenied, match=r"^page_token"):
        scene.client.recommend(scene.new_user(), k=5, page_token=token)


def test_a_list_ends_with_four_newer_ones(scene: Scene) -> None:
    session = scene.client.session(scene.known_user())
    session.recommend(k=5, page_depth=10)
    for _ in range(4):
        scene.client.recommend(session.user_id, k=5, page_depth=10)
    with pytest.raises(PreconditionFailed, match=r"^page_token: its list is gone"):
        session.next_page()
    assert session.next_page() is None
    assert len(session.recommend(k=5).items) == 5


@pytest.mark.parametrize("who", ["known", "new", "visitor"])
def test_what_was_shown_does_not_come_again(scene: Scene, who: str) -> None:
    user = {"known": scene.known_user, "new": scene.new_user, "visitor": str}[who]()
    session = scene.client.session(user, not_again=NotAgain(answers=2))
    answers = [session.recommend(k=10).item_ids for _ in range(4)]
    assert not set(answers[0]) & set(answers[1])
    assert not {*answers[0], *answers[1]} & set(answers[2])
    assert not {*answers[1], *answers[2]} & set(answers[3])


def test_a_visitors_own_history_is_reflected_and_nothing_is_written(scene: Scene) -> None:
    session = scene.client.session()
    assert session.is_visitor
    assert session.recommend(k=5).provenance.state_source == "none"
    for item_id in scene.items[:3]:
        assert session.record(item_id, "like") is None
    answer = session.recommend(k=100)
    assert answer.provenance.state_source == "request"
    assert answer.token_honoured
    assert not set(answer.item_ids) & set(scene.items[:3])
    assert [past.item_id for past in session.explain(scene.items[100]).history] == scene.items[2::-1]
    assert session.seen(*answer.item_ids[:2]) == []
    assert scene.client.recommend(session.user_id, k=5).provenance.state_source == "none"
    with pytest.raises(PreconditionFailed, match=r"^user_id: a visitor"):
        session.undo("some-event")


def test_a_history_without_a_user_is_answered(scene: Scene) -> None:
    history = [HistoryEvent(item_id, type="like") for item_id in scene.items[:3]]
    answer = scene.client.recommend(k=10, history=history)
    assert answer.provenance.state_source == "request"
    assert not set(answer.item_ids) & set(scene.items[:3])


def test_an_undone_interaction_is_as_if_it_never_happened(scene: Scene) -> None:
    session = scene.client.session(scene.known_user())
    receipt = session.record(scene.items[50], "like")
    assert receipt is not None
    only = Filter(allow_item_ids=[scene.items[50]])
    assert session.recommend(k=1, filter=only).item_ids == []
    session.undo(receipt.event_id)
    answer = session.recommend(k=1, filter=only)
    assert answer.token_honoured
    assert answer.item_ids == [scene.items[50]]


def test_what_was_seen_is_said_of_the_answer_that_showed_it(scene: Scene) -> None:
    session = scene.client.session(scene.known_user())
    first = session.recommend(k=5)
    receipts = session.seen(*first.item_ids[:2])
    assert len({one.event_id for one in receipts}) == 2
    assert [one.event_id for one in session.seen(*first.item_ids[:2])] == [one.event_id for one in receipts]
    assert session.record(first.item_ids[0], "like") is not None
    with pytest.raises(PreconditionFailed, match=r"^item_ids: 'never' was not shown"):
        session.seen("never")
    stranger = scene.new_user()
    with pytest.raises(PermissionDenied, match=r"^exposure_id"):
        scene.client.record_impressions(stranger, first.exposure_id, [Impression(1, first.item_ids[0])])
    with pytest.raises(InvalidArgument, match=r"^exposure_id"):
        scene.client.record_impressions(stranger, "made-up", [Impression(1, first.item_ids[0])])
    with pytest.raises(PermissionDenied, match=r"^interactions\[0\]\.exposure_id"):
        scene.client.record(Interaction(stranger, first.item_ids[0], exposure_id=first.exposure_id))


def test_a_token_of_another_stack_is_not_honoured_and_the_answer_says_so(scene: Scene) -> None:
    user = scene.known_user()
    answer = scene.client.recommend(user, k=5, freshness_token=FreshnessToken("another", 3, 7))
    assert not answer.token_honoured
    assert "token_not_honoured" in answer.degradations
    assert len(answer.items) == 5


def test_a_clock_that_is_an_hour_off_is_accepted_and_one_two_days_ahead_is_refused(scene: Scene) -> None:
    session, now = scene.client.session(scene.new_user()), datetime.now(UTC)
    for item_id, hours in zip(scene.items, (-1, 1), strict=False):
        session.record(item_id, "like", event_time=now + timedelta(hours=hours))
    assert session.recommend(k=5).token_honoured
    assert history_of(scene, session.user_id) == [scene.items[1], scene.items[0]]
    with pytest.raises(InvalidArgument, match=r"^interactions\[0\]\.event_time='\d+ ms' allowed: 0 to \d+ ms"):
        session.record(scene.items[2], "like", event_time=now + timedelta(days=2))


def test_a_filter_holds_for_every_item(scene: Scene) -> None:
    user, wanted = scene.known_user(), scene.items[20:30]
    answer = scene.client.recommend(user, k=50, filter=Filter(allow_item_ids=wanted, deny_item_ids=wanted[:4]))
    assert sorted(answer.item_ids) == sorted(wanted[4:])
    seen = scene.client.recommend(user, k=5, filter=Filter(exclude_seen=False, allow_item_ids=scene.items[:2]))
    assert sorted(seen.item_ids) == sorted(scene.items[:2])


@pytest.mark.parametrize(
    ("options", "field", "value", "allowed"),
    [
        ({"k": 0}, "k", "0", "1-1000"),
        ({"k": 1001}, "k", "1001", "1-1000"),
        ({"k": -1}, "k", "-1", "a whole number, 0 to 4294967295"),
        ({"k": "ten"}, "k", "'ten'", "a whole number, 0 to 4294967295"),
        ({"user_id": "u" * 129}, "user_id", "'text of 129 bytes'", "1-128 bytes of UTF-8"),
        ({"user_id": ""}, "user_id", "''", "1-128 bytes of UTF-8, or empty with a history"),
        ({"user_id": 42}, "user_id", "42", "text, UTF-8"),
        ({"user_id": "\ud800"}, "user_id", "'\\ud800'", "text, UTF-8"),
        ({"diversity": 2.0}, "diversity", "2.0", "0-1"),
        ({"page_depth": 3}, "page_depth", "3", "0, or 10 (k) to 1000"),
        ({"not_again": NotAgain()}, "not_again", "'neither answers nor minutes'", "at least one of them"),
        ({"not_again": NotAgain(answers=51)}, "not_again.answers", "51", "0-50"),
        ({"filter": "seen"}, "filter", "'seen'", "a Filter"),
        ({"filter": Filter(deny_item_ids="1193")}, "filter.deny_item_ids", "'1193'", "a sequence"),
        ({"context": {"device": 1}}, "context['device']", "1", "text to text"),
    ],
)
def test_a_wrong_request_names_field_value_and_what_is_allowed(
    scene: Scene, options: dict, field: str, value: str, allowed: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        scene.client.recommend(**{"user_id": "someone", "k": 10} | options)
    told = refused.value
    assert (told.field, told.value, told.allowed) == (field, value, allowed)
    assert told.message == f"{field}={value} allowed: {allowed}"
    assert not told.retriable


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"item_id": ""}, "item_id"),
        ({"type": "t" * 65}, "type"),
        ({"value": float("nan")}, "value"),
        ({"query": "words"}, "query"),
    ],
)
def test_a_wrong_interaction_refuses_the_whole_batch(scene: Scene, change: dict, field: str) -> None:
    user = scene.new_user()
    good = Interaction(user, scene.items[0], "like")
    with pytest.raises(InvalidArgument) as refused:
        scene.client.record(good, dataclasses.replace(good, **change))
    assert refused.value.field == f"interactions[1].{field}"
    assert refused.value.receipts == ()
    assert scene.client.recommend(user, k=1).provenance.state_source == "none"


def test_items_like_one_are_others(scene: Scene) -> None:
    answer = scene.client.similar(scene.items[0], k=7)
    assert len({one.item_id for one in answer.items} - {scene.items[0]}) == 7
    with pytest.raises(NotFound, match="no-such-item"):
        scene.client.similar("no-such-item")


def test_an_edit_of_some_fields_leaves_the_others(scene: Scene) -> None:
    client, new = scene.client, f"new-{uuid.uuid4().hex}"
    with pytest.raises(NotFound, match=new):
        client.get_item(new)
    with pytest.raises(NotFound, match=new):
        client.put_items([Item(new, "New")], fields=["title"])
    client.put_items([Item(new, "New", ["one", "two"])])
    item = until(lambda: client.list_items(new).items)[0]
    assert (item.item, item.is_trained) == (Item(new, "New", ("one", "two"), available=True), False)
    assert client.put_items([Item(new, "", withdrawn=True)], fields=["withdrawn"]) == 1
    assert client.get_item(new).item.item == Item(new, "New", ("one", "two"), available=True, withdrawn=True)
    client.put_items([Item(new, "Newer", ["ignored"])], fields=["title", "withdrawn"])
    assert client.get_item(new).item.item == Item(new, "Newer", ("one", "two"), available=True)
    client.put_items([Item(new, available=False)], fields=["available", "categories"])
    assert client.get_item(new).item.item == Item(new, "Newer", (), available=False)
    with pytest.raises(InvalidArgument, match="fields\\[1\\]='titel' allowed: title, categories, available, withdrawn"):
        client.put_items([Item(new, "x")], fields=["title", "titel"])


def test_the_catalogue_is_listed_page_by_page(scene: Scene) -> None:
    client, mark = scene.client, f"Listed-{uuid.uuid4().hex}"
    ids = [f"{mark}-{number}" for number in range(5)]
    for item_id in ids:
        client.put_items([Item(item_id, f"Title of {item_id}", [mark])])
    assert until(lambda: len(client.list_items(category=mark).items) == 5)

    def listed(**options: object) -> list[str]:
        found, token = [], ""
        while True:
            page = client.list_items(page_token=token, page_size=2, **options)
            found += [one.item.item_id for one in page.items]
            token = page.next_page_token
            if not token:
                return found

    assert listed(category=mark) == listed(prefix=mark.lower()) == listed(prefix=f"title OF {mark}-") == ids
    assert listed(category=mark, newest_first=True) == ids[::-1]
    assert listed(prefix=mark, category="no such") == []
    everything = client.list_items(page_size=1000).items
    assert {one.item.item_id for one in everything if one.is_trained} <= {*scene.items}
    with pytest.raises(InvalidArgument, match="page_size=1001 allowed: 0-1000"):
        client.list_items(page_size=1001)
    with pytest.raises(InvalidArgument, match="page_token='odd'"):
        client.list_items(page_token="odd")


def test_a_forgotten_user_is_a_new_one(scene: Scene) -> None:
    user = scene.known_user()
    preview = scene.client.forget_user(user, preview=True)
    assert preview.found["history_events"] == 12
    assert scene.client.recommend(user, k=5).provenance.state_source == "stored"
    report = scene.client.forget_user(user, timeout_s=30)
    assert report.is_applied
    assert report.left["history_events"] == 0
    assert scene.client.recommend(user, k=5).provenance.state_source == "none"


def test_receipts_are_of_the_stream_that_freshness_speaks_of(scene: Scene) -> None:
    (receipt,) = scene.client.record(Interaction(scene.new_user(), scene.items[0]))
    assert receipt.token.epoch == scene.client.freshness().epoch
    assert FreshnessToken.parse(str(receipt.token)) == receipt.token


def test_the_async_client_has_the_same_answers(scene: Scene) -> None:
    async def visit() -> None:
        async with scene.make_async() as client:
            session = client.session(scene.new_user())
            for item_id in scene.items[:6]:
                assert await session.record(item_id, "like") is not None
            first = await session.recommend(k=5, page_depth=8)
            assert first.token_honoured
            second = await session.next_page()
            assert second is not None
            assert len({*first.item_ids, *second.item_ids} - set(scene.items[:6])) == 8
            assert await session.next_page() is None
            for _ in range(20):  # Others' events may change the answer in between.
                mine, same = await client.recommend(session.user_id, k=5), scene.client.recommend(session.user_id, k=5)
                if mine.items == same.items:
                    break
            assert mine.items == same.items
            why = await session.explain(scene.items[100])
            assert [past.item_id for past in why.history] == scene.items[5::-1]
            with pytest.raises(InvalidArgument, match=r"^k=0 allowed: 1-1000$"):
                await client.recommend(session.user_id, k=0)
            assert len(await session.seen(*first.item_ids)) == 5

    asyncio.run(visit())

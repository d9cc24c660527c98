"""What the console's parts make, without a browser: addresses, examples, sentences, and whom the check refuses."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from freshet.v1 import common_pb2, gateway_pb2
from freshet_client import (
    AsyncClient,
    Certificate,
    Filter,
    FreshetError,
    Item,
    PreconditionFailed,
    ScoredItem,
    Unavailable,
)
from freshet_client.testing import FakeGateway
from freshet_client.wire import write
from google.protobuf.json_format import MessageToDict
from nicegui import Client, app, core, ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement
from starlette.datastructures import QueryParams

from services.console.access import Access
from services.console.config import ConsoleSettings
from services.console.elements import Line, in_script
from services.console.frame import Notice
from services.console.pages import live
from services.console.pages.live import Sample, Tail, rates
from services.console.pages.try_it import TryIt, Wanted, call_of
from services.console.pages.why import place_of
from services.console.plots import Watch
from services.console.same_origin import SameOrigin
from services.console.sentences import MEANINGS, about_answer, duration
from services.console.snippets import curl, python
from services.contracts.yaml_files import parse_rules
from services.gateway.domain import Degradation


def asked(query: str) -> Wanted:
    return Wanted.of(QueryParams(query))


def test_an_address_says_what_is_wanted_and_comes_back_the_same() -> None:
    wanted = asked("user=42&category=Drama&category=War&per_category=2&variety=0.5")
    assert wanted == Wanted(user="42", categories=["Drama", "War"], per_category=2, variety=0.5)
    assert wanted.filter == Filter(allow_categories=["Drama", "War"])
    assert wanted.address == [
        ("user", "42"),
        ("category", "Drama"),
        ("category", "War"),
        ("per_category", "2"),
        ("variety", "0.5"),
    ]


@pytest.mark.parametrize("query", ["per_category=-1", "per_category=x", "variety=nan", "variety=1.2.3", "variety="])
def test_what_an_address_cannot_say_is_left_out(query: str) -> None:
    assert asked(query) == Wanted()


@pytest.mark.parametrize(
    ("wanted", "method", "request_fields"),
    [
        (Wanted(words="war"), "Search", {"query": "war", "k": 3, "userId": "ann"}),
        (Wanted(like="7"), "Similar", {"itemId": "7", "k": 3, "userId": "ann"}),
        (Wanted(categories=["Drama"]), "Recommend", {"userId": "ann", "k": 3, "withDetails": True}),
    ],
)
def test_an_example_is_the_call_that_the_page_makes(wanted: Wanted, method: str, request_fields: dict) -> None:
    session = FakeGateway([]).async_client().session("ann")
    _, message, arguments = call_of(wanted, session, 3)
    found = write(message, {name: value for name, value in arguments.items() if value})
    if wanted.categories:
        request_fields = request_fields | {"filter": {"allowCategories": ["Drama"]}}
    assert found.DESCRIPTOR.name in (f"{method}Request", f"GatewayService{method}Request")
    assert MessageToDict(found) == request_fields


def test_examples_are_quoted_for_the_shell_and_for_python() -> None:
    user = 'o\'hara "$(rm)" <b>'
    command = curl("http://127.0.0.1:50080", "Recommend", {"userId": user, "k": 3}, with_key=False)
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["curl", "--json"]
    assert json.loads(words[2]) == {"userId": user, "k": 3}
    assert words[3] == "http://127.0.0.1:50080/freshet.v1.GatewayService/Recommend"
    assert '-H "Authorization: Bearer $FRESHET_API_KEY"' in curl("http://h:1", "Recommend", {}, with_key=True)
    program = python("127.0.0.1:50050", "recommend", {"user_id": user, "k": 3}, with_key=True)
    compile(program, "example", "exec")
    assert repr(user) in program
    given = {"rules": (), "expected_revision": 0}
    assert "client.put_rules(rules=(), expected_revision=0)" in python("h:1", "put_rules", given, with_key=False)
    assert "client.recommend(k=3)" in python("h:1", "recommend", {"user_id": "", "k": 3}, with_key=False)


def test_a_value_in_a_script_does_not_end_it() -> None:
    assert in_script("</script>") == '"<\\/script>"'


def test_every_degradation_has_its_words() -> None:
    assert MEANINGS.keys() == {one.name.lower() for one in Degradation}


def test_an_answer_says_how_exact_it_is_and_what_is_less_than_it_should_be() -> None:
    assert about_answer(1, (), Certificate("exact", 0.0), 2.34) == (
        "1 item; proven: nothing that is left out scores higher; made in 2.3 ms."
    )
    bounded = about_answer(2, ("not_fresh", "degradation_99"), Certificate("bounded", 0.02), None)
    assert bounded == (
        "2 items; nothing that is left out scores more than 0.020 higher; "
        "the stream is behind, so recent events may be missing; degradation_99."
    )


async def answered(kind: str, **headers: str) -> int:
    """The status of a request through the check; 0 where the application got it."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 0})

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scheme, method, path = f"{kind} /".split(" ")[:3]
    scope = {"type": scheme, "method": method, "path": path, "headers": pairs}
    await SameOrigin(application)(scope, None, send)
    return sent[0].get("status", sent[0].get("code"))


@pytest.mark.parametrize(
    ("kind", "headers", "status"),
    [
        ("http GET", {"host": "127.0.0.1:50060"}, 0),
        ("http GET", {"host": "localhost:50060", "origin": "http://other.example"}, 0),
        ("http GET", {"host": "[::1]:50060"}, 0),
        ("http GET", {"host": "rebound.example:50060"}, 403),
        ("http GET /healthz", {"host": "10.0.0.7:50060"}, 0),
        ("http GET", {"host": "["}, 403),
        ("http GET", {}, 403),
        ("http POST", {"host": "localhost:50060", "origin": "http://localhost:50060"}, 0),
        ("http POST", {"host": "localhost:50060", "origin": "http://other.example"}, 403),
        ("websocket ", {"host": "localhost:50060", "origin": "http://localhost:50060"}, 0),
        ("websocket ", {"host": "localhost:50060", "origin": "http://localhost:50061"}, 1008),
        ("websocket ", {"host": "localhost:50060", "origin": "null"}, 1008),
    ],
)
async def test_requests_of_other_pages_and_for_other_names_are_refused(kind: str, headers: dict, status: int) -> None:
    assert await answered(kind, **headers) == status


@pytest.mark.parametrize("fields", [{"host": "0.0.0.0"}, {"hosts": "console.example.com"}], ids=["host", "proxy"])
async def test_a_gateway_without_keys_is_shown_on_the_loopback_address_alone(fields: dict[str, str]) -> None:
    class Open:
        async def call(self, method: str, request: Any, timeout_s: float) -> Any:
            return gateway_pb2.DescribeCatalogueResponse(roles=["operator"])

    def access(**fields: str) -> Access:
        made = Access(ConsoleSettings(**fields))  # type: ignore[arg-type]
        made.client_of = lambda key: AsyncClient.over(Open())  # type: ignore[assignment]
        return made

    assert await access().admit("") == await access(**fields).admit("key") == {"operator"}
    with pytest.raises(FreshetError, match="on the loopback address alone"):
        await access(**fields).admit("")


def test_a_failure_is_shown_until_the_next_success_also_inside_another_block() -> None:
    with Client(ui.page("/unit"), request=None) as client:
        notice = Notice("notice", "alert")

    def shown() -> list[str]:
        return [one.text for one in client.elements.values() if isinstance(one, TextElement)]

    with notice.failures(), notice.failures():
        raise PreconditionFailed("the name is taken")
    assert shown() == ["the name is taken"]
    with notice.failures():
        parse_rules("rules", "rules: 7")
    assert shown()[0].startswith("rules: rules=")
    with notice.failures():
        pass
    assert shown() == [""]
    client.delete()


async def test_an_action_that_is_undone_goes_although_the_list_after_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = FakeGateway([Item("a", "A"), Item("b", "B")]).async_client()
    monkeypatch.setattr(core, "loop", asyncio.get_running_loop())
    with Client(ui.page("/unit"), request=None) as client:
        app.storage.client["notice"] = Notice("notice", "alert")
        page = TryIt(gateway, ConsoleSettings(), QueryParams("user=ann"), Line(), False, None)
        await page.show()
        await page._act(ScoredItem("a", 1.0, "mol", title="A"), "like")

        async def away(**given: Any) -> Any:
            raise Unavailable("candidates are away")

        def undos() -> list[Element]:
            return [one for one in client.elements.values() if one.props.get("title") == "Undo: A"]

        monkeypatch.setattr(page._session, "recommend", away)
        (listener,) = undos()[0]._event_listeners.values()
        await listener.handler()
        assert undos() == []
        assert "candidates are away" in [one.text for one in client.elements.values() if isinstance(one, TextElement)]
        assert (await gateway.user("ann")).events == ()
    client.delete()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "less than a second"),
        (59.4, "59 s"),
        (150, "2 min"),
        (7_200, "2 h"),
        (47 * 3600, "47 h"),
        (10 * 86_400, "10 days"),
    ],
)
def test_a_duration_is_said_in_the_largest_unit_that_fits(seconds: float, said: str) -> None:
    assert duration(seconds) == said


async def test_a_place_in_the_list_or_what_keeps_an_item_out() -> None:
    gateway = FakeGateway([Item("a", "A", ["x"]), Item("b", "B", ["x"]), Item("c", "C", withdrawn=True)])
    client = gateway.async_client()
    await client.session("ann").record("a", "like")
    assert await place_of(client, "ann", "b") == (1, "It is number 1 of this user's list now.")
    assert "had it already" in (await place_of(client, "ann", "a"))[1]
    for gone in ("c", "nowhere"):
        assert "withdrawn, not available, or unknown" in (await place_of(client, "ann", gone))[1]


class Freshness:
    """Answers each call with one more partition's progress, from (applied, end), and counts the calls."""

    def __init__(self, *progress: tuple[int, int]) -> None:
        self.progress, self.asked = list(progress), list[str]()

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        self.asked.append(method)
        applied, end = self.progress.pop(0)
        partition = gateway_pb2.PartitionProgress(partition=0, applied_offset=applied - 1, end_offset=end)
        index = common_pb2.IndexFreshness(lag_seconds=0.5) if applied < end else None
        return gateway_pb2.GetFreshnessResponse(interactions=[partition], candidates=index)


async def test_a_sample_has_the_streams_ends_and_a_stream_without_an_end_makes_none() -> None:
    client = AsyncClient.over(Freshness((10, 10), (20, 40), (10, -1)))
    samples = [await Sample.take(client) for _ in range(3)]
    assert [one and (one.written, one.applied, one.index_lag_s) for one in samples] == [
        (10, 10, None),
        (40, 20, 0.5),
        None,
    ]


def test_samples_make_rates() -> None:
    samples = [Sample(1.0, 10, 10, None), Sample(2.0, 40, 20, None), Sample(4.0, 40, 40, None)]
    assert rates(samples) == [(30.0, 10.0), (0.0, 10.0)]


async def test_many_that_look_are_one_question_a_second_and_the_last_answers_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Freshness((4, 5), (5, 6), (6, 7))
    watch = Watch(partial(Sample.take, AsyncClient.over(stream)), 1.0, 2)

    async def look() -> list[int]:
        return [one.written for one in await watch.look() if one is not None]

    assert await asyncio.gather(*(look() for _ in range(10))) == [[5]] * 10
    assert stream.asked == ["GetFreshness"]
    monkeypatch.setattr(watch, "_every_s", 0.0)
    assert [await look(), await look()] == [[5, 6], [6, 7]]


async def test_a_tail_is_read_while_somebody_looks_and_an_error_ends_it_until_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, opened = asyncio.Queue[gateway_pb2.TailInteractionsResponse | FreshetError](), []

    class Transport:
        async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
            opened.append(True)
            try:
                while isinstance(one := await written.get(), gateway_pb2.TailInteractionsResponse):
                    yield one
                raise one
            finally:
                opened[-1] = False

    async def becomes(of: Callable[[], Any], wanted: Any) -> None:
        async with asyncio.timeout(10):
            while of() != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    monkeypatch.setattr(live, "EVERY_S", 0.005)
    monkeypatch.setattr(live, "UNSEEN_S", 0.1)
    tail = Tail(AsyncClient.over(Transport()))
    items = [gateway_pb2.TailedInteraction(item_id=str(number)) for number in range(7)]
    written.put_nowait(gateway_pb2.TailInteractionsResponse(interactions=items, left_out=2))
    newest = [(1, "2"), (2, "3"), (3, "4"), (4, "5"), (5, "6")]
    await becomes(lambda: [(number, one.item_id) for number, one in tail.look()], newest)
    assert tail.left_out == 4
    await becomes(lambda: opened[-1], False)
    await becomes(lambda: [len(tail.look()), opened[-1]], [5, True])
    written.put_nowait(Unavailable("away"))
    with pytest.raises(Unavailable, match="away"):
        await becomes(tail.look, "never")
    await becomes(lambda: opened[-1], False)

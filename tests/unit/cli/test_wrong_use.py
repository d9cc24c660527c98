"""What a first user does wrong, or meets: a sentence that names it, before anything is written, and no traceback."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from freshet.v1 import gateway_pb2, reranker_pb2

from services.algorithms.bundles.event_schema import default_schema
from services.cli.output import CommandError, printable, report
from services.encoder.config import EncoderSettings
from services.stack import Ports, Stack
from services.stack.children import Children
from services.stack.components.component import Launch
from tests.unit.cli.gateway_on_loopback import MemoryGateway, serving
from tests.unit.cli.shell import refused, run, shown

MARKUP = "Song [live] 1947 [/x] :smile:"
ESCAPES = "a\x1b[2J\x1b]0;owned\x07\x9b31mb\u202ec"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """A command may set variables for what it starts; the demo hears SIGTERM."""
    variables, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("part", "option"), [("phrases", "--steps=5"), ("text-mol", "--minutes=1"), ("text-mol", "--device=cpu")]
)
def test_an_option_of_the_other_text_model_is_refused(part: str, option: str) -> None:
    said = refused(2, "train-text", part, option, "--bundle", "nowhere")
    assert f"{option.partition('=')[0]} has no effect on {part}" in said


class Titled(MemoryGateway):
    """Ids, titles and sentences that steer a terminal, or look like markup."""

    def Recommend(self, request: Any, context: Any) -> Any:
        answer = gateway_pb2.RecommendResponse(model_version="m[/m]", state_source="stored[/s]")
        answer.items.add(item_id=MARKUP, source="mol", rules=[ESCAPES])
        return answer

    def Similar(self, request: Any, context: Any) -> Any:
        answer = gateway_pb2.GatewayServiceSimilarResponse(index_version="i[/i]")
        answer.items.add(item_id=ESCAPES, title=MARKUP)
        return answer

    def Search(self, request: Any, context: Any) -> Any:
        answer = gateway_pb2.GatewayServiceSearchResponse(text_version=MARKUP)
        answer.results.add(item_id=MARKUP, title=ESCAPES)
        return answer

    def Explain(self, request: Any, context: Any) -> Any:
        similarity = reranker_pb2.ExplainScoreResponse(title=MARKUP + ESCAPES)
        past = [gateway_pb2.PastInteraction(item_id="1", title=ESCAPES)]
        return gateway_pb2.ExplainResponse(similarity=similarity, history=past)

    def ForgetUser(self, request: Any, context: Any) -> Any:
        return gateway_pb2.ForgetUserResponse(found={MARKUP: 1}, left={MARKUP: 0}, is_applied=True, remains=[ESCAPES])

    def PutItems(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"items[0].title={MARKUP + ESCAPES} is wrong")


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend", "--user", "[/u]", "--bundle", "nowhere"),
        ("similar", "[/i]"),
        ("search", "words", "--user", "[/u]"),
        ("explain", "[/u]", "[/i]"),
        ("forget", "[/u]", "--yes"),
        ("items", "put", "1"),
    ],
)
def test_ids_and_titles_are_shown_letter_by_letter(arguments: tuple[str, ...]) -> None:
    with serving(Titled()) as target:
        result = run(*arguments, "--gateway", target)
    assert MARKUP in result.output
    assert "a[2J]0;owned31mbc" in result.output
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.output)


def test_an_errors_text_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report(CommandError(ESCAPES, advice=ESCAPES), as_json=False)
    assert capsys.readouterr().err == "error: a[2J]0;owned31mbc\n  try: a[2J]0;owned31mbc\n"
    assert printable("tab\tand\nline end, Ünïcode 🎬") == "tab\tand\nline end, Ünïcode 🎬"


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("1600000000000", "milliseconds are divided by 1000"),
        *((text, f"time='{text}' allowed: ISO 8601, or unix seconds") for text in ("inf", "nan", "-inf", "1e300")),
        ("0001-01-01T00:00:00+14:00", "allowed: ISO 8601, or unix seconds of the years 1 to 9999"),
        ("yesterday", "time='yesterday' allowed: ISO 8601, or unix seconds"),
    ],
)
def test_a_time_that_the_wire_cannot_carry_is_refused(gateway: MemoryGateway, when: str, says: str) -> None:
    assert says in refused(2, "record", "--user", "1", "--item", "2", "--time", when)
    assert gateway.recorded == []


@pytest.mark.parametrize(
    ("when", "nanoseconds"),
    [("1600000000.123456789", 1_600_000_000_123_456_789), ("2020-01-01T00:00:00.123456Z", 1_577_836_800_123_456_000)],
)
def test_a_time_keeps_its_digits(gateway: MemoryGateway, when: str, nanoseconds: int) -> None:
    shown("record", "--user", "1", "--item", "2", "--time", when)
    assert gateway.recorded[0].interactions[0].event_time.ToNanoseconds() == nanoseconds


def test_a_state_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for state in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/state")):
        for command in ("up", "down", "demo"):
            said = refused(2, command, "--state", state)
            assert said.splitlines()[-1].startswith(f"error: {state}"), said
        refused(3, "status", "--state", state)


def users_table(path: Path) -> Path:
    pq.write_table(pa.table({"user_id": ["a"]}), path)
    return path


@pytest.mark.parametrize(
    ("command", "needs_no_log"),
    [
        (("recommend", "--batch", "{}", "--gateway", "127.0.0.1:1"), True),
        (("score", "--users", "{}", "--kafka", "x:1"), False),
    ],
)
def test_a_table_is_not_written_over_itself_nor_where_nothing_can_be(
    tmp_path: Path, command: tuple[str, ...], needs_no_log: bool
) -> None:
    users = users_table(tmp_path / "users.parquet")
    before = users.read_bytes()
    arguments = [word.format(users) for word in command]
    for out, says in (
        (users, "allowed: a file, and another one than the table of users"),
        (tmp_path / "." / "x" / ".." / "users.parquet", "and another one than the table of users"),
        (tmp_path, "allowed: a file"),
        *(((users / "answers", "users.parquet"), (Path("/proc/answers"), "/proc/answers")) if needs_no_log else ()),
    ):
        assert says in refused(2, *arguments, "--out", out)
    assert users.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["users.parquet"]


@pytest.mark.parametrize(
    ("command", "reads"),
    [
        (("train",), "services.offline.training.run.read_data"),
        (("retrain", "--serving", "nowhere"), "services.offline.retraining.run.load_bundle"),
        (("train-text", "all", "--bundle", "nowhere"), "services.offline.training.text_catalogue.load_bundle"),
    ],
)
def test_training_says_at_once_that_its_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], reads: str
) -> None:
    def must_not(*_: Any, **__: Any) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(reads, must_not)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "file", tmp_path / "folder", tmp_path / "file" / "below", Path("/proc/bundle")):
        result = run(*command, "--out", out)
        assert result.exit_code in (1, 2)
        assert result.stderr.startswith("error: /"), result.stderr
        assert "freshet train` makes" not in result.stderr
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


@contextmanager
def running_part(stack: Stack, name: str) -> Iterator[None]:
    """A process that the stack takes for its part."""
    children = Children(stack.place.state.run)
    stack.place.state.make()
    launch = Launch(
        argv=[sys.executable, "-c", "import time; time.sleep(60)"], environment={}, cwd=stack.place.state.root
    )
    children.spawn(name, launch, stack.log(name))
    try:
        yield
    finally:
        children.signal(name, signal.SIGKILL)
        children.wait_gone(name, 5)


def test_the_demo_leaves_a_running_stack_and_its_log_alone(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    log = stack.place.state.data("kafka") / "log"
    log.parent.mkdir(parents=True)
    log.write_text("everything")
    with running_part(stack, "redis"):
        said = refused(3, "demo", "--state", tmp_path)
        assert f"{tmp_path} has redis, {log.parent}; a demo deletes the stream and the states" in said
        assert "another --state, or `freshet down`" in said
        assert [part.name for part in stack.status() if part.running] == ["redis"]
    assert f"{tmp_path} has {log.parent}; a demo deletes" in run("demo", "--state", tmp_path).stderr
    assert log.read_text() == "everything"


def test_the_past_is_encoded_where_the_stack_has_what_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EncoderSettings] = []

    def stop(settings: EncoderSettings, *_: Any, **__: Any) -> None:
        asked.append(settings)
        raise ValueError("far enough")

    monkeypatch.setattr("services.offline.backfill.jobs.run_import", stop)
    bundle = SimpleNamespace(event_schema=default_schema())
    monkeypatch.setattr("services.algorithms.bundles.model_bundle.load_bundle", lambda path: bundle)
    rows = [f"{number % 9},{number % 5},{1_600_000_000 + number}" for number in range(90)]
    (tmp_path / "past.csv").write_text("\n".join(["user,item,timestamp", *rows]))
    for profile in ("compact", "split"):
        note = Stack(tmp_path / profile).place.state.run / "stack.json"
        note.parent.mkdir(parents=True)
        note.write_text(json.dumps({"ports": dict(Ports.default().numbers), "bundle": "b", "profile": profile}))
        assert "far enough" in run("import", tmp_path / "past.csv", "--state", tmp_path / profile).stderr
    assert [settings.engine for settings in asked] == ["in-process", "inference-server"]


def test_the_largest_items_go_in_requests_that_the_gateway_takes(gateway: MemoryGateway, tmp_path: Path) -> None:
    largest = {
        "title": "t" * 512,
        "categories": [f"{number:03}" + "c" * 125 for number in range(64)],
        "attributes": {f"{number:02}" + "n" * 126: "v" * 128 for number in range(32)},
    }
    rows = [{"item_id": f"{number:03}" + "i" * 125, **largest} for number in range(450)]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown("items", "put", "--file", tmp_path / "items.jsonl")
    assert [item.item_id for item in gateway.items] == [row["item_id"] for row in rows]


def test_a_size_is_no_overload(gateway: MemoryGateway, tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text(json.dumps({"item_id": "i", "title": "t" * 5_000_000}))
    words = ("--query", "q" * 5_000_000)
    for command in (
        ("items", "put", "--file", tmp_path / "items.jsonl"),
        ("recommend", "--user", "1", *words),
        ("recommend", "--batch", users_table(tmp_path / "u"), "--out", tmp_path / "o", *words),
    ):
        said = refused(2, *command)
        assert "the request is too large for" in said
        assert "in a moment" not in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"item_id": "a", "categories": "Drama|Comedy"}', 'categories="Drama|Comedy" allowed: a list'),
        ('{"item_id": "a", "categories": ["Drama", null]}', "categories[1]=null allowed: a string"),
        ('{"item_id": "a", "title": ["x"]}', 'title=["x"] allowed: a string'),
        ('{"item_id": "a", "available": "no"}', 'available="no" allowed: true or false'),
        ('{"item_id": null}', "no object with an item_id, which is a string"),
        ('{"item_id": "a", "title": "\\ud83d"}', r'title="\ud83d" allowed: a string'),
        ('{"item_id": "a", "attributes": {"price": [1]}}', "attributes['price']=[1] allowed: a number, a date"),
        ('{"item_id": "a", "attributes": [1]}', "attributes=[1] allowed: an object of numbers, dates and strings"),
        ('{"item_id": "a", "titel": "x"}', "titel: allowed fields"),
        ("[" * 100_000, "not JSON: "),
    ],
    ids=range(10),
)
def test_a_line_of_items_that_is_wrong_is_named_with_its_value(
    gateway: MemoryGateway, tmp_path: Path, line: str, says: str
) -> None:
    (tmp_path / "items.jsonl").write_text('{"item_id": "first", "title": "\u2028"}\n' + line)
    assert f"items.jsonl:2: {says}" in refused(2, "items", "put", "--file", tmp_path / "items.jsonl")
    assert gateway.items == []


def test_a_file_without_items_is_refused(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text("\n")
    assert "holds no item" in refused(2, "items", "put", "--file", tmp_path / "items.jsonl")


def test_an_item_that_the_gateway_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    class Refuses(MemoryGateway):
        def PutItems(self, request: Any, context: Any) -> Any:
            found = [place for place, item in enumerate(request.items) if item.item_id == "bad"]
            if found:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"items[{found[0]}].title='' allowed: something")
            return super().PutItems(request, context)

    rows = [f'{{"item_id": "{number}"}}' for number in range(1_200)]
    rows[1_100] = '\n{"item_id": "bad"}'
    (tmp_path / "items.jsonl").write_text("\n".join(rows))
    with serving(Refuses()) as target:
        said = refused(2, "items", "put", "--file", tmp_path / "items.jsonl", "--gateway", target)
    assert "items.jsonl:1102: items[100].title='' allowed: something (1,000 of 1,200 items were" in said


def test_what_was_never_there_is_not_called_withdrawn_or_taken_back(gateway: MemoryGateway) -> None:
    assert shown("items", "withdraw", "never") == "withdrawals written (ids are not checked): 1 item\n"
    undone = shown("undo", "--user", "1", "--event-id", "never")
    assert undone.startswith("undo of never, if there is one, recorded  event undo-of-never\n")

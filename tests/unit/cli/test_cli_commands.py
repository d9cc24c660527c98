"""The commands as a person and a script meet them: output, exit status, and what goes over the wire."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import typer.main

from services.cli.commands import bench
from services.cli.main import app
from services.cli.output import emit_json, reports_errors
from tests.unit.cli.gateway_on_loopback import EPOCH, MemoryGateway
from tests.unit.cli.shell import facts, refused, shown

# A recommendation for user 42, without titles.
RECOMMEND = ("recommend", "--user", "42", "--bundle", "nowhere")


def test_record_prints_the_event_id_and_a_token(gateway: MemoryGateway) -> None:
    text = shown("record", "--user", "42", "--item", "1193", "--type", "rating", "--value", "5")
    assert "assigned-1" in text
    assert f"{EPOCH}:3:0" in text
    sent = gateway.recorded[0].interactions[0]
    assert (sent.user_id, sent.item_id, sent.type, sent.value) == ("42", "1193", "rating", 5.0)


def test_the_token_of_record_is_accepted_by_recommend(gateway: MemoryGateway) -> None:
    receipt = facts("record", "--user", "42", "--item", "1193")
    assert (receipt["epoch"], receipt["partition"], receipt["offset"]) == (EPOCH, 3, 0)
    shown(*RECOMMEND, "--token", receipt["token"])
    asked = gateway.asked[0].freshness_token
    assert (asked.epoch, asked.partition, asked.offset) == (EPOCH, 3, 0)


def test_as_of_is_sent_as_given(gateway: MemoryGateway) -> None:
    when = "2001-02-03T04:05:06Z"
    assert facts(*RECOMMEND, "--as-of", when)["absence_bucket"] == 5
    assert gateway.asked[0].as_of.ToJsonString() == when
    said = refused(2, *RECOMMEND, "--as-of", "yesterday")
    assert "as-of='yesterday' allowed: ISO 8601, or unix seconds" in said
    shown(*RECOMMEND)
    assert not gateway.asked[1].HasField("as_of")


def test_recommend_shows_items_and_provenance(gateway: MemoryGateway) -> None:
    text = shown(*RECOMMEND, "--k", "3")
    for part in ("1193", "0.9000", "mol", "0123456789abcdef", "gap <= 0.0125", "3:41", "12.0 s", "4.5 ms (queue 0.0 "):
        assert part in text


def test_recommend_in_json_is_one_object(gateway: MemoryGateway) -> None:
    answer = facts(*RECOMMEND)
    assert [item["item_id"] for item in answer["items"]] == ["1193", "661", "914"]
    assert answer["state_position"] == "3:41"
    assert answer["degradations"] == []
    assert answer["stages_ms"]["total"] == 4.5
    assert answer["index_freshness"] == {
        "deltas_offset": 7, "newest_recorded_time": "2026-11-21T09:30:00.250Z", "lag_seconds": 0.5,
    }  # fmt: skip


def test_a_sequence_of_items_is_sent_oldest_first_with_rising_times(gateway: MemoryGateway) -> None:
    shown("recommend", "--items", "1193, 661,914", "--bundle", "nowhere")
    history = gateway.asked[0].history
    assert [event.item_id for event in history] == ["1193", "661", "914"]
    times = [event.event_time.seconds for event in history]
    assert times == sorted(set(times))


def test_filters_reach_the_gateway(gateway: MemoryGateway) -> None:
    shown(
        *(*RECOMMEND, "--include-seen", "--deny-items", "1,2", "--allow-categories", "Drama"),
        *("--max-per-category", "2", "--context", "device=tv"),
    )
    asked = gateway.asked[0]
    assert asked.filter.exclude_seen is False
    assert list(asked.filter.deny_item_ids) == ["1", "2"]
    assert list(asked.filter.allow_categories) == ["Drama"]
    assert asked.max_per_category == 2
    assert dict(asked.context) == {"device": "tv"}


def test_an_unhonoured_token_is_said(gateway: MemoryGateway) -> None:
    text = shown(*RECOMMEND, "--token", "ab:3:5000")
    assert "not reflected yet" in text
    assert "token_not_honoured" in text


def test_search_shows_what_found_each_item_and_what_failed(gateway: MemoryGateway) -> None:
    text = shown("search", "space movies", "--user", "42", "--k", "3")
    for part in (
        *("[Matrix], The (1999)", "2571", "0.0325", "phrases 1, lexical 4, mol 1 as 'Matrix'", "text text-1"),
        *("model m1", "12.5 ms", "phrases 8.2", "text_mol -", "text_mol: no answer within 400 ms", "partial_sources"),
    ):
        assert part in text
    asked = gateway.searched[0]
    assert (asked.query, asked.user_id, asked.k, asked.filter.exclude_seen) == ("space movies", "42", 3, False)


def test_a_search_in_json_names_what_is_missing_by_null(gateway: MemoryGateway) -> None:
    found = facts("search", "space movies")
    assert [(one["rank"], one["item_id"], one["title"], one["identifier"]) for one in found["items"]] == [
        (1, "2571", "[Matrix], The (1999)", "Matrix"),
        (2, "new", None, None),
    ]
    assert found["items"][1]["found_by"] == [{"source": "lexical", "rank": 1, "score": 9.5}]
    assert [one["failure"] for one in found["sources"]] == [None, None, "text_mol: no answer within 400 ms"]
    assert (found["model_version"], found["degradations"]) == (None, ["partial_sources"])


def test_a_search_that_finds_nothing_says_so(gateway: MemoryGateway) -> None:
    assert "nothing was found" in shown("search", "nothing")


def test_a_refused_search_and_a_generator_that_is_away_are_told_apart(gateway: MemoryGateway) -> None:
    assert "query='text of 0 bytes'" in refused(2, "search", "")
    assert "generator: refused" in refused(3, "search", "no generator")


def test_a_search_click_is_recorded_with_its_words(gateway: MemoryGateway) -> None:
    shown("record", "--user", "42", "--item", "2571", "--query", "space movies")
    shown("record", "--user", "42", "--item", "2571", "--type", "like")
    shown(*RECOMMEND, "--query", "space")
    sent = [(one.type, one.query) for request in gateway.recorded for one in request.interactions]
    assert sent == [("search_click", "space movies"), ("like", "")]
    assert gateway.asked[0].query == "space"


def test_a_gateway_that_is_not_running_says_freshet_up() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers there
        said = refused(3, *RECOMMEND, "--gateway", f"127.0.0.1:{held.getsockname()[1]}")
    assert "not running" in said
    assert "freshet up" in said


def test_overload_and_a_missing_dependency_are_worth_a_retry(gateway: MemoryGateway) -> None:
    for user, said in (("overloaded", "too much to do"), ("no-kafka", "Kafka has not acknowledged")):
        assert said in refused(3, "record", "--user", user, "--item", "1")


def test_errors_in_json_are_one_object_on_stdout(gateway: MemoryGateway) -> None:
    assert json.loads(refused(2, *RECOMMEND, "--k", "0", "--json"))["exit_status"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend",),
        (*RECOMMEND, "--token", "nonsense"),
        (*RECOMMEND, "--context", "no-equals"),
        ("record", "--user", "42", "--item", "1", "--value", "nan"),
        ("record", "--user", "42"),
        ("data", "validate", "no-such-file.csv"),
        ("no-such-command",),
    ],
)
def test_wrong_use_exits_with_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    refused(2, *arguments)


def options_of(command: Any, path: str = "freshet") -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from options_of(child, f"{path} {name}")
    yield from ((path, option) for option in command.params)


OPTIONS = list(options_of(typer.main.get_command(app)))


def test_every_command_has_help_with_an_example() -> None:
    paths = {path.removeprefix("freshet ") for path, option in OPTIONS if "--json" in option.opts}
    assert {f"bench {command.name}" for command in bench.app.registered_commands} < paths
    for path in sorted(paths | {"serve", "logs", "loadtest"}):
        assert f"freshet {path}" in shown(*path.split(), "--help"), path


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, services.cli.main; print([m for m in ('torch', 'grpc', 'numpy', 'kafka') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_shows_measuring_commands_in_a_panel_of_their_own_at_the_end() -> None:
    lines = shown("--help").splitlines()
    titles = [line.strip("╭╮─ ") for line in lines if line.startswith("╭")]
    assert titles == [
        *("Options", "Start here", "Local stack", "Recommendations, search, items and users", "Data and models"),
        *("Maintenance", "Measuring (benchmarks and load tests)"),
    ]
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("╭")) :]
    assert {line.split()[1] for line in last if line.startswith("│ ") and line[2] != " "} == {"bench", "loadtest"}


def test_the_state_folder_is_one_option_with_one_variable_and_one_help_text() -> None:
    # The quick start has a folder of its own, so that it never meets a stack of yours.
    state = [option for path, option in OPTIONS if "--state" in option.opts and path != "freshet quickstart"]
    assert len(state) >= 10
    assert {(tuple(option.opts), option.envvar, str(option.default), option.help) for option in state} == {
        (("--state",), "FRESHET_STATE", ".freshet", state[0].help)
    }


def test_what_is_logged_below_a_command_leaves_its_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def command() -> None:
        structlog.get_logger().warning("record_unreadable", offset=3)
        emit_json({"records": 1})

    command()
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"records": 1}
    assert "record_unreadable" in shown.err

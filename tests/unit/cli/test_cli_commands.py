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
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.cli.output import emit_json, reports_errors
from tests.unit.cli.gateway_on_loopback import EPOCH, MemoryGateway


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_record_prints_the_event_id_and_a_token(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("record", "--user", "42", "--item", "1193", "--type", "rating", "--value", "5", "--gateway", target)
    assert result.exit_code == 0, result.output
    assert "assigned-1" in result.stdout
    assert f"{EPOCH}:3:0" in result.stdout
    sent = server.recorded[0].interactions[0]
    assert (sent.user_id, sent.item_id, sent.type, sent.value) == ("42", "1193", "rating", 5.0)


def test_the_token_of_record_is_accepted_by_recommend(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    recorded = run("record", "--user", "42", "--item", "1193", "--gateway", target, "--json")
    token = json.loads(recorded.stdout)["token"]
    result = run("recommend", "--user", "42", "--token", token, "--gateway", target, "--bundle", "nowhere")
    assert result.exit_code == 0, result.output
    asked = server.asked[0].freshness_token
    assert (asked.epoch, asked.partition, asked.offset) == (EPOCH, 3, 0)


def test_as_of_is_sent_as_given(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    when = "2001-02-03T04:05:06Z"
    result = run("recommend", "--user", "42", "--as-of", when, "--gateway", target, "--bundle", "nowhere", "--json")
    assert (result.exit_code, json.loads(result.stdout)["absence_bucket"]) == (0, 5)
    assert server.asked[0].as_of.ToJsonString() == when
    refused = run("recommend", "--user", "42", "--as-of", "yesterday", "--gateway", target, "--bundle", "nowhere")
    assert refused.exit_code == 2
    assert "as-of='yesterday' allowed: ISO 8601, or unix seconds" in refused.stderr
    run("recommend", "--user", "42", "--gateway", target, "--bundle", "nowhere")
    assert not server.asked[1].HasField("as_of")


def test_recommend_shows_items_and_provenance(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    result = run("recommend", "--user", "42", "--k", "3", "--gateway", target, "--bundle", "nowhere")
    assert result.exit_code == 0, result.output
    for shown in ("1193", "0.9000", "mol", "0123456789abcdef", "gap <= 0.0125", "3:41", "12.0 s"):
        assert shown in result.stdout


def test_recommend_in_json_is_one_object(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    result = run("recommend", "--user", "42", "--gateway", target, "--bundle", "nowhere", "--json")
    answer = json.loads(result.stdout)
    assert [item["item_id"] for item in answer["items"]] == ["1193", "661", "914"]
    assert answer["state_position"] == "3:41"
    assert answer["degradations"] == []


def test_a_sequence_of_items_is_sent_oldest_first_with_rising_times(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("recommend", "--items", "1193, 661,914", "--gateway", target, "--bundle", "nowhere")
    assert result.exit_code == 0, result.output
    history = server.asked[0].history
    assert [event.item_id for event in history] == ["1193", "661", "914"]
    times = [event.event_time.seconds for event in history]
    assert times == sorted(set(times))


def test_filters_reach_the_gateway(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    run(
        *("recommend", "--user", "42", "--gateway", target, "--bundle", "nowhere", "--include-seen"),
        *("--deny-items", "1,2", "--allow-categories", "Drama", "--max-per-category", "2", "--context", "device=tv"),
    )
    asked = server.asked[0]
    assert asked.filter.exclude_seen is False
    assert list(asked.filter.deny_item_ids) == ["1", "2"]
    assert list(asked.filter.allow_categories) == ["Drama"]
    assert asked.max_per_category == 2
    assert dict(asked.context) == {"device": "tv"}


def test_an_unhonoured_token_is_said(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    result = run("recommend", "--user", "42", "--token", "ab:3:5000", "--gateway", target, "--bundle", "nowhere")
    assert result.exit_code == 0
    assert "not reflected yet" in result.stdout
    assert "token_not_honoured" in result.stdout


def test_search_shows_what_found_each_item_and_what_failed(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("search", "space movies", "--user", "42", "--k", "3", "--gateway", target)
    assert result.exit_code == 0, result.output
    for shown in (
        "[Matrix], The (1999)",
        "2571",
        "0.0325",
        "phrases 1, lexical 4, mol 1 as 'Matrix'",
        "text text-1",
        "model m1",
    ):
        assert shown in result.stdout
    for shown in ("12.5 ms", "phrases 8.2", "text_mol -", "text_mol: no answer within 400 ms", "partial_sources"):
        assert shown in result.stdout
    asked = server.searched[0]
    assert (asked.query, asked.user_id, asked.k, asked.filter.exclude_seen) == ("space movies", "42", 3, False)


def test_a_search_that_finds_nothing_says_so(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    result = run("search", "nothing", "--gateway", target)
    assert result.exit_code == 0
    assert "nothing was found" in result.stdout


def test_a_refused_search_and_a_generator_that_is_away_are_told_apart(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    refused = run("search", "", "--gateway", target)
    assert (refused.exit_code, "query='text of 0 bytes'" in refused.stderr) == (2, True)
    away = run("search", "no generator", "--gateway", target)
    assert (away.exit_code, "generator: refused" in away.stderr) == (3, True)


def test_a_search_click_is_recorded_with_its_words(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("record", "--user", "42", "--item", "2571", "--query", "space movies", "--gateway", target)
    assert result.exit_code == 0, result.output
    run("record", "--user", "42", "--item", "2571", "--type", "like", "--gateway", target)
    run("recommend", "--user", "42", "--query", "space", "--gateway", target, "--bundle", "nowhere")
    sent = [(one.type, one.query) for request in server.recorded for one in request.interactions]
    assert sent == [("search_click", "space movies"), ("like", "")]
    assert server.asked[0].query == "space"


def test_undo_names_what_was_taken_back(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    result = run("undo", "--user", "42", "--event-id", "e-7", "--gateway", target)
    assert result.exit_code == 0
    assert "undo-of-e-7" in result.stdout


def test_a_gateway_that_is_not_running_says_freshet_up() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers there
        target = f"127.0.0.1:{held.getsockname()[1]}"
        result = run("recommend", "--user", "42", "--gateway", target)
    assert result.exit_code == 3
    assert "not running" in result.stderr
    assert "freshet up" in result.stderr
    assert "Traceback" not in result.output


def test_overload_and_a_missing_dependency_are_worth_a_retry(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    for user, said in (("overloaded", "too much to do"), ("no-kafka", "Kafka has not acknowledged")):
        result = run("record", "--user", user, "--item", "1", "--gateway", target)
        assert result.exit_code == 3
        assert said in result.stderr


def test_errors_in_json_are_one_object_on_stdout(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    result = run("recommend", "--user", "42", "--k", "0", "--gateway", target, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["exit_status"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend",),
        ("recommend", "--user", "42", "--token", "nonsense"),
        ("recommend", "--user", "42", "--context", "no-equals"),
        ("record", "--user", "42", "--item", "1", "--time", "yesterday"),
        ("record", "--user", "42", "--item", "1", "--value", "nan"),
        ("record", "--user", "42"),
        ("data", "validate", "no-such-file.csv"),
        ("no-such-command",),
    ],
)
def test_wrong_use_exits_with_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_every_command_has_help_with_an_example() -> None:
    listed = run("--help")
    assert listed.exit_code == 0
    for command in (["record"], ["undo"], ["recommend"], ["data", "validate"], *PLAIN_COMMANDS):
        result = run(*command, "--help")
        assert result.exit_code == 0, command
        assert f"freshet {' '.join(command)}" in result.stdout, command


PLAIN_COMMANDS = [
    *(["quickstart"], ["demo"], ["up"], ["down"], ["status"], ["doctor"], ["serve"]),
    *(["train"], ["export"], ["import"], ["loadtest"]),
    *(["explain"], ["forget"], ["items", "put"], ["items", "withdraw"], ["watch"], ["backup"], ["restore"]),
]


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, services.cli.main; print([m for m in ('torch', 'grpc', 'numpy', 'kafka') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_shows_measuring_commands_in_a_panel_of_their_own_at_the_end() -> None:
    lines = run("--help").output.splitlines()
    titles = [line.strip("╭╮─ ") for line in lines if line.startswith("╭")]
    assert titles == [
        "Options",
        "Start here",
        "Local stack",
        "Recommendations, search, items and users",
        "Data and models",
        "Maintenance",
        "Measuring (benchmarks and load tests)",
    ]
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("╭")) :]
    assert {line.split()[1] for line in last if line.startswith("│ ") and line[2] != " "} == {
        "bench",
        "loadtest",
    }


def options_of(command: Any, path: str = "freshet") -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from options_of(child, f"{path} {name}")
    yield from ((path, option) for option in command.params)


def test_the_state_folder_is_one_option_with_one_variable_and_one_help_text() -> None:
    # The quick start has a folder of its own, so that it never meets a stack of yours.
    state = [
        (path, option)
        for path, option in options_of(typer.main.get_command(app))
        if "--state" in option.opts and path != "freshet quickstart"
    ]
    assert len(state) >= 10
    assert {(tuple(option.opts), option.envvar, str(option.default)) for _, option in state} == {
        (("--state",), "FRESHET_STATE", ".freshet")
    }
    assert len({option.help for _, option in state}) == 1


def test_what_is_logged_below_a_command_leaves_its_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def command() -> None:
        structlog.get_logger().warning("record_unreadable", offset=3)
        emit_json({"records": 1})

    command()
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"records": 1}
    assert "record_unreadable" in shown.err

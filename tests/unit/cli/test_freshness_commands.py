"""explain, forget, items and watch as a person and a script meet them, over a real gRPC server on loopback."""

import json
from pathlib import Path

import pytest
from freshet.v1 import gateway_pb2
from prometheus_client import CollectorRegistry, Histogram, start_http_server
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.stack.lag import Lags
from tests.unit.cli.gateway_on_loopback import MemoryGateway


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_explain_shows_parts_pairs_voters_and_the_users_own_past(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("explain", "42", "1193", "--gateway", target)
    assert result.exit_code == 0, result.output
    for shown in (
        *("0.3500", "Casablanca (1193)", "64%", "22%", "14%", "124 interactions", "0.7500"),
        *("voted: 3 x rating, 2.0 min to 1.0 d old", "Vertigo (2.0 h)", "model m1", "index i1+7"),
        # lambda * from_model, lambda * from_interactions, (1 - lambda) * vote.
        *("+0.2250", "+0.0750", "+0.0500"),
    ):
        assert shown in result.stdout
    assert (server.explained[0].user_id, server.explained[0].item_id, server.explained[0].max_pairs) == (
        "42",
        "1193",
        6,
    )


def test_explain_names_rules_and_what_each_does(gateway: tuple[str, MemoryGateway], tmp_path: Path) -> None:
    target, server = gateway
    (tmp_path / "rules.yaml").write_text(
        "rules:\n- {name: up, item_ids: ['1193'], boost: 0.25}\n- {name: top, item_ids: ['1193'], pin: 2}\n"
        "- {name: few, item_ids: ['1193'], cap: 3}\n"
    )
    result = run("explain", "42", "1193", "--rules", str(tmp_path / "rules.yaml"), "--gateway", target)
    assert result.exit_code == 0, result.output
    for shown in (
        "rule up: +0.2500",
        "rule top: the best of its items stands at position 2",
        "rule few: at most 3 of its items",
        "with rules 0.6000",
    ):
        assert shown in result.stdout
    assert [rule.name for rule in server.explained[0].rules] == ["up", "top", "few"]


def test_similar_shows_titles_and_similarities(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("similar", "1193", "--k", "2", "--user", "42", "--gateway", target)
    assert result.exit_code == 0
    assert "[Matrix], The (1999)" in result.output
    assert "0.7500" in result.output
    assert "exact" in result.output
    (asked,) = server.similar
    assert (asked.item_id, asked.user_id, asked.k, asked.filter.exclude_seen) == ("1193", "42", 2, True)
    facts = json.loads(run("similar", "1193", "--gateway", target, "--json").stdout)
    assert [(one["rank"], one["item_id"], one["title"]) for one in facts["items"]] == [
        (1, "2571", "[Matrix], The (1999)"),
        (2, "new", None),
    ]
    assert not server.similar[1].filter.exclude_seen
    unknown = run("similar", "unknown", "--gateway", target)
    assert unknown.exit_code != 0
    assert "item_id='unknown'" in unknown.output


def test_a_preview_removes_nothing(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("forget", "42", "--preview", "--gateway", target)
    assert result.exit_code == 0, result.output
    assert [request.preview for request in server.forgotten] == [True]
    assert "interactions in item states" in result.stdout
    assert "30" in result.stdout
    assert "the log keeps" in result.stdout


def test_forget_reports_what_was_found_and_what_is_left(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("forget", "42", "--yes", "--gateway", target, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [request.preview for request in server.forgotten] == [False]
    assert answer["found"] == {"history_events": 12, "summed_interactions": 30}
    assert set(answer["left"].values()) == {0}


def test_a_forget_that_is_still_on_its_way_says_so(gateway: tuple[str, MemoryGateway]) -> None:
    target, _ = gateway
    result = run("forget", "slow", "--yes", "--gateway", target)
    assert result.exit_code == 3
    assert "not every process has applied it yet" in result.stdout


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_without_a_person_to_ask_nothing_is_forgotten(
    gateway: tuple[str, MemoryGateway], more: tuple[str, ...]
) -> None:
    target, server = gateway
    result = run("forget", "42", "--gateway", target, *more)
    assert result.exit_code == 2
    assert server.forgotten == []


def test_an_item_is_put_whole(gateway: tuple[str, MemoryGateway]) -> None:
    target, server = gateway
    result = run("items", "put", "n1", "--title", "New", "--category", "A", "--category", "B", "--gateway", target)
    assert result.exit_code == 0, result.output
    (item,) = server.items
    assert (item.item_id, item.title, list(item.categories), item.available) == ("n1", "New", ["A", "B"], True)
    run("items", "put", "n1", "--unavailable", "--gateway", target)
    assert server.items[-1].available is False


def test_items_of_a_file_go_in_requests_of_two_hundred(gateway: tuple[str, MemoryGateway], tmp_path: Path) -> None:
    target, server = gateway
    lines = [json.dumps({"item_id": f"i{n}", "title": "T", "categories": ["c"]}) for n in range(1500)]
    (tmp_path / "items.jsonl").write_text("\n".join([*lines, ""]))
    result = run("items", "put", "--file", str(tmp_path / "items.jsonl"), "--gateway", target, "--json")
    assert json.loads(result.stdout) == {"num_written": 1500}
    assert (len(server.items), server.put_requests) == (1500, 8)


def test_watch_shows_positions_versions_and_what_waits(gateway: tuple[str, MemoryGateway], tmp_path: Path) -> None:
    target, _ = gateway
    result = run("watch", "--once", "--gateway", target, "--state", str(tmp_path))
    assert result.exit_code == 0, result.output
    for shown in ("model m1", "index i1+7", "250 ms", "no reader", "no answer"):
        assert shown in result.stdout


def test_watch_in_json_says_what_is_behind_and_fails_when_a_part_is_away(
    gateway: tuple[str, MemoryGateway], tmp_path: Path
) -> None:
    target, server = gateway
    server.degradations = [gateway_pb2.DEGRADATION_NOT_FRESH]
    result = run("watch", "--once", "--json", "--gateway", target, "--state", str(tmp_path))
    assert result.exit_code == 3
    facts = json.loads(result.stdout)
    assert [row["behind"] for row in facts["interactions"]] == [2, None]
    assert facts["candidates"]["lag_seconds"] == 0.25
    assert facts["reranker"] is None
    assert facts["degradations"] == ["not_fresh"]


def test_lags_are_quantiles_of_what_came_since_the_watch_began() -> None:
    registry = CollectorRegistry()
    lag = Histogram("lag_seconds", "", buckets=(0.1, 0.2, 1.0), registry=registry)
    for _ in range(100):
        lag.observe(0.9)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    addresses = {"state": (f"127.0.0.1:{server.server_port}", "lag_seconds"), "away": ("127.0.0.1:1", "lag_seconds")}
    try:
        lags = Lags(addresses, since_start=False)
        for _ in range(10):
            lag.observe(0.15)
        found = lags.read()
        whole = Lags(addresses, since_start=True).read()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert found["away"] is None
    assert found["state"] is not None
    assert found["state"]["count"] == 10
    assert 100 <= found["state"]["p50"] <= 200
    assert whole["state"] is not None
    assert (whole["state"]["count"], whole["state"]["p50"] > 200) == (110, True)

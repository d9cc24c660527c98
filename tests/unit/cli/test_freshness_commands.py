"""explain, forget, items and watch as a person and a script meet them, over a real gRPC server on loopback."""

import json
from pathlib import Path

import pytest
from freshet.v1 import gateway_pb2
from prometheus_client import CollectorRegistry, Histogram, start_http_server

from services.stack.lag import Lags
from tests.unit.cli.gateway_on_loopback import MemoryGateway
from tests.unit.cli.shell import facts, refused, shown


def test_explain_shows_parts_pairs_voters_and_the_users_own_past(gateway: MemoryGateway) -> None:
    text = shown("explain", "42", "1193")
    for part in (
        *("0.3500", "Casablanca (1193)", "64%", "22%", "14%", "124 interactions", "0.7500"),
        *("voted: 3 x rating, 2.0 min to 1.0 d old", "Vertigo (2.0 h)", "model m1", "index i1+7"),
        # lambda * from_model, lambda * from_interactions, (1 - lambda) * vote.
        *("+0.2250", "+0.0750", "+0.0500"),
    ):
        assert part in text
    (asked,) = gateway.explained
    assert (asked.user_id, asked.item_id, asked.max_pairs) == ("42", "1193", 6)


def test_an_explanation_without_votes_is_the_models_alone(gateway: MemoryGateway) -> None:
    text = shown("explain", "no-votes", "1193")
    assert all(part in text for part in ("+0.3000", "+0.1000", "no votes"))
    assert facts("explain", "no-votes", "1193")["votes"]["model_share"] == 1.0


def test_explain_names_rules_and_what_each_does(gateway: MemoryGateway, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        "rules:\n- {name: up, item_ids: ['1193'], boost: 0.25}\n- {name: top, item_ids: ['1193'], pin: 2}\n"
        "- {name: few, item_ids: ['1193'], cap: 3}\n"
    )
    text = shown("explain", "42", "1193", "--rules", tmp_path / "rules.yaml")
    for part in (
        "rule up: +0.2500",
        "rule top: the best of its items stands at position 2",
        "rule few: at most 3 of its items",
        "with rules 0.6000",
    ):
        assert part in text
    assert [rule.name for rule in gateway.explained[0].rules] == ["up", "top", "few"]


def test_similar_shows_titles_and_similarities(gateway: MemoryGateway) -> None:
    text = shown("similar", "1193", "--k", "2", "--user", "42")
    assert all(part in text for part in ("[Matrix], The (1999)", "0.7500", "exact"))
    (asked,) = gateway.similar
    assert (asked.item_id, asked.user_id, asked.k, asked.filter.exclude_seen) == ("1193", "42", 2, True)
    found = facts("similar", "1193")
    assert [(one["rank"], one["item_id"], one["title"]) for one in found["items"]] == [
        (1, "2571", "[Matrix], The (1999)"),
        (2, "new", None),
    ]
    assert (found["item_id"], found["certificate"]["kind"]) == ("1193", "exact")
    assert not gateway.similar[1].filter.exclude_seen
    assert "item_id='unknown'" in refused(2, "similar", "unknown")


def test_a_preview_removes_nothing(gateway: MemoryGateway) -> None:
    text = shown("forget", "42", "--preview")
    assert [request.preview for request in gateway.forgotten] == [True]
    assert all(part in text for part in ("interactions in item states", "30", "the log keeps"))


def test_forget_reports_what_was_found_and_what_is_left(gateway: MemoryGateway) -> None:
    answer = facts("forget", "42", "--yes")
    assert [request.preview for request in gateway.forgotten] == [False]
    assert answer["found"] == {"history_events": 12, "summed_interactions": 30}
    assert set(answer["left"].values()) == {0}


def test_a_forget_that_is_still_on_its_way_says_so(gateway: MemoryGateway) -> None:
    assert "not every process has applied it yet" in refused(3, "forget", "slow", "--yes")


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_without_a_person_to_ask_nothing_is_forgotten(gateway: MemoryGateway, more: tuple[str, ...]) -> None:
    refused(2, "forget", "42", *more)
    assert gateway.forgotten == []


def test_an_item_is_put_whole(gateway: MemoryGateway) -> None:
    shown("items", "put", "n1", "--title", "New", "--category", "A", "--category", "B")
    (item,) = gateway.items
    assert (item.item_id, item.title, list(item.categories), item.available) == ("n1", "New", ["A", "B"], True)
    shown("items", "put", "n1", "--unavailable")
    assert gateway.items[-1].available is False


def test_items_of_a_file_go_in_requests_of_two_hundred(gateway: MemoryGateway, tmp_path: Path) -> None:
    lines = [json.dumps({"item_id": f"i{n}", "title": "T", "categories": ["c"]}) for n in range(1500)]
    (tmp_path / "items.jsonl").write_text("\n".join([*lines, ""]))
    assert facts("items", "put", "--file", tmp_path / "items.jsonl") == {"num_written": 1500}
    assert (len(gateway.items), gateway.put_requests) == (1500, 8)


def test_watch_shows_positions_versions_and_what_waits(gateway: MemoryGateway, tmp_path: Path) -> None:
    text = shown("watch", "--once", "--state", tmp_path)
    for part in ("model m1", "index i1+7", "2026-11-21T09:30:00.250Z", "250 ms", "no reader", "no answer"):
        assert part in text


def test_watch_in_json_says_what_is_behind_and_fails_when_a_part_is_away(
    gateway: MemoryGateway, tmp_path: Path
) -> None:
    gateway.degradations = [gateway_pb2.DEGRADATION_NOT_FRESH]
    found = json.loads(refused(3, "watch", "--once", "--json", "--state", tmp_path))
    assert [row["behind"] for row in found["interactions"]] == [2, None]
    assert [row["end_offset"] for row in found["interactions"]] == [12, None]
    assert (found["candidates"]["lag_seconds"], found["reranker"], found["degradations"]) == (0.25, None, ["not_fresh"])


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

"""docs/guide/examples/debezium.py maps messages that Debezium 3.6.1 recorded of PostgreSQL 15's tables."""

import json
import sys
from pathlib import Path

import pytest
from documentation import ROOT
from freshet_client import Client, Item
from freshet_client.testing import FakeGateway

sys.path.insert(0, str(ROOT / "docs" / "guide" / "examples"))
import debezium

MESSAGES = [json.loads(line) for line in Path(__file__).with_name("debezium.jsonl").read_text().splitlines()]


def text(value: object) -> bytes | None:
    return None if value is None else json.dumps(value).encode()


def send(client: Client, *messages: dict) -> None:
    for one in messages:
        debezium.apply(client, one["topic"], text(one["key"]), text(one["value"]))


def history(client: Client) -> list[tuple[str, float]]:
    return [(event.item_id, event.value) for event in client.user("1217").events]


@pytest.fixture
def client() -> Client:
    return FakeGateway([Item("260", "Star Wars"), Item("1", "Toy Story")]).client()


def test_rows_that_are_inserted_changed_and_deleted_leave_what_the_tables_hold(client: Client) -> None:
    send(client, *MESSAGES[:2])
    assert history(client) == [("661", 4.0)]
    send(client, *MESSAGES[2:])
    assert history(client) == [("260", 5.0)]
    assert client.user("1217").events[0].event_time.isoformat() == "2026-11-21T18:06:00+00:00"
    assert set(client.recommend("other", k=10).item_ids) == {"260", "1", "661"}


def test_messages_that_come_again_count_once(client: Client) -> None:
    send(client, *MESSAGES[:2], *MESSAGES[:2], *MESSAGES, *MESSAGES[5:])
    assert history(client) == [("260", 5.0)]


def test_messages_with_their_schema_are_the_same(client: Client) -> None:
    wrapped = [
        {name: one[name] if name == "topic" else one[name] and {"schema": {}, "payload": one[name]} for name in one}
        for one in MESSAGES
    ]
    send(client, *wrapped)
    assert history(client) == [("260", 5.0)]


def test_an_update_without_its_old_row_and_a_truncate_are_refused(client: Client) -> None:
    update = next(one for one in MESSAGES if one["topic"] == debezium.RATINGS and one["value"]["op"] == "u")
    with pytest.raises(ValueError, match="before=null allowed: a row; ALTER TABLE ratings REPLICA IDENTITY FULL"):
        send(client, update | {"value": update["value"] | {"before": None}})
    with pytest.raises(ValueError, match="op='t' allowed: c, r, u, d"):
        send(client, update | {"value": {"op": "t"}})

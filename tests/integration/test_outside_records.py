"""Any Kafka producer: what plain kafka-python writes onto `interactions`, good or bad, and what becomes of it."""

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from freshet.v1 import gateway_pb2
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
from outside import JSON, Outside, event, same_state, until

from services.contracts.topics.interactions import INTERACTIONS
from services.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def outside(stack: Stack) -> Iterator[Outside]:
    with Outside(stack) as it:
        yield it


def change(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


@pytest.mark.parametrize("form", ["protobuf", "json"])
def test_records_of_a_plain_producer_change_that_users_recommendations(outside: Outside, form: str) -> None:
    user, items = outside.new_user(), outside.items[40:45]
    popular = outside.recommend(user)
    assert popular.state_source == "none"
    place = (-1, -1)
    for item in items:
        if form == "protobuf":
            place = outside.put(user, event(user, item, type="rating", value=5))
        else:
            place = outside.put(user, {"user_id": user, "item_id": item, "type": "rating", "value": 5})
    assert place[0] == outside.partition_of(user)

    def reflected() -> gateway_pb2.RecommendResponse | None:
        answer = outside.recommend(user)
        return answer if answer.state_position.offset == place[1] and answer.state_source == "stored" else None

    answer = until("the last event's state", reflected)
    assert not answer.degradations
    recommended = [item.item_id for item in answer.items]
    assert len(recommended) == 10
    assert recommended != [item.item_id for item in popular.items]
    assert not set(recommended) & set(items)


def of(user: str, **fields: Any) -> dict[str, Any]:
    return {"user_id": user, "item_id": "1"} | fields


# What is written under a user's key (None: no key), with which headers, and what the reason must say.
BAD_RECORDS = {
    "truncated Protobuf": (lambda u: event(u, "1").SerializeToString()[:-2], (), "a whole Interaction message"),
    "broken JSON": (lambda u: json.dumps(of(u)).encode()[:-1], JSON, "bytes of broken JSON"),
    "null value": (lambda _: None, (), "value='no bytes'"),
    "NaN in Protobuf": (lambda u: event(u, "1", value=math.nan), (), "value=nan allowed: a finite number"),
    "another user's key": (lambda _: of("somebody-else"), JSON, "allowed: the record's user_id"),
    "a megabyte": (lambda _: b"\xff" * 1_048_300, (), "a whole Interaction message"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_is_set_aside_whole_and_the_next_one_is_applied(outside: Outside, name: str) -> None:
    make, headers, reason = BAD_RECORDS[name]
    user = outside.new_user()
    partition = outside.partition_of(user)
    before = outside.counts(partition)
    value = make(user)
    place = outside.put(user, value, headers)
    good = outside.put(user, event(user, outside.items[3]))
    assert good == (partition, place[1] + 1)
    outside.applied(good)
    assert outside.history(user) == [outside.items[3]]
    assert change(before, outside.counts(partition)) == {"applied": 1, "dead_lettered": 1}
    letter = outside.dead_letter(place)
    told = dict(letter.headers)
    assert reason in told["freshet-reason"].decode()
    assert told["freshet-source-topic"] == INTERACTIONS.encode()
    assert letter.key == user.encode()
    assert letter.value == _as_bytes(value)


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        return json.dumps(value).encode()
    return value if isinstance(value, bytes) else b"" if value is None else value.SerializeToString()


def test_undo_takes_the_event_out_as_if_it_had_never_been(outside: Outside) -> None:
    user, twin, items = outside.new_user(), outside.new_user(), outside.items[10:13]
    start = time.time() - 180
    for one in (user, twin):
        outside.live(one, *items, start=start)
    state = outside.stored_components(user)
    mistake = outside.items[30]
    (receipt,) = outside.record(event(user, mistake, event_id="mistake"))
    outside.applied((receipt.token.partition, receipt.token.offset))
    assert outside.stored_components(user) != state
    assert mistake in outside.seen(user)

    before = outside.counts(outside.partition_of(user))
    request = gateway_pb2.UndoInteractionRequest(user_id=user, event_id="mistake")
    token = outside.gateway.UndoInteraction(request, timeout=10).receipt.token
    answer = outside.recommend(user, freshness_token=token)
    assert answer.token_honoured
    assert outside.history(user) == items
    assert same_state(outside.stored_components(user), state)
    answer, of_twin = outside.unmoved(lambda: outside.recommend(user), lambda _: outside.ids(twin))
    assert [item.item_id for item in answer.items] == of_twin
    assert outside.seen(user) == set(items)
    assert change(before, outside.counts(outside.partition_of(user))) == {"applied": 1, "undone": 1}


def test_producers_may_compress(outside: Outside, stack: Stack) -> None:
    """The broker unpacks what it stores, so the reader needs no codec."""
    admin = KafkaAdminClient(bootstrap_servers=stack.kafka_bootstrap)
    try:
        (answer,) = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, INTERACTIONS)])
        settings = {entry[0]: entry[1] for entry in answer.resources[0][4]}
    finally:
        admin.close()
    assert settings["compression.type"] == "uncompressed"

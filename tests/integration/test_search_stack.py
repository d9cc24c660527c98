"""Search on the whole stack, as a stranger meets it: words in, items out, a generator that dies, a click's way."""

import uuid
from collections.abc import Iterator

import grpc
import pytest
from freshet.v1 import events_pb2, gateway_pb2
from kafka import KafkaConsumer, TopicPartition
from outside import Outside, event, until

from services.contracts.topics.attributions import ForgetUpTo, Undo
from services.contracts.topics.search_clicks import SEARCH_CLICKS, ClickRecord, SearchClick, decode_click
from services.stack import Stack

pytestmark = pytest.mark.integration


@pytest.fixture
def outside(stack: Stack) -> Iterator[Outside]:
    with Outside(stack) as client:
        yield client


def search(outside: Outside, query: str, **fields: object) -> gateway_pb2.GatewayServiceSearchResponse:
    request = gateway_pb2.GatewayServiceSearchRequest(query=query, k=10, **fields)
    return outside.gateway.Search(request, timeout=10)


def put(outside: Outside, *titles: str) -> list[str]:
    """New items with these titles, once words find the last of them."""
    items = [events_pb2.Item(item_id=f"found-{uuid.uuid4().hex[:8]}", title=title) for title in titles]
    outside.gateway.PutItems(gateway_pb2.PutItemsRequest(items=items), timeout=10)

    def is_found() -> bool:
        try:
            return any(found.item_id == items[-1].item_id for found in search(outside, titles[-1]).results)
        except grpc.RpcError:
            return False  # a generator that is still starting

    until("a new title is found", is_found, within_s=60)
    return [item.item_id for item in items]


def clicks_since(stack: Stack, first: int) -> list[ClickRecord]:
    consumer = KafkaConsumer(bootstrap_servers=stack.kafka_bootstrap, enable_auto_commit=False)
    place = TopicPartition(SEARCH_CLICKS, 0)
    try:
        consumer.assign([place])
        consumer.seek(place, first)
        end = consumer.end_offsets([place])[place]
        found = []
        while consumer.position(place) < end:
            for records in consumer.poll(timeout_ms=500).values():
                found += [decode_click(record.value) for record in records]
        return found
    finally:
        consumer.close()


def clicks_end(stack: Stack) -> int:
    consumer = KafkaConsumer(bootstrap_servers=stack.kafka_bootstrap)
    place = TopicPartition(SEARCH_CLICKS, 0)
    try:
        return int(consumer.end_offsets([place])[place])
    finally:
        consumer.close()


def test_words_find_titles_for_everybody_and_for_a_user(outside: Outside) -> None:
    word = f"zeppelin{uuid.uuid4().hex[:6]}"
    new, _ = put(outside, f"The {word} of Oz", f"{word} returns")
    answer = search(outside, f"a {word} film")
    assert {found.item_id for found in answer.results} >= {new}
    best = next(found for found in answer.results if found.item_id == new)
    assert best.title == f"The {word} of Oz"
    assert [found.source for found in best.found_by] == ["lexical"]
    # No text bundle: the other sources are not there, which is no degradation.
    assert list(answer.degradations) == []
    failures = {spent.source: spent.failure for spent in answer.sources}
    assert failures["lexical"] == ""
    assert "not loaded" in failures["text_mol"]
    assert "not loaded" in failures["phrases"]
    assert list(search(outside, "qqqqqqqq").results) == []

    user = outside.new_user()
    outside.live(user, *outside.items[:3])

    def complete() -> gateway_pb2.GatewayServiceSearchResponse | None:
        """The user's first search after a start may be late."""
        found = search(outside, f"a {word} film", user_id=user)
        return found if not found.degradations else None

    mine = until("a search without degradation", complete)
    assert mine.model_version == outside.bundle.model_version
    assert "mol" in {spent.source for spent in mine.sources}
    stranger = search(outside, f"a {word} film", user_id=outside.new_user())
    assert list(stranger.degradations) == [gateway_pb2.DEGRADATION_NOT_PERSONALISED]
    assert [found.item_id for found in stranger.results] == [found.item_id for found in answer.results]


def test_a_killed_generator_makes_search_unavailable_and_leaves_recommend_alone(stack: Stack, outside: Outside) -> None:
    user = outside.new_user()
    # Enough for what is popular, which changes, to say nothing of them.
    outside.live(user, *outside.items[:12])
    put(outside, "The one before")
    stack.kill("generator")
    try:
        with pytest.raises(grpc.RpcError) as caught:
            search(outside, "anything")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "generator" in caught.value.details()
        answer, with_words = outside.unmoved(
            lambda: outside.recommend(user), lambda _: outside.recommend(user, query="anything")
        )
        assert list(answer.degradations) == []
        assert list(with_words.degradations) == [gateway_pb2.DEGRADATION_PARTIAL_SOURCES]
        assert [item.item_id for item in with_words.items] == [item.item_id for item in answer.items]
    finally:
        stack.up(["generator"])
    put(outside, "The one after")


def test_a_click_is_published_once_taken_back_and_forgotten(stack: Stack, outside: Outside) -> None:
    first = clicks_end(stack)
    user, item = outside.new_user(), outside.items[0]
    click = event(user, item, type="search_click", query="space movies", event_id=f"{user}-1", value=1.0)
    receipt = outside.record(click)[0]
    outside.record(click)  # a client's retry
    outside.record(event(user, outside.items[1], type="rating", value=5.0))
    undo = outside.gateway.UndoInteraction(
        gateway_pb2.UndoInteractionRequest(user_id=user, event_id=f"{user}-1"), timeout=10
    ).receipt
    again = outside.record(
        event(user, item, type="search_click", query="space films", event_id=f"{user}-2", value=1.0)
    )[0]
    # A forget that is applied before a click voids it: nothing is published.
    outside.applied((again.token.partition, again.token.offset))
    forgotten = outside.gateway.ForgetUser(gateway_pb2.ForgetUserRequest(user_id=user), timeout=60)
    assert forgotten.is_applied
    mine = {receipt.token.partition}

    def published() -> list[ClickRecord] | None:
        found = clicks_since(stack, first)
        return found if any(isinstance(record, ForgetUpTo) for record in found) else None

    records = until("the forgotten user is on search-clicks", published)
    clicks = [record for record in records if isinstance(record, SearchClick)]
    assert [(record.query, record.item_id, record.offset) for record in clicks] == [
        ("space movies", item, receipt.token.offset),
        ("space films", item, again.token.offset),
    ]
    assert {record.partition for record in clicks} == mine
    (taken_back,) = [record for record in records if isinstance(record, Undo)]
    assert taken_back.undoes == (receipt.token.partition, receipt.token.offset)
    assert taken_back.offset == undo.token.offset
    (void,) = [record for record in records if isinstance(record, ForgetUpTo)]
    assert void.forget_id == forgotten.forget_id
    assert {record.user_pseudonym for record in records} == {void.user_pseudonym}
    assert user not in void.user_pseudonym
    assert all(void.up_to[record.partition] >= record.offset for record in clicks)
    assert outside.history(user) == []

"""The catalogue's topics on a real broker: caught up before it is ready, then live, letters written once."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from services.catalogue.follower import CatalogueFollower, catalogue_reader
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.index_deltas import INDEX_DELTAS, Batch, IndexDelta, ItemDelta, encode
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.platform.stream.kafka import BulkProducer, Record, build_consumer
from services.stack import Stack

DEADLINE_S = 20


class Served:
    """A listener that keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[str]]] = []
        self.items: list[str] = []
        self.resets = 0
        self.skipped: dict[str, int] = {}

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        changed = [delta.change.item_id for delta in batch.deltas]
        self.batches.append((batch.offset, changed))
        return True

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        self.items += [item.item_id for item in items]

    def reset(self) -> None:
        self.resets += 1

    def counted(self, kind: str, records: int) -> None:
        self.skipped[kind] = self.skipped.get(kind, 0) + records


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.005)


def deltas(model: str, batch: int, item_ids: Sequence[str]) -> list[Record]:
    states = [
        IndexDelta(
            model_version=model, partition=0, offset=batch, batch=batch, last_of_batch=place == len(item_ids) - 1,
            change=ItemDelta(item_id=item_id, components=np.full((1, 2), 0.5, dtype=np.float32)),
        )
        for place, item_id in enumerate(item_ids)
    ]  # fmt: skip
    return [Record(INDEX_DELTAS, delta.key, encode(delta)) for delta in states]


def items(item_ids: Sequence[str]) -> list[Record]:
    return [Record(ITEMS, item_id.encode(), encode_item(CatalogueItem(item_id=item_id))) for item_id in item_ids]


@pytest.fixture
def producer(kafka: str) -> Iterator[BulkProducer]:
    producer = BulkProducer(kafka, client_id="test")
    yield producer
    producer.close(1.0)


def follow(
    kafka: str, served: Served, model: str, *, process: str = "test"
) -> tuple[CatalogueFollower, threading.Event]:
    ready = threading.Event()
    topics = catalogue_reader(kafka, process, writes_dead_letters=True)
    follower = CatalogueFollower(topics, served, model_version=model, on_ready=ready.set)
    follower.start()
    return follower, ready


def test_it_catches_up_before_it_is_ready_and_then_serves_within_moments(kafka: str, producer: BulkProducer) -> None:
    model = "catching-up"
    for batch in range(50):
        producer.send_many(deltas(model, batch, [f"{batch}-{place}" for place in range(10)]))
    producer.send_many(items([f"described-{number}" for number in range(100)]))
    served = Served()
    follower, ready = follow(kafka, served, model)
    try:
        assert ready.wait(DEADLINE_S)
        assert sum(len(changed) for _, changed in served.batches) == 500
        assert {f"described-{number}" for number in range(100)} <= set(served.items)
        before = len(served.batches)
        for batch in range(50, 60):
            (*_, (_, offset)) = producer.send_many(deltas(model, batch, ["live", "too"]))
            wait_until(lambda offset=offset: served.batches[-1][0] == offset)  # type: ignore[misc]
        assert [changed for _, changed in served.batches[before:]] == [["live", "too"]] * 10
        producer.send_many(items(["late"]))
        wait_until(lambda: "late" in served.items)
    finally:
        follower.stop()


def test_two_readers_pass_through_the_same_positions(kafka: str, producer: BulkProducer) -> None:
    model = "positions"
    first, second = Served(), Served()
    one, ready_one = follow(kafka, first, model)
    other, ready_other = follow(kafka, second, model)
    try:
        assert ready_one.wait(DEADLINE_S)
        assert ready_other.wait(DEADLINE_S)
        for batch in range(20):
            (*_, (_, last)) = producer.send_many(deltas(model, batch, ["a", "b"]))
        wait_until(lambda: all(served.batches and served.batches[-1][0] == last for served in (first, second)))
        assert [offset for offset, _ in first.batches] == [offset for offset, _ in second.batches]
    finally:
        one.stop()
        other.stop()


def letters(kafka: str, reason: bytes) -> int:
    consumer = build_consumer(kafka, ITEMS + SUFFIX, group_id="test-letters")
    try:
        (place,) = consumer.assignment()
        consumer.seek_to_beginning()
        end = consumer.end_offsets([place])[place]
        found = 0
        while consumer.position(place) < end:
            for records in consumer.poll(timeout_ms=200).values():
                found += sum(dict(record.headers)["freshet-reason"].startswith(reason) for record in records)
        return found
    finally:
        consumer.close(autocommit=False)


def test_a_malformed_item_becomes_a_letter_once_and_a_restart_writes_no_second(
    kafka: str, producer: BulkProducer, stack: Stack
) -> None:
    # It writes letters, too, where an earlier test started it; the next test that needs it starts it again.
    stack.stop("candidates")
    producer.send_many([Record(ITEMS, b"broken-once", b"\xff\xff\xff\xff\xff")])
    reason = b"value='5 unreadable bytes'"
    for _ in range(2):
        served = Served()
        follower, ready = follow(kafka, served, "letters", process="letters")
        assert ready.wait(DEADLINE_S)
        follower.stop()
        assert served.skipped["unreadable_item"] >= 1
    assert letters(kafka, reason) == 1


def test_without_a_broker_it_is_not_ready() -> None:
    served = Served()
    follower, ready = follow("127.0.0.1:9", served, "nowhere")
    wait_until(lambda: follower.turns.failures > 1)
    assert not ready.is_set()
    assert not served.batches
    assert follower.is_behind
    follower.stop()

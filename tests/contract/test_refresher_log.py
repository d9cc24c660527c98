"""One suite for the refresher's log: `MemoryLog` always, `KafkaLog` on a broker with the integration tests.

Every record is written as bytes, and both logs decode it alike. The broker's topics hold other tests' records, too:
offsets are compared with where a test began.
"""

import secrets
from collections.abc import Iterator
from typing import Protocol

import pytest
from fakes.refresher import MemoryLog
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from suites import either, eventually

from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import ATTRIBUTIONS, Attributed, Attribution, ForgetUpTo, encode_attribution
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.contracts.wire import PackedQueryState
from services.platform.errors import PreconditionFailed
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.records import DeadLetter, SourceRecord
from services.platform.stream.topic import NUM_PARTITIONS
from services.refresher.adapters.topics import KafkaLog, QueryShape, decode_attribution
from services.refresher.domain.records import Forgetting, Interaction
from services.refresher.ports import Log, Polled

SHAPE = QueryShape(model_version="m", num_components=1, component_width=2, num_pairs=0)
STATE = PackedQueryState(
    model_version="m", components=b"\x00\x3c\x00\x00", gate=b"", num_components=1, component_width=2
)
FORGET = ForgetUpTo(forget_id="f", up_to={0: 4}, user_pseudonym="p", recorded_ms=2)


def attribution(source: int = 0, item_id: str = "item-1") -> Attribution:
    """Made by the interaction at offset `source`."""
    return Attribution(
        event_id=f"e{source}", item_id=item_id, state=STATE, type="click", value=1.0, event_time_ms=1, recorded_ms=2,
        partition=0, offset=source, user_pseudonym="p",
    )  # fmt: skip


class Scene(Protocol):
    """A log, and what writes to its topics."""

    log: Log

    def append(self, partition: int, value: bytes) -> int:
        """Write to `attributions`; the offset."""

    def put(self, item_id: str, *, withdrawn: bool = False, title: str = "") -> None:
        """Write to `items`."""

    def expire(self, partition: int, below: int) -> None:
        """Retention takes the records below this offset away."""


class InMemory:
    def __init__(self) -> None:
        self.log = self._log = MemoryLog(NUM_PARTITIONS)
        self.put, self.expire = self._log.put, self._log.expire

    def append(self, partition: int, value: bytes) -> int:
        record = SourceRecord(ATTRIBUTIONS, partition, 0, 0, b"key", value)
        return self._log.append(partition, decode_attribution(record, SHAPE))


class OnKafka:
    def __init__(self, bootstrap: str) -> None:
        self._bootstrap, self._producer = bootstrap, BulkProducer(bootstrap)
        reader = TopicReader(bootstrap, ATTRIBUTIONS, ITEMS, group_id="test")
        self.log = KafkaLog(reader, TopicReader(bootstrap, ATTRIBUTIONS, group_id="test"), SHAPE)

    def append(self, partition: int, value: bytes) -> int:
        ((_, offset),) = self._producer.send_many([Record(ATTRIBUTIONS, b"key", value, partition=partition)])
        return offset

    def put(self, item_id: str, *, withdrawn: bool = False, title: str = "") -> None:
        value = encode_item(CatalogueItem(item_id=item_id, withdrawn=withdrawn, title=title))
        self._producer.send_many([Record(ITEMS, item_id.encode(), value)])

    def expire(self, partition: int, below: int) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self._bootstrap)
        admin.delete_records({TopicPartition(ATTRIBUTIONS, partition): below})
        admin.close()

    def close(self) -> None:
        self.log.close()
        self._producer.close()


@pytest.fixture(params=either("kafka"))
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    if request.param == "memory":
        yield InMemory()
        return
    made = OnKafka(request.getfixturevalue("kafka"))
    yield made
    made.close()


def append(scene: Scene, partition: int, *records: Attributed | bytes) -> list[int]:
    """The offsets of the records."""
    return [
        scene.append(partition, record if isinstance(record, bytes) else encode_attribution(record))
        for record in records
    ]


def polled(log: Log, entries: int, listings: int = 0) -> Polled:
    """The next polls together, until they have brought so many."""
    found = Polled()

    def ask() -> bool:
        more = log.poll(50)
        found.listings += more.listings
        for partition, batch in more.entries.items():
            found.entries.setdefault(partition, []).extend(batch)
        return sum(map(len, found.entries.values())) >= entries and len(found.listings) >= listings

    eventually(ask)
    return found


def offsets(polled: Polled) -> dict[int, list[int]]:
    return {partition: [entry.offset for entry in entries] for partition, entries in polled.entries.items()}


def test_entries_come_decoded_and_in_order_from_where_a_partition_was_assigned(scene: Scene) -> None:
    _, second, forget, broken = append(scene, 1, attribution(7), attribution(8), FORGET, b"\xff")
    (other,) = append(scene, 2, attribution(9))
    append(scene, 3, attribution(10))
    assert list(scene.log.partitions()) == list(range(NUM_PARTITIONS))
    scene.log.assign({1: second, 2: other})
    found = polled(scene.log, 4)
    assert offsets(found) == {1: [second, forget, broken], 2: [other]}
    first, forgetting, letter = found.entries[1]
    assert first == Interaction(
        offset=second, source_position=8, item_id="item-1", user="p", query=STATE, type="click", value=1.0,
        moment_ms=1, recorded_ms=2,
    )  # fmt: skip
    assert forgetting == Forgetting(forget, "p", {0: 4})
    assert isinstance(letter, DeadLetter)
    assert (letter.record.value, letter.reason.split("=")[0]) == (b"\xff", "value")


def test_assigning_again_polls_the_new_partitions_alone(scene: Scene) -> None:
    (one,), (other,) = append(scene, 1, attribution()), append(scene, 2, attribution())
    scene.log.assign({1: one})
    polled(scene.log, 1)
    (later,) = append(scene, 1, attribution())
    scene.log.assign({2: other})
    assert offsets(polled(scene.log, 1)) == {2: [other]}
    # Given up and taken again, from elsewhere.
    scene.log.assign({1: one, 2: other + 1})
    assert offsets(polled(scene.log, 2)) == {1: [one, later]}


def test_who_holds_no_partition_still_hears_of_items(scene: Scene) -> None:
    item_id = secrets.token_hex(4)
    scene.log.listings()
    scene.log.assign({})
    append(scene, 1, attribution())
    scene.put(item_id)
    found = polled(scene.log, 0, 1)
    assert ([listing.item_id for listing in found.listings], found.entries) == ([item_id], {})


def test_listings_say_the_newest_of_each_item_and_polls_go_on_behind_them(scene: Scene) -> None:
    old, back, new = (f"{name}-{secrets.token_hex(4)}" for name in ("old", "back", "new"))
    scene.put(old, title="first")
    scene.put(back, withdrawn=True)
    scene.put(old, title="second")
    scene.put(back)
    said = [listing for listing in scene.log.listings() if listing.item_id in (old, back)]
    assert sorted((one.item_id, one.withdrawn, one.title) for one in said) == [
        (back, False, ""),
        (old, False, "second"),
    ]
    scene.log.assign({})
    scene.put(new, withdrawn=True)
    (listing,) = polled(scene.log, 0, 1).listings
    assert (listing.item_id, listing.withdrawn) == (new, True)
    assert {new, old, back} <= {listing.item_id for listing in scene.log.listings()}


def test_ends_are_told_when_asked_for_and_known_as_far_as_polling_went(scene: Scene) -> None:
    (first,) = append(scene, 4, attribution())
    assert scene.log.bounds([4])[4][1] == first + 1
    scene.log.assign({4: first})
    polled(scene.log, 1)
    append(scene, 4, attribution())
    assert scene.log.known_ends() == {4: first + 1}
    assert scene.log.bounds([4])[4][1] == first + 2


def test_interactions_are_read_again_without_disturbing_polls(scene: Scene) -> None:
    written = append(scene, 5, *(attribution(number) for number in range(260)))
    scene.log.assign({5: written[10]})
    wanted = [written[259], written[0], written[3], written[100]]
    found = scene.log.read_again(5, wanted)
    assert {offset: one.source_position for offset, one in found.items()} == dict(
        zip(wanted, (259, 0, 3, 100), strict=True)
    )
    assert offsets(polled(scene.log, 250))[5] == written[10:]
    assert scene.log.read_again(5, []) == {}


@pytest.mark.parametrize("case", ["taken by retention", "all taken by retention", "beyond the end", "no interaction"])
def test_an_interaction_that_is_not_there_any_more_is_a_precondition(scene: Scene, case: str) -> None:
    first, second, third = append(scene, 6, attribution(0), attribution(1), FORGET)
    if case.endswith("retention"):
        scene.expire(6, third + 1 if case.startswith("all") else second)
        assert scene.log.bounds([6])[6] == (third + 1 if case.startswith("all") else second, third + 1)
    missing = {"beyond the end": third + 5, "no interaction": third}.get(case, first)
    with pytest.raises(PreconditionFailed):
        scene.log.read_again(6, [missing])


def test_what_retention_took_is_skipped(scene: Scene) -> None:
    first, second = append(scene, 7, attribution(0), attribution(1))
    scene.expire(7, second)
    scene.log.assign({7: first})
    assert offsets(polled(scene.log, 1)) == {7: [second]}


def test_a_closed_log_goes_on_where_it_was(scene: Scene) -> None:
    first, second = append(scene, 0, attribution(0), attribution(1))
    scene.log.listings()
    scene.log.assign({0: first})
    polled(scene.log, 2)
    scene.log.close()
    (third,) = append(scene, 0, attribution(2))
    assert offsets(polled(scene.log, 1)) == {0: [third]}
    assert scene.log.read_again(0, [second])[second].source_position == 1

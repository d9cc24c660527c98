"""`freshet dead-letters` on a real Kafka: what is listed and shown, and what a replay writes."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
from freshet.v1 import events_pb2
from typer.testing import Result

from services.contracts.dead_letters import Replayed
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.dead_letters import SUFFIX, dead_letter
from services.contracts.topics.exposures import EXPOSURES, Exposure
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.gateway.adapters.kafka_reads import KafkaDeadLetters, KafkaShownAnswers
from services.gateway.adapters.topics import KafkaExposureLog
from services.platform.errors import NotFound, PreconditionFailed
from services.platform.stream.kafka import BulkProducer, Record, partition_for
from services.platform.stream.reading import Backwards
from services.platform.stream.records import DeadLetter, Position, SourceRecord
from services.platform.stream.topic import NUM_PARTITIONS
from services.stack import Stack
from tests.unit.cli.shell import facts, run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

JSON = [("content-type", b"application/json"), ("trace", b"1")]


class Letters:
    """Writes records and their dead letters, and runs the command."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.kafka = stack, stack.kafka_bootstrap
        self.producer = BulkProducer(self.kafka)

    def put(
        self, topic: str, key: bytes, value: bytes, headers: Any = (), *, reason: str = "", keeps: bool = True
    ) -> str:
        """Write a record; with a reason, its dead letter, too (without bytes unless it `keeps` them). Its name."""
        ((partition, offset),) = self.producer.send_many([Record(topic, key, value, headers)])
        if reason:
            record = SourceRecord(
                topic, partition, offset, 1_700_000_000_000, key if keeps else None, value if keeps else None, headers
            )
            self.producer.send_many([dead_letter(DeadLetter(record, reason))])
        return f"{topic}:{partition}:{offset}"

    def run(self, *arguments: str) -> Result:
        return run("dead-letters", *arguments, "--kafka", self.kafka)

    def json(self, *arguments: str) -> Any:
        return facts("dead-letters", *arguments, "--kafka", self.kafka)

    def read(self, topic: str, partition: int, offset: int) -> SourceRecord:
        reader = TopicReader(self.kafka, topic, group_id="test")
        found = reader.records_at({partition: offset})[partition]
        reader.close()
        return found


@pytest.fixture
def letters(kafka: str, _session_stack: Stack) -> Iterator[Letters]:
    made = Letters(_session_stack)
    yield made
    made.producer.close()


def new_user() -> str:
    return f"letters-{secrets.token_hex(5)}"


def test_it_lists_and_shows_what_was_set_aside(letters: Letters) -> None:
    user, reason = new_user(), f"internal error: KeyError {secrets.token_hex(4)}"
    value = json.dumps({"user_id": user, "item_id": "7"}).encode()
    name = letters.put(INTERACTIONS, user.encode(), value, JSON, reason=reason)
    listed = letters.json("list", "--topic", INTERACTIONS, "--limit", "1000")["dead_letters"]
    (mine,) = [letter for letter in listed if letter["reason"] == reason]
    assert (mine["record"], mine["time"], mine["replayed_to"]) == (name, "2023-11-14T22:13:20+00:00", None)
    shown = letters.json("show", name)
    assert shown["value"] == {"user_id": user, "item_id": "7"}
    assert (shown["key"], shown["headers"]) == (user, {"content-type": "application/json", "trace": "1"})
    assert reason in letters.run("list", "--limit", "1000").stdout
    assert letters.run("list", "--topic", "exposures").exit_code == 2
    assert letters.run("show", "interactions:0:999999999").exit_code == 1


def test_a_replayed_interaction_without_an_id_gets_that_of_its_place_and_is_replayed_once(letters: Letters) -> None:
    user = new_user()
    value = json.dumps({"user_id": user, "item_id": "7", "value": 2}).encode()
    name = letters.put(INTERACTIONS, user.encode(), value, JSON, reason="internal error: KeyError")
    _, partition, offset = name.split(":")
    planned = letters.json("replay", name, "--dry-run")
    assert (planned["written"], planned["records"][0]["event_id"]) == (0, f"{partition}-{offset}")
    assert letters.run("replay", name, "--json").exit_code == 2  # nobody to be asked
    done = letters.json("replay", name, "--yes")
    (row,) = done["records"]
    assert (done["written"], row["written_to"][0]) == (1, partition_for(user.encode(), NUM_PARTITIONS))
    again = letters.read(INTERACTIONS, *row["written_to"])
    message = events_pb2.Interaction.FromString(again.value or b"")
    assert (message.event_id, message.user_id, message.item_id) == (f"{partition}-{offset}", user, "7")
    assert (message.event_time.ToMilliseconds(), list(again.headers)) == (1_700_000_000_000, [("trace", b"1")])
    (left,) = letters.json("replay", name, "--yes")["records"]
    assert left["left_out"] == "it was replayed before"
    assert left["replayed_to"] == row["written_to"]


def test_a_replay_is_the_original_where_it_has_an_id_or_cannot_be_read(letters: Letters) -> None:
    user = new_user()
    value = encode_interaction(Interaction(user_id=user, item_id="7", event_id="e1", event_time_ms=1_000))
    headers = [("trace", b"\xff")]
    names = [
        letters.put(INTERACTIONS, user.encode(), value, headers, reason="internal error: KeyError"),
        letters.put(INTERACTIONS, user.encode(), b"\xff\x00", headers, reason="value='2 unreadable bytes'"),
        # The refresher keeps no bytes: they are read from the topic.
        letters.put("attributions", b"item", b"\x00bytes", headers, reason="internal error: KeyError", keeps=False),
    ]
    rows = letters.json("replay", *names, "--yes")["records"]
    assert [row["event_id"] for row in rows] == ["e1", None, None]
    for row, wanted in zip(rows, (value, b"\xff\x00", b"\x00bytes"), strict=True):
        again = letters.read(row["topic"], *row["written_to"])
        assert (again.value, list(again.headers)) == (wanted, headers)
        assert again.partition == row["partition"]


def test_what_would_undo_something_later_is_left_out(letters: Letters) -> None:
    user, item = new_user(), f"item-{secrets.token_hex(4)}"
    value = encode_interaction(Interaction(user_id=user, item_id="7", event_id="e1", event_time_ms=1_000))
    forgotten = letters.put(INTERACTIONS, user.encode(), value, reason="internal error: KeyError")
    _, partition, offset = forgotten.split(":")
    forget = Forget(
        forget_id="f", user_id=user, up_to={int(partition): int(offset)}, requested_ms=int(1000 * time.time())
    )
    letters.put(FORGETS, user.encode(), encode_forget(forget))
    described = [CatalogueItem(item_id=item, title=title) for title in ("old", "new")]
    old = letters.put(ITEMS, item.encode(), encode_item(described[0]), reason="internal error: KeyError")
    letters.put(ITEMS, item.encode(), encode_item(described[1]))
    result = letters.json("replay", forgotten, old, "--yes")
    assert result["written"] == 0
    assert [row["left_out"] for row in result["records"]] == [
        "its user was forgotten since",
        "a newer record of its key has taken its place",
    ]


def test_what_a_forgotten_user_left_is_taken_out_and_nothing_else(letters: Letters) -> None:
    # It writes letters of these records, too, where an earlier test started it; the next one that needs it starts it.
    letters.stack.stop("encoder")
    user, other = new_user(), new_user()
    gone = letters.put(INTERACTIONS, user.encode(), b"\xff\x00", reason="unreadable")
    stays = letters.put(INTERACTIONS, other.encode(), b"\xff\x01", [("trace", b"1")], reason="unreadable")
    replayed = letters.json("replay", stays, "--yes")["records"][0]["written_to"]
    _, partition, offset = gone.split(":")
    forget = Forget(forget_id="f", user_id=user, up_to={int(partition): int(offset)}, requested_ms=1_000)
    letters.put(FORGETS, user.encode(), encode_forget(forget))
    later = letters.put(INTERACTIONS, user.encode(), b"\xff\x02", reason="unreadable")
    before = {one: letters.json("show", one) for one in (stays, later)}
    assert letters.json("forget")["removed"] >= 1
    assert letters.run("show", gone).exit_code == 1
    assert {one: letters.json("show", one) for one in (stays, later)} == before
    assert before[stays]["replayed_to"] == replayed
    assert letters.json("forget")["removed"] == 0
    reader = TopicReader(letters.kafka, INTERACTIONS + SUFFIX, group_id="test")
    reader.seek({0: reader.bounds([0])[0][0]})
    assert user.encode() not in {record.key for record in reader.read_to_end() if record.value == b"\xff\x00"}
    reader.close()


async def test_the_gateway_lists_the_newest_and_replays_one_once(letters: Letters) -> None:
    user, reason = new_user(), f"internal error: KeyError {secrets.token_hex(4)}"
    value = json.dumps({"user_id": user, "item_id": "7"}).encode()
    name = letters.put(INTERACTIONS, user.encode(), value, JSON, reason=reason)
    place = Position(*map(int, name.split(":")[1:]))
    log = KafkaDeadLetters(letters.kafka)
    found, _ = await log.newest([INTERACTIONS, ITEMS], 60.0)
    (mine,) = [letter for letter in found if letter.reason == reason]
    assert (mine.name, mine.replayed_to) == (name, None)
    assert await log.replay(INTERACTIONS, place, preview=True, timeout_s=60.0) == Replayed(
        "", None, f"{place.partition}-{place.offset}"
    )
    done = await log.replay(INTERACTIONS, place, preview=False, timeout_s=60.0)
    assert done.written_to is not None
    assert letters.read(INTERACTIONS, *done.written_to).key == user.encode()
    again = await log.replay(INTERACTIONS, place, preview=False, timeout_s=60.0)
    assert again == Replayed("it was replayed before", None, "")
    with pytest.raises(NotFound, match="freshet dead-letters replay interactions:0:999999999"):
        await log.replay(INTERACTIONS, Position(0, 999_999_999), preview=False, timeout_s=60.0)
    log.close()


def test_a_partition_is_read_backwards_within_limits(letters: Letters) -> None:
    key = next(key for key in (f"{n}".encode() for n in range(99)) if partition_for(key, NUM_PARTITIONS) == 2)
    places = letters.producer.send_many([Record(EXPOSURES, key, b"%1000d" % n) for n in range(1_200)])
    ours = [place.offset for place in places]
    reader = TopicReader(letters.kafka, EXPOSURES, group_id="test")
    few = Backwards(reader, 2, max_bytes=600_000, max_s=60.0)
    blocks = [[record.offset for record in block] for block in few]
    assert [offset for block in reversed(blocks) for offset in block] == ours[-1_000:]
    assert not few.is_complete
    everything = Backwards(reader, 2, max_bytes=1 << 30, max_s=60.0)
    found = [record for block in reversed(list(everything)) for record in block]
    assert [record.offset for record in found][-1_200:] == ours
    assert everything.is_complete
    assert list(Backwards(reader, 2, max_bytes=1 << 30, max_s=0.0)) == []
    reader.close()


async def test_answers_that_a_user_got_are_read_back_from_the_topic(letters: Letters) -> None:
    user, key = new_user(), b"pseudonyms"
    written, shown_ms = KafkaExposureLog(letters.kafka, key, gather_s=0.01), round(time.time() * 1000)
    written.start()
    for number in range(5):
        for name in (user, new_user()):
            exposure = Exposure(
                exposure_id=f"{name}-{number}",
                shown_ms=shown_ms + number,
                surface="recommend",
                model_version="m1",
                item_ids=["a", "b"][: number % 2 + 1],
                scores=[0.5, 0.25][: number % 2 + 1],
                sources=["mol"] * (number % 2 + 1),
            )
            written.append(name, exposure)
    await written.close(60.0)
    log = KafkaShownAnswers(letters.kafka, key)
    found = await log.newest(user, 3)
    assert [one.exposure.exposure_id for one in found.answers] == [f"{user}-{number}" for number in (4, 3, 2)]
    assert found.oldest_ms is not None
    assert not found.is_complete
    everything = await log.newest(user, 100)
    assert (len(everything.answers), everything.is_complete) == (5, True)
    second = await log.at(user, f"{user}-1", shown_ms + 1)
    assert (second.exposure.item_ids, second.exposure.scores) == (["a", "b"], [0.5, 0.25])
    assert letters.read(EXPOSURES, *second.position).key == pseudonym_of(user, key).encode()
    with pytest.raises(NotFound, match="no record of this answer"):
        await log.at(user, f"{user}-9", shown_ms + 60_000)
    with pytest.raises(PreconditionFailed, match="records no exposures"):
        await KafkaShownAnswers(letters.kafka, None).newest(user, 1)
    log.close()

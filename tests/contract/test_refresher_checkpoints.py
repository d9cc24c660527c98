"""One suite for the checkpoints port: in memory, and in the topic on a broker."""

import secrets
from collections.abc import Callable, Iterator

import pytest
from fakes.refresher import MemoryCheckpoints
from suites import either

from services.contracts.topic_reader import TopicReader
from services.contracts.topics.refresher_checkpoints import (
    HEADS,
    PART_BYTES,
    REFRESHER_CHECKPOINTS,
    decode_head,
    encode_head,
)
from services.platform.errors import Conflict
from services.platform.stream.kafka import BulkProducer, Record
from services.refresher.adapters.checkpoint_topic import CheckpointTopic
from services.refresher.checkpoint import CheckpointError
from services.refresher.ports import Checkpoints

# A refresher's own; called again: another refresher's, on the same place.
Open = Callable[[], Checkpoints]

VALUES = {"format": 4, "n": 1}


class OnKafka:
    """Checkpoints of a model of a test's own."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap, self.model, self.opened = bootstrap, f"model-{secrets.token_hex(4)}", list[CheckpointTopic]()

    def __call__(self) -> CheckpointTopic:
        reader = TopicReader(self.bootstrap, REFRESHER_CHECKPOINTS, group_id="test", max_partition_bytes=16 << 20)
        self.opened.append(CheckpointTopic(reader, BulkProducer(self.bootstrap), self.model))
        return self.opened[-1]

    def records(self, heads: bool) -> dict[str, tuple[int, int, bytes]]:
        """Key -> partition, offset and value of what is left of the heads, or of the pieces, after compaction."""
        reader = TopicReader(self.bootstrap, REFRESHER_CHECKPOINTS, group_id="test", max_partition_bytes=16 << 20)
        reader.seek(dict.fromkeys(reader.partitions(), 0))
        newest = {
            record.key.decode(): (record.partition, record.offset, record.value)
            for record in reader.read_to_end()
            if record.key and record.key.startswith(self.model.encode()) and (record.partition == HEADS) == heads
        }
        reader.close()
        return {key: found for key, found in newest.items() if found[2] and not key.endswith("claim")}

    def write(self, key: str, partition: int, value: bytes | None) -> None:
        producer = BulkProducer(self.bootstrap)
        producer.send_many([Record(REFRESHER_CHECKPOINTS, key.encode(), value, partition=partition)])
        producer.close()

    def close(self) -> None:
        for one in self.opened:
            one.close()


@pytest.fixture(params=either("kafka"))
def open_checkpoints(request: pytest.FixtureRequest) -> Iterator[Open]:
    if request.param == "memory":
        yield MemoryCheckpoints().opened
        return
    made = OnKafka(request.getfixturevalue("kafka"))
    yield made
    made.close()


@pytest.fixture
def topic(kafka: str) -> Iterator[OnKafka]:
    made = OnKafka(kafka)
    yield made
    made.close()


def contents(checkpoints: Checkpoints, partition: int) -> list[dict[str, bytes]]:
    return [dict(kept.read()[1]) for kept in checkpoints.load(partition)]


def test_where_nothing_was_saved_there_is_nothing(open_checkpoints: Open) -> None:
    assert list(open_checkpoints().load(0)) == []


def test_another_refresher_finds_the_newest_and_the_one_before_in_this_order(open_checkpoints: Open) -> None:
    first, rest = open_checkpoints(), secrets.token_bytes(2 * PART_BYTES + 7)
    first.save(3, VALUES, {"a": b"1", "b": b"1", "rest": rest})
    first.save(3, VALUES, {"a": None, "b": b"2", "rest": None})
    first.save(3, {**VALUES, "n": 7}, {"b": None, "c": b"3", "rest": b""})
    other = open_checkpoints()
    found = list(other.load(3))
    assert [kept.read() for kept in found] == [
        ({**VALUES, "n": 7}, {"b": b"2", "c": b"3", "rest": b""}),
        (VALUES, {"a": b"1", "b": b"2", "rest": rest}),
    ]
    assert len({kept.name for kept in found}) == 2
    assert all(kept.name for kept in found)


def test_another_refresher_goes_on_from_what_it_read(open_checkpoints: Open) -> None:
    first = open_checkpoints()
    for number in range(3):
        first.save(3, VALUES, {"a": b"1", "b": bytes([number])})
    other = open_checkpoints()
    next(iter(other.load(3))).read()
    for number in range(4):
        other.save(3, VALUES, {"a": None, "b": bytes([9 + number])})
    assert contents(open_checkpoints(), 3) == [{"a": b"1", "b": bytes([one])} for one in (12, 11)]


def test_who_was_replaced_saves_nothing_more_until_it_writes_everything_anew(open_checkpoints: Open) -> None:
    first, other = open_checkpoints(), open_checkpoints()
    first.save(3, VALUES, {"a": b"1"})
    next(iter(other.load(3))).read()
    with pytest.raises(Conflict):
        first.save(3, VALUES, {"a": None})
    other.save(3, VALUES, {"a": None, "b": b"2"})
    assert contents(open_checkpoints(), 3) == [{"a": b"1", "b": b"2"}, {"a": b"1"}]
    # Another one looked.
    with pytest.raises(Conflict):
        other.save(3, VALUES, {"a": None, "b": None})
    other.save(3, VALUES, {"a": b"4"})
    assert contents(open_checkpoints(), 3)[0] == {"a": b"4"}


def test_partitions_are_kept_apart(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    checkpoints.save(1, VALUES, {"a": b"one"})
    checkpoints.save(11, VALUES, {"a": b"eleven"})
    assert [contents(checkpoints, partition) for partition in (1, 11)] == [[{"a": b"one"}], [{"a": b"eleven"}]]


@pytest.mark.integration
@pytest.mark.parametrize("damage", ["altered piece", "missing piece", "torn head", "altered head"])
def test_what_is_damaged_is_refused_with_what_and_where_and_the_one_before_is_taken(
    topic: OnKafka, damage: str
) -> None:
    first = topic()
    first.save(3, VALUES, {"a": b"1", "b": b"1"})
    first.save(3, VALUES, {"a": None, "b": b"22"})
    ((key, (partition, _, value)),) = (
        (key, found) for key, found in topic.records(heads=True).items() if key.endswith("head-1")
    )
    head = decode_head(value)
    (piece,) = head.parts["b"]
    if damage == "torn head":
        topic.write(key, partition, value[:-3])
    elif damage == "altered head":
        topic.write(key, partition, value[:40] + bytes([value[40] ^ 1]) + value[41:])
    else:
        # Compaction is not to be waited for: the head names a record that is another one, or none.
        at = piece.offset - 1 if damage == "altered piece" else piece.offset + 1_000
        parts = {**head.parts, "b": (type(piece)(piece.key, at, piece.size, piece.digest),)}
        topic.write(key, partition, encode_head(type(head)(**{**_fields(head), "parts": parts})))
    newest, older = topic().load(3)
    with pytest.raises(CheckpointError, match="head is torn or altered" if "head" in damage else r"part 'b' at offset"):
        newest.read()
    assert older.read()[1] == {"a": b"1", "b": b"1"}


def _fields(head: object) -> dict[str, object]:
    return {name: getattr(head, name) for name in ("owner", "next_piece", "values", "parts")}


@pytest.mark.integration
def test_what_no_head_names_is_removed(topic: OnKafka) -> None:
    for life in range(3):
        checkpoints = topic()
        for kept in checkpoints.load(3):
            kept.read()
            break
        for number in range(4):
            checkpoints.save(3, VALUES, {"kept": b"1" if number == life == 0 else None, "b": bytes([life, number])})
    heads = [decode_head(value) for _, _, value in topic.records(heads=True).values()]
    assert len(heads) == 2
    named = {piece.key for head in heads for pieces in head.parts.values() for piece in pieces}
    left = {key.split("/", 2)[2] for key in topic.records(heads=False)}
    assert left == named
    assert len(named) == 3

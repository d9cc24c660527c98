"""Dead letters: list them, read an original record, and replay it.

A replayed record has no second effect: an interaction without an event id gets the id that the encoder derives from its
position; attributions and search clicks contain their interaction's position. A letter is not replayed if a record of
`forgets` covers its interaction, or a compacted topic has a newer record of its key.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from freshet.v1 import events_pb2
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

from services.contracts.topic_reader import TopicReader
from services.contracts.topics import TOPICS
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.dead_letters import SUFFIX, StoredLetter, replay_notes, stored_letters
from services.contracts.topics.forgets import FORGETS, decode_forget
from services.contracts.topics.interactions import (
    CONTENT_TYPE,
    INTERACTIONS,
    JSON_CONTENT_TYPE,
    decode_interaction,
    encode_interaction,
)
from services.contracts.topics.items import ITEMS
from services.contracts.topics.search_clicks import SEARCH_CLICKS
from services.platform.errors import DependencyUnavailable, InvalidRequest, NotFound
from services.platform.stream.kafka import Brokers, BulkProducer, Headers, Record, kafka_options
from services.platform.stream.reading import Backwards
from services.platform.stream.records import Position, SourceRecord, furthest, is_covered

LETTERED = tuple(topic.name for topic in TOPICS if topic.has_dead_letters)
_COMPACTED = {topic.name for topic in TOPICS if topic.settings.get("cleanup.policy") == "compact"}
_MESSAGES: Mapping[str, Any] = {
    INTERACTIONS: events_pb2.Interaction,
    ATTRIBUTIONS: events_pb2.Attribution,
    ITEMS: events_pb2.Item,
    FORGETS: events_pb2.Forget,
    SEARCH_CLICKS: events_pb2.SearchClick,
}
_GROUP = "freshet-dead-letters"
# Records per batch. Each batch is marked as replayed before the next one is written.
_TOGETHER = 500
_NO_TIME = -1
# Limits of what `newest` reads from one topic.
_MAX_BYTES, _MAX_S = 8 << 20, 2.0


@dataclass(frozen=True, slots=True)
class Replay:
    """A planned replay. record: None if the letter is not replayed, for the reason in `why_not`. event_id: the
    interaction's id, or "".
    """

    letter: StoredLetter
    record: Record | None
    why_not: str = ""
    event_id: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay's result. written_to: the record's new position. left_out: why it was not written."""

    left_out: str
    written_to: Position | None
    event_id: str


class DeadLetters:
    """Reads and replays dead letters; call `close` at the end. Raises: DependencyUnavailable."""

    def __init__(self, bootstrap: Brokers) -> None:
        self._bootstrap = bootstrap
        self._readers: list[TopicReader] = []
        self._producer = BulkProducer(bootstrap, client_id=_GROUP)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._producer.close()

    def letters(self, topics: Collection[str] = LETTERED) -> list[StoredLetter]:
        """Return all dead letters, oldest first."""
        found: list[StoredLetter] = []
        for topic in topics:
            found += stored_letters(self._read_whole(topic + SUFFIX))
        return sorted(found, key=lambda letter: (letter.written_ms, letter.name))

    def newest(self, topics: Collection[str] = LETTERED) -> tuple[list[StoredLetter], bool]:
        """Return the newest dead letters, newest first, and whether there are older ones.

        It reads at most 8 MiB of each topic, for at most two seconds.
        """
        found: list[StoredLetter] = []
        has_older = False
        for topic in topics:
            read = Backwards(self._reader(topic + SUFFIX), 0, max_bytes=_MAX_BYTES, max_s=_MAX_S)
            blocks = list(read)
            found += stored_letters([record for block in reversed(blocks) for record in block])
            has_older |= not read.is_complete
        return sorted(found, key=lambda letter: (letter.written_ms, letter.name), reverse=True), has_older

    def whole(self, letter: StoredLetter) -> StoredLetter | None:
        """Return the letter, completed from the original record; None if that is gone."""
        if letter.is_whole:
            return letter
        at = letter.position
        original = self._reader(letter.topic).records_at({at.partition: at.offset}).get(at.partition)
        if original is None:
            return None
        return replace(
            letter,
            key=original.key or b"",
            value=original.value or b"",
            headers=_headers(original),
            written_ms=original.written_ms,
            is_whole=True,
        )

    def plan(self, letters: Sequence[StoredLetter], *, again: bool = False) -> list[Replay]:
        """Plan a replay of each letter. again: also replay letters that were replayed before."""
        forgotten = self._forgotten() if any(letter.topic == INTERACTIONS for letter in letters) else {}
        newest = {
            topic: self._newest(topic, [letter for letter in letters if letter.topic == topic])
            for topic in {letter.topic for letter in letters} & _COMPACTED
        }
        planned = []
        for letter in letters:
            whole = self.whole(letter)
            if letter.replayed_to is not None and not again:
                planned.append(Replay(letter, None, "it was replayed before"))
            elif whole is None:
                planned.append(Replay(letter, None, "the letter is cut, and its topic has the record no longer"))
            elif newest.get(letter.topic, {}).get(whole.key, -1) > letter.position.offset:
                planned.append(Replay(letter, None, "a newer record of its key has taken its place"))
            elif letter.topic == INTERACTIONS:
                planned.append(_interaction(whole, forgotten))
            else:
                record = Record(letter.topic, whole.key, whole.value, whole.headers, letter.position.partition)
                planned.append(Replay(letter, record))
        return planned

    def replay(self, planned: Sequence[Replay]) -> list[tuple[Replay, Position]]:
        """Write and mark the planned replays; return the new positions."""
        wanted = [(one, one.record) for one in planned if one.record is not None]
        done: list[tuple[Replay, Position]] = []
        for start in range(0, len(wanted), _TOGETHER):
            part = wanted[start : start + _TOGETHER]
            places = self._producer.send_many([record for _, record in part])
            written = list(zip((one for one, _ in part), places, strict=True))
            self._producer.send_many(replay_notes([(one.letter, place) for one, place in written]))
            done += written
        return done

    def replay_one(self, topic: str, place: Position, *, preview: bool) -> Replayed:
        """Replay one of the newest dead letters; with `preview`, write nothing.

        Raises: NotFound if it is not among them.
        """
        letters, _ = self.newest([topic])
        letter = next((one for one in letters if one.position == place), None)
        if letter is None:
            name = f"{topic}:{place.partition}:{place.offset}"
            raise NotFound(f"no dead letter {name} among the newest; older ones: freshet dead-letters replay {name}")
        (planned,) = self.plan([letter])
        written = [] if preview else self.replay([planned])
        return Replayed(planned.why_not, written[0][1] if written else None, planned.event_id)

    def forget(self) -> int:
        """Delete dead letters of forgotten users' interactions; return their number. The method writes the
        other letters again at the topic's end, then deletes all earlier records. An interrupted run may be repeated.
        """
        topic, forgotten = INTERACTIONS + SUFFIX, self._forgotten()
        records = self._read_whole(topic)
        kept = [record for record in records if not _is_void(record, forgotten)]
        if len(kept) < len(records):
            self._producer.send_many([Record(topic, one.key or b"", one.value or b"", _headers(one)) for one in kept])
            before = {TopicPartition(topic, one.partition): one.offset + 1 for one in records}
            try:
                admin = KafkaAdminClient(**kafka_options(self._bootstrap), client_id=_GROUP)
                admin.delete_records(before)
                admin.close()
            except (KafkaError, OSError) as exc:
                raise DependencyUnavailable(f"Kafka did not delete records of {topic!r}: {exc}") from exc
        return len(records) - len(kept)

    def _reader(self, topic: str) -> TopicReader:
        reader = TopicReader(self._bootstrap, topic, group_id=_GROUP, client_id=_GROUP)
        self._readers.append(reader)
        return reader

    def _read_whole(self, topic: str) -> list[SourceRecord]:
        reader = self._reader(topic)
        reader.seek({partition: first for partition, (first, _) in reader.bounds(reader.partitions()).items()})
        return reader.read_to_end()

    def _forgotten(self) -> dict[bytes, Mapping[int, int]]:
        found: dict[bytes, Mapping[int, int]] = {}
        for record in self._read_whole(FORGETS):
            try:
                forget = decode_forget(record.key, record.value)
            except InvalidRequest:
                continue
            user = forget.user_id.encode()
            found[user] = furthest(found.get(user, {}), forget.up_to)
        return found

    def _newest(self, topic: str, letters: Sequence[StoredLetter]) -> dict[bytes, int]:
        """Return each key's newest offset, read from the first of these letters to the topic's end."""
        reader = self._reader(topic)
        backwards = sorted((letter.position for letter in letters), reverse=True)
        first = {place.partition: place.offset for place in backwards}
        reader.assign(first)
        return {record.key or b"": record.offset for record in reader.read_to_end()}


def decoded(letter: StoredLetter) -> dict[str, Any] | None:
    """Return the decoded value, if possible."""
    try:
        if _is_json(letter.headers):
            document = json.loads(letter.value)
            return document if isinstance(document, dict) else None
        message: dict[str, Any] = MessageToDict(
            _MESSAGES[letter.topic].FromString(letter.value), preserving_proto_field_name=True
        )
    except (DecodeError, ValueError, RecursionError):
        return None
    return message


def _is_void(record: SourceRecord, forgotten: Mapping[bytes, Mapping[int, int]]) -> bool:
    """Return whether a dead letter or the mark of a replay belongs to a forgotten interaction."""
    found = dict(record.headers)
    try:
        at = int(found["freshet-source-partition"] or b""), int(found["freshet-source-offset"] or b"")
    except (KeyError, ValueError):
        return False
    return is_covered(forgotten.get(record.key or b"", {}), *at)


def _headers(record: SourceRecord) -> Headers:
    return [(name, text or b"") for name, text in record.headers]


def _is_json(headers: Headers) -> bool:
    return any(
        name.lower() == CONTENT_TYPE and text.split(b";", 1)[0].strip().lower() == JSON_CONTENT_TYPE
        for name, text in headers
    )


def _interaction(letter: StoredLetter, forgotten: Mapping[bytes, Mapping[int, int]]) -> Replay:
    at = letter.position
    if is_covered(forgotten.get(letter.key, {}), at.partition, at.offset):
        return Replay(letter, None, "its user was forgotten since")
    try:
        interaction = decode_interaction(letter.value, letter.headers, letter.key, missing_time_ms=_NO_TIME)
    except InvalidRequest:
        # The record stays unchanged, since a corrected version may read it. It keeps its partition, since a record
        # without a key has no default one.
        return Replay(letter, Record(letter.topic, letter.key, letter.value, letter.headers, at.partition))
    event_id = interaction.event_id or f"{at.partition}-{at.offset}"
    value, headers = letter.value, letter.headers
    if not interaction.event_id or interaction.event_time_ms == _NO_TIME:
        time_ms = letter.written_ms if interaction.event_time_ms == _NO_TIME else interaction.event_time_ms
        value = encode_interaction(replace(interaction, event_id=event_id, event_time_ms=time_ms))
        headers = [(name, text) for name, text in headers if name.lower() != CONTENT_TYPE]
    return Replay(letter, Record(letter.topic, letter.key, value, headers), event_id=event_id)

"""The dead-letter topics. They have the unusable records, each with the reason.

A dead letter has the original key, value and headers, and further headers for reason and source. A record without a
value notes a replay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.platform.stream.kafka import Headers, Record
from services.platform.stream.records import DeadLetter, Position, SourceRecord
from services.platform.stream.topic import FOREVER, Topic

SUFFIX = ".dead-letter"
# A whole record (Kafka's limit: 1 MiB) and the reason.
MAX_DEAD_LETTER_BYTES = 2 << 20
# The other 64 KiB are for the reason's headers and Kafka's overhead.
MAX_COPIED_BYTES = MAX_DEAD_LETTER_BYTES - 65_536
MAX_REASON_BYTES = 512
_OURS = "freshet-"
_CUT = "freshet-original-bytes"
_REPLAYED = "freshet-replayed-to"


def dead_letter_topic(topic: Topic) -> Topic:
    settings = FOREVER | {"max.message.bytes": str(MAX_DEAD_LETTER_BYTES)}
    return Topic(name=topic.name + SUFFIX, num_partitions=1, settings=settings)


def dead_letter(dead: DeadLetter) -> Record:
    """Return the dead letter to write. It is cut to fit, because one that cannot be sent would stop the stream."""
    record = dead.record
    key, value = record.key or b"", record.value or b""
    kept = [(name, text or b"") for name, text in record.headers]
    size = len(key) + len(value) + sum(len(name.encode()) + len(text) for name, text in kept)
    if size > MAX_COPIED_BYTES:
        room = MAX_COPIED_BYTES // 2
        key, value = key[:room], value[:room]
        kept = [(_CUT, str(size).encode())]
    return Record(
        record.topic + SUFFIX,
        key,
        value,
        [
            *kept,
            ("freshet-reason", dead.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode()),
            ("freshet-source-topic", record.topic.encode()),
            ("freshet-source-partition", str(record.partition).encode()),
            ("freshet-source-offset", str(record.offset).encode()),
            # Absent if the original record was not available.
            *([("freshet-source-time", str(record.written_ms).encode())] if record.written_ms else []),
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLetter:
    """A stored dead letter.

    topic, position, written_ms: topic, position and time of the original record; if its time is not stored, the dead
    letter's time. is_whole: key, value and headers are complete. replayed_to: the replay's position.
    """

    topic: str
    position: Position
    written_ms: int
    reason: str
    key: bytes
    value: bytes
    headers: Headers
    is_whole: bool
    replayed_to: Position | None = None

    @property
    def name(self) -> str:
        """topic:partition:offset, which commands use as the letter's name."""
        return f"{self.topic}:{self.position.partition}:{self.position.offset}"


def stored_letters(records: Iterable[SourceRecord]) -> list[StoredLetter]:
    """Return the dead letters in these records, one per original."""
    found: dict[tuple[str, Position], StoredLetter] = {}
    replayed: dict[tuple[str, Position], Position] = {}
    for record in records:
        ours = {name: text or b"" for name, text in record.headers if name.startswith(_OURS)}
        try:
            topic = ours["freshet-source-topic"].decode()
            position = Position(int(ours["freshet-source-partition"]), int(ours["freshet-source-offset"]))
            if _REPLAYED in ours:
                partition, _, offset = ours[_REPLAYED].decode().partition(":")
                replayed[topic, position] = Position(int(partition), int(offset))
                continue
            letter = StoredLetter(
                topic=topic,
                position=position,
                written_ms=int(ours.get("freshet-source-time") or record.written_ms),
                reason=ours["freshet-reason"].decode(errors="replace"),
                key=record.key or b"",
                value=record.value or b"",
                headers=[(name, text or b"") for name, text in record.headers if not name.startswith(_OURS)],
                # The refresher's dead letters of readable records have no key and value.
                is_whole=_CUT not in ours and bool(record.key or record.value),
            )
        except (KeyError, ValueError):
            continue
        found.setdefault((topic, position), letter)
    return [replace(letter, replayed_to=replayed.get(place)) for place, letter in found.items()]


def replay_notes(letters: Sequence[tuple[StoredLetter, Position]]) -> list[Record]:
    """Return the records that note these replays."""
    return [
        Record(
            letter.topic + SUFFIX,
            letter.key,
            b"",
            [
                (_REPLAYED, f"{to.partition}:{to.offset}".encode()),
                ("freshet-source-topic", letter.topic.encode()),
                ("freshet-source-partition", str(letter.position.partition).encode()),
                ("freshet-source-offset", str(letter.position.offset).encode()),
            ],
        )
        for letter, to in letters
    ]

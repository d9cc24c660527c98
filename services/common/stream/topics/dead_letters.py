"""The dead-letter topics: what becomes of a record that nobody can read, its bytes, its headers and the reason.

One form for every topic: the original key, value and headers, and in further headers why and from where. It knows how
large a dead letter and its reason may be, not who writes it.
"""

from services.common.kafka import Record
from services.common.stream.record import DeadLetter
from services.common.stream.topic import FOREVER, Topic

SUFFIX = ".dead-letter"
# A dead letter is a whole record (Kafka's own limit: 1 MiB) with the reason beside it.
MAX_DEAD_LETTER_BYTES = 2 << 20
# The rest is for the headers that say why, and for what Kafka puts around a record.
MAX_COPIED_BYTES = MAX_DEAD_LETTER_BYTES - 65_536
MAX_REASON_BYTES = 512


def dead_letter_topic(topic: Topic) -> Topic:
    """Where a topic's dead letters go."""
    settings = FOREVER | {"max.message.bytes": str(MAX_DEAD_LETTER_BYTES)}
    return Topic(name=topic.name + SUFFIX, num_partitions=1, settings=settings)


def dead_letter(dead: DeadLetter) -> Record:
    """The record to write.

    What no topic of ours could hold is cut, and says how long it was: one that cannot be sent would hold the
    stream up for ever. The source position tells where the whole record lies.
    """
    record = dead.record
    key, value = record.key or b"", record.value or b""
    kept = [(name, text or b"") for name, text in record.headers]
    size = len(key) + len(value) + sum(len(name.encode()) + len(text) for name, text in kept)
    if size > MAX_COPIED_BYTES:
        room = MAX_COPIED_BYTES // 2
        key, value = key[:room], value[:room]
        kept = [("freshet-original-bytes", str(size).encode())]
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
        ],
    )

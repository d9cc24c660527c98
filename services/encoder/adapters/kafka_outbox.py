"""The outbox port over Apache Kafka: attributions keyed by item, dead letters as they came with the reason beside."""

from collections.abc import Sequence

from freshet.v1 import common_pb2, events_pb2

from services.common.kafka import BulkProducer, Record
from services.common.topics import ATTRIBUTIONS, INTERACTIONS, INTERACTIONS_DEAD_LETTER, MAX_DEAD_LETTER_BYTES
from services.encoder.domain import Attribution, DeadLetter

# The rest is for the headers that say why, and for what Kafka puts around a record.
MAX_LETTER_BYTES = MAX_DEAD_LETTER_BYTES - 65_536


class KafkaOutbox:
    """Publishes and waits for the acknowledgement of everything."""

    def __init__(self, producer: BulkProducer, *, timeout_s: float = 15.0) -> None:
        self._producer = producer
        self._timeout_s = timeout_s

    def publish(self, attributions: Sequence[Attribution], dead_letters: Sequence[DeadLetter]) -> None:
        records = [
            Record(ATTRIBUTIONS, attribution.item_id.encode(), encode_attribution(attribution))
            for attribution in attributions
        ]
        records += [dead_letter_record(letter) for letter in dead_letters]
        self._producer.send_many(records, self._timeout_s)

    def close(self) -> None:
        self._producer.close()


def encode_attribution(attribution: Attribution) -> bytes:
    """The Protobuf bytes of an attribution."""
    seconds, ms = divmod(attribution.event_time_ms, 1000)
    state = attribution.state
    message = events_pb2.Attribution(
        event_id=attribution.event_id,
        item_id=attribution.item_id,
        query_state=common_pb2.QueryState(
            model_version=attribution.model_version,
            components=state.components,
            gate=state.gate,
            num_components=state.num_components,
            component_width=state.component_width,
        ),
        type=attribution.type,
        value=attribution.value,
        source=common_pb2.StreamPosition(partition=attribution.partition, offset=attribution.offset),
        user_pseudonym=attribution.user_pseudonym,
    )
    message.event_time.seconds = seconds
    message.event_time.nanos = ms * 1_000_000
    data: bytes = message.SerializeToString()
    return data


def dead_letter_record(letter: DeadLetter) -> Record:
    """The original bytes and headers, and in further headers why and from where.

    What no topic of ours could hold is cut, and says how long it was: a letter that cannot be sent would hold the
    stream up for ever. The source position tells where the whole record lies.
    """
    record = letter.record
    key, value = record.key or b"", record.value or b""
    headers = [(name, text or b"") for name, text in record.headers]
    size = len(key) + len(value) + sum(len(name.encode()) + len(text) for name, text in headers)
    if size > MAX_LETTER_BYTES:
        room = MAX_LETTER_BYTES // 2
        key, value = key[:room], value[:room]
        headers = [("freshet-original-bytes", str(size).encode())]
    return Record(
        INTERACTIONS_DEAD_LETTER,
        key,
        value,
        [
            *headers,
            ("freshet-reason", letter.reason.encode()),
            ("freshet-source-topic", INTERACTIONS.encode()),
            ("freshet-source-partition", str(record.partition).encode()),
            ("freshet-source-offset", str(record.offset).encode()),
        ],
    )

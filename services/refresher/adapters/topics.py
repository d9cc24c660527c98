"""The log and the outbox over Kafka. Only this module knows `Attribution` and `Item`.

One reader follows the stream. The other connects on first use and reads single records again, such as a forgotten
user's. A record that breaks a limit becomes a `DeadLetter`, so that no producer can stop the stream. Reasons are
logged, so they contain no ids. Unreadable `items` are only logged, because the candidates process writes their dead
letters.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from freshet.v1 import events_pb2

from services.algorithms.scoring.states import check_sizes
from services.contracts.topics import index_deltas
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.dead_letters import dead_letter
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.contracts.topics.interactions import MAX_TYPE_BYTES
from services.contracts.topics.items import ITEMS, decode_item
from services.contracts.wire import PackedQueryState, query_state_of
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.request_context import OFF, Tracing
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.ports import Reader
from services.platform.stream.reading import read_offsets
from services.platform.stream.records import (
    MOST_MS,
    DeadLetter,
    SourceRecord,
    pack_position,
    parse,
    read_ms,
    read_position,
    read_up_to,
)
from services.platform.validation import validate_id
from services.refresher.domain.records import Entry, Forgetting, Interaction, Listing, Undo
from services.refresher.ports import Polled

_HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryShape:
    """The shape that query states of this model must have. `num_pairs` is P, or 0 without a gate."""

    model_version: str
    num_components: int
    component_width: int
    num_pairs: int


def decode_attribution(record: SourceRecord, shape: QueryShape) -> Entry:
    try:
        return _decode(record, shape)
    except InvalidRequest as exc:
        return DeadLetter(record, exc.message)


def decode_listing(record: SourceRecord) -> Listing | DeadLetter:
    try:
        item = decode_item(record.key, record.value)
    except InvalidRequest as exc:
        return DeadLetter(record, exc.message)
    return Listing(item.item_id, item.withdrawn, item.title, item.categories)


def _decode(record: SourceRecord, shape: QueryShape) -> Entry:
    message = parse(events_pb2.Attribution, record.value)
    validate_id("user_pseudonym", message.user_pseudonym)
    if message.HasField("forgets"):
        up_to = read_up_to("forgets.up_to", message.forgets.up_to)
        return Forgetting(record.offset, message.user_pseudonym, up_to)
    validate_id("item_id", message.item_id)
    if message.HasField("undoes"):
        return Undo(record.offset, _packed("undoes", message.undoes), message.item_id, message.user_pseudonym)
    return _interaction(record, message, shape)


def _interaction(record: SourceRecord, message: events_pb2.Attribution, shape: QueryShape) -> Interaction:
    if not message.HasField("source"):
        raise InvalidRequest.of("source", "absent", "the position of the interaction")
    if not math.isfinite(message.value):
        raise InvalidRequest.of("value", message.value, "a finite number")
    if len(message.type.encode()) > MAX_TYPE_BYTES:
        raise InvalidRequest.of("type", f"text of {len(message.type)} characters", f"at most {MAX_TYPE_BYTES} bytes")
    state = message.query_state
    if not state.model_version:
        raise InvalidRequest.of("query_state.model_version", "", "a model version")
    query = query_state_of(state)
    if state.model_version == shape.model_version:
        _check_query(query, shape)
    recorded_ms = record.written_ms
    if message.HasField("recorded_time"):
        recorded_ms = read_ms(message.recorded_time, "recorded_time")
    elif not 0 <= recorded_ms <= MOST_MS:
        raise InvalidRequest.of("recorded_time", f"absent, and the record's own is {recorded_ms} ms", f"0-{MOST_MS} ms")
    moment_ms = recorded_ms
    if message.HasField("event_time"):
        moment_ms = min(read_ms(message.event_time, "event_time"), recorded_ms)
    return Interaction(
        offset=record.offset,
        source_position=_packed("source", message.source),
        item_id=message.item_id,
        user=message.user_pseudonym,
        query=query,
        type=message.type,
        value=message.value,
        moment_ms=moment_ms,
        recorded_ms=recorded_ms,
    )


def _check_query(query: PackedQueryState, shape: QueryShape) -> None:
    found = (query.num_components, query.component_width)
    wanted = (shape.num_components, shape.component_width)
    if found != wanted or len(query.components) != _HALF_BYTES * math.prod(wanted):
        raise InvalidRequest.of(
            "query_state.components", f"{len(query.components)} bytes as {found}", f"half-precision numbers {wanted}"
        )
    if len(query.gate) != _HALF_BYTES * shape.num_pairs:
        raise InvalidRequest.of("query_state.gate", f"{len(query.gate)} bytes", f"{_HALF_BYTES * shape.num_pairs}")
    try:
        check_sizes(np.frombuffer(query.components, "<f2").astype(np.float32).reshape(1, *wanted))
    except ValueError as exc:
        raise InvalidRequest.of("query_state.components", str(exc), "l2-normalised components") from exc
    if query.gate and not np.isfinite(np.frombuffer(query.gate, "<f2")).all():
        raise InvalidRequest.of("query_state.gate", "NaN or infinite values", "finite numbers")


def _packed(name: str, message: object) -> int:
    return pack_position(*read_position(name, message))


log = structlog.get_logger()

# Skipping this many records is cheaper than another fetch.
_GAP_RECORDS = 200


class KafkaLog:
    """The log. `reader` polls `attributions` and `items`; `again` reads single attributions."""

    def __init__(self, reader: Reader, again: Reader, shape: QueryShape, tracing: Tracing = OFF) -> None:
        self._reader, self._again, self._shape, self._tracing = reader, again, shape, tracing

    def partitions(self) -> Sequence[int]:
        return self._reader.partitions(ATTRIBUTIONS)

    def listings(self) -> Sequence[Listing]:
        self._reader.seek({0: 0}, ITEMS)
        return list({listing.item_id: listing for listing in _listings(self._reader.read_to_end(ITEMS))}.values())

    def assign(self, offsets: Mapping[int, int]) -> None:
        self._reader.assign(offsets, ATTRIBUTIONS)

    def poll(self, timeout_ms: int) -> Polled:
        records = self._reader.poll(timeout_ms)
        polled = Polled(listings=list(_listings(record for record in records if record.topic == ITEMS)))
        for record in records:
            if record.topic != ITEMS:
                entries = polled.entries.setdefault(record.partition, [])
                entries.append(decode_attribution(record, self._shape))
        polled.traceparents = self._tracing.sampled(r for r in records if r.topic != ITEMS).values()
        return polled

    def bounds(self, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        return self._reader.bounds(partitions, ATTRIBUTIONS)

    def known_ends(self) -> Mapping[int, int]:
        return self._reader.known_end_offsets(ATTRIBUTIONS)

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        found: dict[int, Interaction] = {}
        for offset, record in read_offsets(self._again, ATTRIBUTIONS, partition, sorted(offsets), max_gap=_GAP_RECORDS):
            if record is None:
                raise PreconditionFailed(f"offset {offset} of partition {partition} is not there any more")
            entry = decode_attribution(record, self._shape)
            if not isinstance(entry, Interaction):
                raise PreconditionFailed(f"offset {offset} of partition {partition} no longer contains an interaction")
            found[offset] = entry
        return found

    def close(self) -> None:
        self._reader.close()
        self._again.close()


def _listings(records: Iterable[SourceRecord]) -> Iterator[Listing]:
    for record in records:
        listing = decode_listing(record)
        if isinstance(listing, DeadLetter):
            log.warning("item_unreadable", offset=record.offset, reason=listing.reason)
        else:
            yield listing


class KafkaOutbox:
    """Publishes records and waits for all acknowledgements."""

    def __init__(
        self,
        producer: BulkProducer,
        *,
        timeout_s: float = 15.0,
        tracing: Tracing = OFF,
    ) -> None:
        self._producer, self._tracing = producer, tracing
        self._timeout_s = timeout_s

    def publish(
        self,
        deltas: Sequence[index_deltas.IndexDelta],
        unreadable: Sequence[DeadLetter],
        tombstones: Sequence[bytes] = (),
    ) -> None:
        records = [Record(INDEX_DELTAS, key, None, partition=0) for key in tombstones]
        headers = self._tracing.headers()
        records += [Record(INDEX_DELTAS, d.key, index_deltas.encode(d), headers, partition=0) for d in deltas]
        records += [dead_letter(entry) for entry in unreadable]
        self._producer.send_many(records, self._timeout_s)

    def close(self) -> None:
        self._producer.close()

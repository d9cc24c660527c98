"""Decode Kafka's records and check every limit. Only this module knows `Attribution` and `Item`.

A record that breaks a limit becomes a `DeadLetter`, so that no producer can stop the stream. Reasons are logged, so
they contain no ids.
"""

import math
from dataclasses import dataclass

import numpy as np
from freshet.v1 import events_pb2

from services.algorithms.scoring.states import check_sizes
from services.contracts.query_state import PackedQueryState, from_message
from services.contracts.topics.interactions import MAX_TYPE_BYTES
from services.contracts.topics.items import decode_item
from services.platform.errors import InvalidRequest
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

_HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryShape:
    """The shape of this model's query states; others' are not checked. num_pairs: P, 0 without gate."""

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
    query = from_message(state)
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

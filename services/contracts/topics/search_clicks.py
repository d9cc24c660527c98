"""The topic `search-clicks`: items chosen from search results, and retractions.

The encoder writes it; each generator reads it in full. The position of the interaction identifies a record. A
crash may repeat a record. Errors are logged, so they contain no texts.
"""

from dataclasses import dataclass
from typing import Any

from freshet.v1 import events_pb2

from services.contracts.topics.attributions import ForgetUpTo, OfInteraction, Undo, write_about
from services.platform.stream.records import parse, read_ms, read_position, read_up_to
from services.platform.stream.topic import FOREVER, Topic
from services.platform.validation import validate_id, validate_query

SEARCH_CLICKS = "search-clicks"
# A starting generator reads the topic from the beginning.
TOPIC = Topic(name=SEARCH_CLICKS, num_partitions=1, settings=FOREVER, has_dead_letters=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchClick(OfInteraction):
    """A user chose `item_id` for `query`."""

    query: str
    value: float


# The encoder does not store every event's type, so an `Undo` may retract an interaction that is no search click.
ClickRecord = SearchClick | Undo | ForgetUpTo


def key_of(record: ClickRecord) -> bytes:
    """Return a record's key, the same if the record is repeated."""
    return (record.forget_id if isinstance(record, ForgetUpTo) else record.event_id).encode()


def encode_click(record: ClickRecord) -> bytes:
    message = events_pb2.SearchClick()
    write_about(message, record)
    if isinstance(record, SearchClick):
        message.query, message.value = record.query, record.value
    return message.SerializeToString()


def decode_click(value: bytes | None) -> ClickRecord:
    message = parse(events_pb2.SearchClick, value)
    validate_id("user_pseudonym", message.user_pseudonym)
    recorded_ms = read_ms(message.recorded_time, "recorded_time")
    if message.HasField("forgets"):
        validate_id("forgets.forget_id", message.forgets.forget_id)
        return ForgetUpTo(
            forget_id=message.forgets.forget_id,
            up_to=read_up_to("forgets.up_to", message.forgets.up_to),
            user_pseudonym=message.user_pseudonym,
            recorded_ms=recorded_ms,
        )
    validate_id("event_id", message.event_id)
    validate_id("item_id", message.item_id)
    partition, offset = read_position("source", message.source)
    fields: dict[str, Any] = {
        "event_id": message.event_id,
        "item_id": message.item_id,
        "event_time_ms": read_ms(message.event_time, "event_time"),
        "recorded_ms": recorded_ms,
        "partition": partition,
        "offset": offset,
        "user_pseudonym": message.user_pseudonym,
    }
    if message.HasField("undoes"):
        return Undo(undoes=read_position("undoes", message.undoes), **fields)
    validate_query("query", message.query)
    return SearchClick(query=message.query, value=message.value, **fields)

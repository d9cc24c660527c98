"""The topic `interactions`: interactions, their limits and encoding.

The gateway and outside producers (Protobuf or JSON) write it; the encoder validates with the same rules. Errors contain
no ids, since messages are logged.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from freshet.v1 import events_pb2

from services.platform.errors import InvalidRequest
from services.platform.stream.records import check_key, parse, read_ms, set_ms
from services.platform.stream.topic import FOREVER, Topic
from services.platform.validation import utf8_size, validate_id, validate_query, validate_text

INTERACTIONS = "interactions"
TOPIC = Topic(
    name=INTERACTIONS,
    # The broker sets each record's time, so that a second reading gives the same result, and decompresses records, so
    # that every reader can read them.
    settings=FOREVER | {"message.timestamp.type": "LogAppendTime", "compression.type": "uncompressed"},
    has_dead_letters=True,
)

MAX_TYPE_BYTES = 64
MAX_CONTEXT_ENTRIES = 32
MAX_CONTEXT_BYTES = 256
MAX_FUTURE_MS = 24 * 3600 * 1000
DEFAULT_TYPE = "interaction"
# An item chosen from search results: the only type with a query.
SEARCH_CLICK = "search_click"
CONTENT_TYPE = "content-type"
JSON_CONTENT_TYPE = b"application/json"
PROTOBUF_CONTENT_TYPES = (b"", b"application/x-protobuf", b"application/protobuf")

_JSON_TEXTS = ("user_id", "item_id", "event_id", "type", "undoes_event_id", "query", "exposure_id")
_JSON_FIELDS = frozenset((*_JSON_TEXTS, "value", "event_time", "context"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """An interaction of a user with an item; with undoes_event_id, the undo of an earlier interaction.

    event_id: empty until assigned. event_time_ms: Unix milliseconds by the producer's clock.
    """

    user_id: str
    item_id: str = ""
    event_id: str = ""
    type: str = DEFAULT_TYPE
    value: float = 0.0
    event_time_ms: int = 0
    context: Mapping[str, str] = field(default_factory=dict)
    undoes_event_id: str = ""
    query: str = ""
    exposure_id: str = ""


def validate(interaction: Interaction, now_ms: int) -> None:
    """Check every limit; an empty event_id passes.

    now_ms: Unix milliseconds. Old events are accepted, events more than a day in the future rejected.
    Raises: InvalidRequest with the field, the value and what is allowed.
    """
    it = interaction
    validate_id("user_id", it.user_id)
    if it.event_id:
        validate_id("event_id", it.event_id)
    if it.undoes_event_id:
        validate_id("undoes_event_id", it.undoes_event_id)
        if it.item_id:
            raise InvalidRequest.of("item_id", "set", "empty when undoes_event_id is set")
    else:
        validate_id("item_id", it.item_id)
    if it.exposure_id:
        validate_id("exposure_id", it.exposure_id)
    validate_text("type", it.type, 1, MAX_TYPE_BYTES)
    if not math.isfinite(it.value):
        raise InvalidRequest.of("value", it.value, "a finite number")
    if not 0 <= it.event_time_ms <= now_ms + MAX_FUTURE_MS:
        raise InvalidRequest.of(
            "event_time", f"{it.event_time_ms} ms", f"0 to {now_ms + MAX_FUTURE_MS} ms: at most a day in the future"
        )
    if it.type == SEARCH_CLICK and not it.undoes_event_id:
        validate_query("query", it.query)
    elif it.query:
        raise InvalidRequest.of("query", "set", f"empty unless type is {SEARCH_CLICK!r} and nothing is undone")
    if len(it.context) > MAX_CONTEXT_ENTRIES:
        raise InvalidRequest.of("context", f"{len(it.context)} entries", f"at most {MAX_CONTEXT_ENTRIES} entries")
    for key, text in it.context.items():
        size = max(utf8_size("context", key), utf8_size("context", text))
        if size > MAX_CONTEXT_BYTES:
            raise InvalidRequest.of("context", f"an entry of {size} bytes", f"at most {MAX_CONTEXT_BYTES} bytes a side")


def from_message(message: events_pb2.Interaction, *, missing_time_ms: int) -> Interaction:
    """Return a message's dataclass, validating only the range of event_time.

    missing_time_ms: replaces an absent event_time. Raises: InvalidRequest.
    """
    if message.HasField("event_time"):
        event_time_ms = read_ms(message.event_time, "event_time")
    else:
        event_time_ms = missing_time_ms
    return Interaction(
        user_id=message.user_id,
        item_id=message.item_id,
        event_id=message.event_id,
        type=message.type or DEFAULT_TYPE,
        value=message.value,
        event_time_ms=event_time_ms,
        context=dict(message.context) if message.context else {},
        undoes_event_id=message.undoes_event_id,
        query=message.query,
        exposure_id=message.exposure_id,
    )


def encode_interaction(interaction: Interaction) -> bytes:
    message = events_pb2.Interaction(
        event_id=interaction.event_id,
        user_id=interaction.user_id,
        item_id=interaction.item_id,
        type=interaction.type,
        value=interaction.value,
        context=interaction.context,
        undoes_event_id=interaction.undoes_event_id,
        query=interaction.query,
        exposure_id=interaction.exposure_id,
    )
    set_ms(message.event_time, interaction.event_time_ms)
    return message.SerializeToString()


def decode_interaction(
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | None]],
    key: bytes | None,
    *,
    missing_time_ms: int = 0,
) -> Interaction:
    """Decode Protobuf, or JSON with the header `content-type: application/json`, without checking limits.

    missing_time_ms: replaces an absent event_time; with the record's own time, every decoding gives the same result.
    Raises: InvalidRequest for unreadable bytes, or a key that is not the user id.
    """
    if not value:
        raise InvalidRequest.of("value", "no bytes", "an Interaction as Protobuf or JSON")
    content_type = b""
    for name, text in headers:
        if name.lower() == CONTENT_TYPE:
            # Kafka's header values may be null.
            content_type = (text or b"").split(b";", 1)[0].strip().lower()
    if content_type == JSON_CONTENT_TYPE:
        interaction = _from_json(value, missing_time_ms)
    elif content_type in PROTOBUF_CONTENT_TYPES:
        interaction = from_message(parse(events_pb2.Interaction, value), missing_time_ms=missing_time_ms)
    else:
        shown = content_type[:64].decode("ascii", "replace")
        raise InvalidRequest.of(CONTENT_TYPE, shown, "application/json, application/x-protobuf or none")
    check_key(key, interaction.user_id.encode("utf-8", "replace"), "the record's user_id")
    return interaction


def _from_json(value: bytes, missing_time_ms: int) -> Interaction:
    try:
        document: Any = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest.of("value", f"{len(value)} bytes of broken JSON", "one JSON object") from exc
    if not isinstance(document, dict):
        raise InvalidRequest.of("value", f"JSON {type(document).__name__}", "one JSON object")
    unknown = sorted(document.keys() - _JSON_FIELDS)
    if unknown:
        raise InvalidRequest.of("value", f"unknown field {unknown[0][:64]!r}", ", ".join(sorted(_JSON_FIELDS)))
    texts = {name: _json_text(document, name) for name in _JSON_TEXTS}
    number = document.get("value")
    if number is None:
        number = 0.0
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InvalidRequest.of("value", type(number).__name__, "a finite number")
    context = document.get("context")
    if context is None:
        context = {}
    if not isinstance(context, dict) or not all(isinstance(text, str) for text in context.values()):
        raise InvalidRequest.of("context", type(context).__name__, "an object of strings")
    try:
        strength = float(number)
    except OverflowError as exc:
        raise InvalidRequest.of("value", "an integer beyond float64", "a finite number") from exc
    return Interaction(
        user_id=texts["user_id"],
        item_id=texts["item_id"],
        event_id=texts["event_id"],
        type=texts["type"] or DEFAULT_TYPE,
        value=strength,
        event_time_ms=_json_time(document.get("event_time"), missing_time_ms),
        context=context,
        undoes_event_id=texts["undoes_event_id"],
        query=texts["query"],
        exposure_id=texts["exposure_id"],
    )


def _json_text(document: dict[str, Any], name: str) -> str:
    """Integers become decimal text: many catalogues have numeric ids."""
    value = document.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return str(value)
    raise InvalidRequest.of(name, type(value).__name__, "a string")


def _json_time(value: Any, missing_time_ms: int) -> int:
    allowed = "RFC 3339 text with an offset (2026-01-31T12:00:00Z) or Unix seconds"
    if value is None:
        return missing_time_ms
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not -1e14 <= value <= 1e14:  # NaN fails too; a huge int is never converted to float
            raise InvalidRequest.of("event_time", "an infinite or immense number", allowed)
        return math.floor(value * 1000)
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError as exc:
            raise InvalidRequest.of("event_time", value[:40], allowed) from exc
        if moment.tzinfo is None:
            raise InvalidRequest.of("event_time", value[:40], allowed)
        return math.floor(moment.timestamp() * 1000)
    raise InvalidRequest.of("event_time", type(value).__name__, allowed)

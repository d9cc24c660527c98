"""Limit the entries of repeated fields before a message is built.

4 MB can encode two million empty messages, which take 350 MB in Protobuf and half a minute in a handler.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from services.platform.errors import InvalidRequest

# Entries of a smaller Protobuf request are not counted, because it is built in 25 ms at most. Counting takes 3.3 µs an
# interaction, a third of what the gateway needs to record 50 interactions.
UNCOUNTED_BYTES = 4096
# Most fields of a request; the largest request that `LIMITS` allow has 120,000.
MAX_FIELDS = 200_000
_IDS = 50_000

# Most entries: "Message.field" counts them in one message, "*Message.field" in a whole request. The limits apply
# between processes, because the gateway adds seen items, answered items and standing rules. `OF_CLIENTS` has lower
# limits for clients.
LIMITS: Mapping[str, int] = {
    "Arm.rules": 8,
    "AttributeCondition.values": 1000,
    "EncodeRequest.history": 10_000,
    "Experiment.arms": 8,
    "Experiment.context": 32,
    "ExplainRequest.history": 1000,
    "ExplainRequest.rules": 8,
    "ExplainScoreRequest.rules": 16,
    "ExplainVotesRequest.seen_item_ids": _IDS,
    "ExplainVotesRequest.turned_down_item_ids": _IDS,
    "Filter.allow_categories": _IDS,
    "Filter.allow_item_ids": _IDS,
    "Filter.deny_categories": _IDS,
    "Filter.deny_item_ids": _IDS,
    "Filter.where": 64,
    "FindByWordsRequest.sources": 64,
    "GatewayServiceSearchRequest.context": 32,
    "GatewayServiceSimilarRequest.context": 32,
    "Interaction.context": 32,
    "Item.attributes": 32,
    "Item.categories": 64,
    "PutItemsRequest.fields": 64,
    "PutItemsRequest.items": 1000,
    "PutRulesRequest.rules": 8,
    "RecommendRequest.arms": 32,
    "RecommendRequest.context": 32,
    "RecommendRequest.history": 1000,
    "RecommendRequest.rules": 8,
    "RecordImpressionsRequest.impressions": 1000,
    "RecordInteractionsRequest.interactions": 1000,
    "RerankRequest.candidate_item_ids": _IDS,
    "RerankRequest.discounts": _IDS,
    "RerankRequest.rules": 16,
    "RerankRequest.seen_item_ids": _IDS,
    "RerankRequest.votes": _IDS,
    "Rule.categories": 1000,
    "Rule.item_ids": 1000,
    "Rule.where": 32,
    "SearchRequest.seen_item_ids": _IDS,
    "SearchRequest.turned_down_item_ids": _IDS,
    "SimilarRequest.seen_item_ids": _IDS,
}
OF_CLIENTS: Mapping[str, int] = {
    "*AttributeCondition.values": 10_000,
    "Filter.allow_categories": 1000,
    "Filter.allow_item_ids": 10_000,
    "Filter.deny_categories": 1000,
    "Filter.deny_item_ids": 10_000,
    "Filter.where": 32,
}
_WIDTHS = {FieldDescriptor.CPPTYPE_DOUBLE: 8, FieldDescriptor.CPPTYPE_FLOAT: 4}


@dataclass(frozen=True, slots=True)
class _Field:
    """A counted field. most: allowed entries in one message. in_all: allowed entries in a request. packed: bytes of a
    packed entry, or 0. inner: limits inside an entry.
    """

    name: str
    most: int
    in_all: int
    packed: int
    inner: "RequestCounts | None"


class RequestCounts:
    """The limits of one message type and of the messages inside it.

    limits: keys as in `LIMITS`.
    Raises: KeyError for a repeated field without a limit.
    """

    def __init__(self, message: Descriptor, limits: Mapping[str, int]) -> None:
        self._by_number: dict[int, _Field] = {}
        self._by_name: dict[str, _Field] = {}
        for field in message.fields:
            of, inner = field.message_type, None
            if of is not None and not of.GetOptions().map_entry and of.file.package == message.file.package:
                inner = RequestCounts(of, limits)
            has_counts = inner is not None and bool(inner._by_number)
            if not field.is_repeated and not has_counts:
                continue
            key = f"{message.name}.{field.name}"
            counted = _Field(
                name=field.name,
                most=limits[key] if field.is_repeated else 1,
                in_all=limits.get(f"*{key}", MAX_FIELDS),
                packed=_WIDTHS.get(field.cpp_type, 1) if field.is_packed else 0,
                inner=inner if has_counts else None,
            )
            self._by_number[field.number] = counted
            self._by_name[field.name] = self._by_name[field.json_name] = counted

    def check(self, data: bytes) -> None:
        """Check a Protobuf request. Raises: InvalidRequest with the field, DecodeError for malformed bytes."""
        try:
            self._scan(data, 0, len(data), "", Counter())
        except IndexError as exc:
            raise DecodeError("the message ends within a field") from exc

    def check_json(self, document: Any) -> None:
        """Check a parsed JSON request. Raises: InvalidRequest with the field."""
        self._walk(document, "", Counter())

    def _scan(self, data: bytes, at: int, end: int, path: str, in_all: Counter[str]) -> None:
        counts: Counter[int] = Counter()
        by_number, fields = self._by_number, in_all[""]
        while at < end:
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _varint(data, at - 1)
            fields += 1
            if fields > MAX_FIELDS:
                raise InvalidRequest.of("request", "too many fields", f"at most {MAX_FIELDS} in all")
            wire, size = tag & 7, 0
            if wire == 2:
                size, at = _varint(data, at)
                at += size
            elif wire == 0:
                _, at = _varint(data, at)
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                raise DecodeError("a group")
            field = by_number.get(tag >> 3)
            if field is None:
                continue
            number = size // field.packed if field.packed and wire == 2 else 1
            if wire == 2 and field.inner is None and not field.packed and tag < 128:
                # Skip many short texts at once: this loop takes most of the time.
                most = field.most - counts[tag]
                while at < end and data[at] == tag and (size := data[at + 1]) < 128 and number <= most:
                    at += 2 + size
                    number += 1
                fields += number - 1
            counts[tag] += number
            _check(field, path, field.name, counts[tag], number, in_all)
            if field.inner is not None and wire == 2 and size:
                in_all[""] = fields
                name = f"{path}{field.name}" if field.most == 1 else f"{path}{field.name}[{counts[tag] - 1}]"
                field.inner._scan(data, at - size, at, f"{name}.", in_all)
                fields = in_all[""]
        if at > end:
            raise DecodeError("a field ends after its message")
        in_all[""] = fields

    def _walk(self, document: Any, path: str, in_all: Counter[str]) -> None:
        if not isinstance(document, dict):
            return
        for name, value in document.items():
            field = self._by_name.get(name)
            if field is None:
                continue
            is_list = isinstance(value, list)
            if is_list or field.inner is None:
                number = len(value) if isinstance(value, list | dict) else 1
                _check(field, path, name, number, number, in_all)
            if field.inner is not None:
                for position, one in enumerate(value if is_list else (value,)):
                    field.inner._walk(one, f"{path}{name}[{position}]." if is_list else f"{path}{name}.", in_all)


def _check(field: _Field, path: str, name: str, found: int, more: int, in_all: Counter[str]) -> None:
    """Raise InvalidRequest for too many entries.

    found: number of entries in one message. more: how many of them are not yet in `in_all`.
    """
    if found > field.most:
        allowed = f"at most {field.most} entries" if field.most > 1 else "once"
        raise InvalidRequest.of(f"{path}{name}", f"{found} entries or more", allowed)
    if field.in_all < MAX_FIELDS:
        in_all[field.name] += more
        if in_all[field.name] > field.in_all:
            raise InvalidRequest.of(f"{path}{name}", "too many entries", f"at most {field.in_all} in a request")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value = shift = 0
    while byte > 127:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise DecodeError("a number of more than ten bytes")
        byte = data[at]
    return value | byte << shift, at + 1

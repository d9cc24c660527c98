"""Requests that cost much: every repeated field, at any depth, far beyond its limit in a message of the largest size,
and at its limit with the last value wrong; by JSON the same, and text that is dear to read.

It works from the descriptors, so that a new field is tried, too. LIMITS says what the documents allow, on its own:
`test_cost.py` compares it with what the processes enforce.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal import encoder
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

# What a request of a client may have of each, as protos/freshet/v1 says.
LIMITS = {
    "RecommendRequest.arms": 32,
    "RecommendRequest.context": 32,
    "RecommendRequest.history": 1000,
    "RecommendRequest.rules": 8,
    "ExplainRequest.history": 1000,
    "ExplainRequest.rules": 8,
    "RecordInteractionsRequest.interactions": 1000,
    "Interaction.context": 32,
    "RecordImpressionsRequest.impressions": 1000,
    "PutItemsRequest.fields": 64,
    "PutItemsRequest.items": 1000,
    "PutRulesRequest.rules": 8,
    "Experiment.arms": 8,
    "Experiment.context": 32,
    "GatewayServiceSearchRequest.context": 32,
    "GatewayServiceSimilarRequest.context": 32,
    "Arm.rules": 8,
    "Item.categories": 64,
    "Item.attributes": 32,
    "Filter.allow_item_ids": 10_000,
    "Filter.deny_item_ids": 10_000,
    "Filter.allow_categories": 1000,
    "Filter.deny_categories": 1000,
    "Filter.where": 32,
    "Rule.item_ids": 1000,
    "Rule.categories": 1000,
    "Rule.where": 32,
    "AttributeCondition.values": 1000,
    # Between our own processes; of any other field there, `_INSIDE`.
    "ExplainScoreRequest.rules": 16,
    "FindByWordsRequest.sources": 64,
    "RerankRequest.rules": 16,
}
# Of these a whole request may have so many.
TOTALS = {"AttributeCondition.values": 10_000}
# So many each are that total in a request of a client that has all conditions.
_EACH = {"AttributeCondition.values": 34}
_INSIDE = 10_000

Path = tuple[FieldDescriptor, ...]


@dataclass(frozen=True)
class Input:
    """What is sent: by gRPC, or by HTTP as JSON."""

    name: str
    data: bytes
    is_json: bool = False


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def repeated_fields(message: Descriptor, path: Path = ()) -> Iterator[Path]:
    """Each repeated field of a message and of what it has inside, with the fields that lead there."""
    for field in message.fields:
        if field.is_repeated:
            yield (*path, field)
        inner = field.message_type
        if inner is not None and not is_map(field) and inner.file.package == message.file.package:
            yield from repeated_fields(inner, (*path, field))


def name_of(path: Path) -> str:
    return ".".join(field.name for field in path)


def _tagged(field: FieldDescriptor, data: bytes) -> bytes:
    return encoder.TagBytes(field.number, 2) + encoder._VarintBytes(len(data)) + data


def flood(path: Path, size: int, entry: bytes = b"") -> bytes:
    """As many entries as the size takes, by default the smallest, and then one that is too long."""
    *outer, last = path
    if is_map(last):
        some = b"".join(_tagged(last, b"\x0a\x04" + b"%04x" % n) for n in range(1 << 16))
        body = (some * (size // len(some) + 1))[: size // 8 * 8]
    elif last.is_packed:
        body = _tagged(last, b"\0" * (size // 8 * 8))
    else:
        one = _tagged(last, entry)
        body = one * (size // len(one))
    if last.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        body = body[: size // 2 * 2 - 256] + _tagged(last, b"x" * 200)
    for field in reversed(outer):
        body = _tagged(field, body)
    return body


def json_flood(path: Path, size: int) -> bytes:
    *outer, last = path
    if is_map(last):
        body = "{" + "".join(f'"{n:x}":"",' for n in range(size // 11)) + '"x":{"y":1}}'
    else:
        one = "{}" if last.message_type is not None else '""'
        body = "[" + f"{one}," * (size // 3 - 40) + '{"x":1}]'
    text = f'{{"{last.json_name}":{body}}}'
    for field in reversed(outer):
        text = f'{{"{field.json_name}":{f"[{text}]" if field.is_repeated else text}}}'
    return text.encode()


def _entry(field: FieldDescriptor, number: int) -> Any:
    """A valid one."""
    name = field.message_type.name if field.message_type is not None else ""
    return {
        "HistoryEvent": {"item_id": f"item-{number % 60}", "type": "click", "event_time": {"seconds": 1_600_000_000}},
        "EncodeEvent": {"item_id": f"item-{number % 60}", "type": "click", "event_time": {"seconds": 1_600_000_000}},
        "Interaction": {
            "user_id": f"user-{number}",
            "item_id": "a",
            "type": "click",
            "event_time": {"seconds": 1_600_000_000},
        },
        "Impression": {"position": number + 1, "item_id": f"item-{number}"},
        "Item": {"item_id": f"item-{number}", "title": "t" * 400},
        "AttributeCondition": {"name": "price", "comparison": 5},
        "AttributeValue": {"number": number},
        "Rule": {"name": f"rule-{number}", "boost": 1},
    }.get(name) or (0.5 if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else f"{number:06d}-{'x' * 44}")


def _entry_bytes(field: FieldDescriptor) -> bytes | None:
    if field.message_type is None or is_map(field):
        return None
    return bytes(GetMessageClass(field.message_type)(**_entry(field, 0)).SerializeToString())


def fill(message: Message) -> Message:
    """Every repeated field at its limit, with valid entries."""
    for field in message.DESCRIPTOR.fields:
        key = f"{message.DESCRIPTOR.name}.{field.name}"
        inner = field.message_type
        if is_map(field):
            message.ClearField(field.name)
            held = getattr(message, field.name)
            for number in range(LIMITS.get(key, _INSIDE)):
                if inner.fields_by_name["value"].message_type is None:
                    held[f"{number}"] = "v" * 20
                elif number == 0:
                    held["price"].number = 1
        elif field.is_repeated:
            count = _EACH.get(key) or LIMITS.get(key, _INSIDE)
            message.ClearField(field.name)
            held = getattr(message, field.name)
            for number in range(count):
                entry = _entry(field, number)
                if inner is None:
                    held.append(entry)
                else:
                    fill(held.add(**entry))
        elif (
            inner is not None
            and inner.file.package == message.DESCRIPTOR.file.package
            and inner.name in ("Filter", "Interaction")
        ):
            fill(getattr(message, field.name))
    return message


def spoil(message: Message, path: Path) -> None:
    """The last entry of a field has a value that is not allowed."""
    *outer, last = path
    for field in outer:
        held = getattr(message, field.name)
        message = held[-1] if field.is_repeated else held
    held = getattr(message, last.name)
    if is_map(last):
        if last.message_type.fields_by_name["value"].message_type is None:
            held["last"] = "v" * 300
        else:
            held["last"].tag = ""
    elif last.message_type is None:
        held[-1] = "x" * 200 if last.cpp_type == FieldDescriptor.CPPTYPE_STRING else float("nan")
    else:
        held[-1].Clear()


def inputs_of(
    request: Descriptor, valid: Message, size: int, *, by_json: bool
) -> Iterator[tuple[str, Callable[[], Input]]]:
    """All of a method: names, and what makes each (some have 16 MB)."""
    door = "json" if by_json else "grpc"

    def full(path: Path | None) -> Input:
        message = type(valid)()
        message.CopyFrom(valid)
        fill(message)
        if path is not None:
            spoil(message, path)
        if by_json:
            return Input("", json_format.MessageToJson(message, indent=None).encode()[: size - 64], is_json=True)
        return Input("", message.SerializeToString())

    paths = list(repeated_fields(request))
    for path in paths:
        name = f"{door}:{name_of(path)}"
        if by_json:
            yield f"{name}:flood", lambda path=path: Input("", json_flood(path, size), is_json=True)
        else:
            yield f"{name}:flood", lambda path=path: Input("", flood(path, size - 64))
            if (entry := _entry_bytes(path[-1])) is not None:
                yield f"{name}:many", lambda path=path, entry=entry: Input("", flood(path, size - 64, entry))
        yield f"{name}:full", lambda path=path: full(path)
    if paths:
        yield f"{door}:valid", lambda: full(None)
    if by_json:
        for what, text in _JSON.items():
            yield f"{door}:{what}", lambda text=text: Input("", text(size), is_json=True)
    else:
        for what, one in _once(request).items():
            yield f"{door}:{what}", lambda one=one: Input("", one * ((size - 64) // len(one)))


def _once(request: Descriptor) -> dict[str, bytes]:
    """Fields that are there once, again and again: the last one counts, or they are merged."""
    found = {"unknown": b"\x80\x7d\x01"}
    for field in request.fields:
        if not field.is_repeated:
            if field.message_type is not None:
                found[f"{field.name}:again"] = encoder.TagBytes(field.number, 2) + b"\0"
            elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
                found["text:again"] = encoder.TagBytes(field.number, 2) + b"\0"
    return found


_JSON: dict[str, Callable[[int], bytes]] = {
    "unknown list": lambda size: b'{"x":[' + b"0," * (size // 2 - 64) + b"0]}",
    "unknown objects": lambda size: b'{"x":[' + b"{}," * (size // 3 - 64) + b"{}]}",
    "unknown names": lambda size: b"{" + b"".join(b'"%x":0,' % n for n in range(size // 10)) + b'"x":0}',
    "one name again": lambda size: b"{" + b'"k":0,' * (size // 6 - 64) + b'"k":0}',
    "white space": lambda size: b'{"k":' + b" " * (size - 64) + b"x}",
    "nested": lambda size: b"[" * (size - 64),
    "digits": lambda size: b'{"k":' + b"9" * (size - 64) + b"}",
    "text": lambda size: b'{"userId":"' + b"\\u00e9" * (size // 6 - 64) + b'"}',
    "no JSON": lambda size: b'{"userId":"' + b"\xff" * (size - 64),
}

"""Random inputs with a structure: messages from their descriptors, JSON documents and bytes, each mutated from a valid
one. Everything is drawn from one `random.Random`, so that a seed and a number give one input back.

It knows no target: `hints` of a target say what ids, versions and sizes are valid there.
"""

import copy
import math
import struct
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Hints = Mapping[str, Sequence[Any]]

INTEGERS = [0, 1, 2, 3, -1, 7, 63, 64, 127, 128, 129, 1000, 1001, 10_000, 10_001, 2**15, 2**16, 2**31 - 1, 2**31]
INTEGERS += [-(2**31), 2**32 - 1, 2**48 - 1, 2**48, 2**53, 253402300799, 253402300800, -62135596801, 2**62, 2**63 - 1]
INTEGERS += [-(2**63), 2**64 - 1, 999_999_999, 1_000_000_000, 1_800_000_000]
NUMBERS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.0,
    1 + 1e-9,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    5e-324,
    65504.0,
    1e30,
]
TEXTS = [
    "",
    " ",
    "\0",
    "a",
    "a" * 64,
    "a" * 65,
    "a" * 128,
    "a" * 129,
    "é" * 64,
    "é" * 65,
    "日本語",
    "a\nb",
    "\x7f",
    "\x85",
]
TEXTS += [
    "a" * 256,
    "a" * 257,
    "a" * 512,
    "a" * 513,
    "a" * 1024,
    "a" * 1025,
    "\u202e\u200b\ufeff",
    "👩‍👩‍👧‍👦",
    "\uffff\U0010ffff",
]
TEXTS += ["%s%n{}", "'\"\\;--", "../../etc", "m1/item/x", "*" * 300, "e\u0301" * 40, "ﷺ" * 40, "İıſK", " \t", "null"]
# Put in the place of this text once a message is bytes: lone surrogates and worse, which no valid message can hold.
_UNPAIRED = "unpaired!"
_NO_UTF8 = [b"\xed\xa0\x80" * 3, b"\xff\xfe\xc0\xaf\xf5\x80\x80\x80\xc1", b"abcdefgh\xf0"]
_REPEATED = [1, 2, 2, 3, 65, 129, 1001]
_MANY = 10_001
# Beyond a size like this, an input says nothing new and the campaign becomes slow.
_MAX_BYTES = 4 << 20

_SIGNED = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}
_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def value_for(rng: Random, field: FieldDescriptor, hints: Hints, *, odd: float) -> Any:
    """A scalar for a field: one of the target's hints or, with the probability `odd`, a boundary value."""
    if field.name in hints and rng.random() >= odd:
        return rng.choice(hints[field.name])
    kind = field.cpp_type
    if kind in _SIGNED or kind in _UNSIGNED:
        bits = _SIGNED.get(kind) or _UNSIGNED[kind]
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind in _SIGNED else (0, 2**bits - 1)
        wanted = rng.choice(INTEGERS) if rng.random() < odd else rng.randrange(12)
        return min(max(wanted, least), most)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = [one.number for one in field.enum_type.values]
        return rng.choice([*known, -1, 99, 2**31 - 1]) if rng.random() < odd else rng.choice(known)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(NUMBERS) if rng.random() < odd else round(rng.uniform(0, 5), 3)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 2, 7, 16, 64, 128, 1000)))
    if rng.random() >= odd:
        return rng.choice(("a", "b", "word", "x-1"))
    drawn = rng.random()
    return _UNPAIRED if drawn < 0.05 else "z" * rng.choice((5000, 70_000)) if drawn < 0.07 else rng.choice(TEXTS)


def fill(rng: Random, message: Message, hints: Hints, *, odd: float = 0.0, depth: int = 0) -> Message:
    """Set fields of a message; a hint of a message field gives whole messages. Later fields of a oneof win."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < (0.1 if odd == 0 else 0.4) and field.name not in hints:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(rng, getattr(message, field.name), field, hints, odd)
        elif field.is_repeated:
            _repeat(rng, message, field, hints, rng.choice((0, 1, 2, 3)), odd=odd, depth=depth)
        elif field.message_type is not None:
            if depth < 4:
                part = getattr(message, field.name)
                part.SetInParent()
                if field.name in hints:
                    part.CopyFrom(rng.choice(hints[field.name]))
                else:
                    fill(rng, part, hints, odd=odd, depth=depth + 1)
        else:
            setattr(message, field.name, value_for(rng, field, hints, odd=odd))
    return message


def _repeat(
    rng: Random, message: Message, field: FieldDescriptor, hints: Hints, count: int, *, odd: float, depth: int = 0
) -> None:
    held = getattr(message, field.name)
    for _ in range(min(count, 3)):
        if field.message_type is None:
            held.append(value_for(rng, field, hints, odd=odd))
        elif field.name in hints:
            held.add().CopyFrom(rng.choice(hints[field.name]))
        elif depth < 4:
            fill(rng, held.add(), hints, odd=odd, depth=depth + 1)
    if count > 3 and len(held):
        held.extend([held[0]] * (count - 3))


def _fill_map(rng: Random, held: Any, field: FieldDescriptor, hints: Hints, odd: float) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(rng.choice((0, 1, 2, 33 if odd else 3))):
        name = f"{value_for(rng, key, hints, odd=odd)}{rng.randrange(99)}"
        if value.message_type is None:
            held[name] = value_for(rng, value, hints, odd=odd)
        else:
            fill(rng, held[name], hints, odd=odd)


def mutate(rng: Random, message: Message, hints: Hints) -> None:
    """Change one field somewhere below `message`: cleared, another value, repeated, or filled at random."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    drawn = rng.random()
    if drawn < 0.1:
        message.ClearField(field.name)
    elif is_map:
        _fill_map(rng, getattr(message, field.name), field, hints, 1.0)
    elif field.is_repeated:
        held = getattr(message, field.name)
        if len(held) and drawn < 0.6:
            if field.message_type is not None:
                mutate(rng, rng.choice(held), hints)
            else:
                held[rng.randrange(len(held))] = value_for(rng, field, hints, odd=0.8)
        else:
            count = _MANY if drawn > 0.985 else rng.choice(_REPEATED)
            _repeat(rng, message, field, hints, count, odd=0.4)
    elif field.message_type is not None:
        part = getattr(message, field.name)
        part.SetInParent()
        if drawn < 0.2:
            part.Clear()
        else:
            mutate(rng, part, hints)
    elif field.type == FieldDescriptor.TYPE_BYTES and drawn < 0.8:
        setattr(message, field.name, _mutated_numbers(rng, getattr(message, field.name)))
    else:
        setattr(message, field.name, value_for(rng, field, hints, odd=0.85))


def _mutated_numbers(rng: Random, data: bytes) -> bytes:
    """Packed floats with NaN, infinities or extremes among them, of the same length or not."""
    drawn = rng.random()
    if not data or drawn < 0.2:
        return data + rng.randbytes(rng.choice((1, 2, 16)))
    if drawn < 0.4:
        return data[: rng.randrange(len(data))]
    form = rng.choice(("<e", "<f"))
    value = rng.choice((math.nan, math.inf, -math.inf, 0.0, 60000.0, -3.0, 6e-8))
    size, packed = struct.calcsize(form), struct.pack(form, value)
    if drawn < 0.6:
        return packed * (len(data) // size) + data[: len(data) % size]
    at = rng.randrange(max(1, len(data) // size)) * size
    return (data[:at] + packed + data[at + size :])[: len(data)]


def serialized(rng: Random, message: Message) -> bytes:
    """The bytes of a message; what stands for text that is no UTF-8 is replaced, unknown fields may follow."""
    data = message.SerializeToString()
    if _UNPAIRED.encode() in data:
        data = data.replace(_UNPAIRED.encode(), rng.choice(_NO_UTF8))
    if rng.random() < 0.05:
        # Field 2000 as a varint, 2001 as bytes, and a group, which no proto3 message has.
        data += rng.choice((b"\x80\x7d\x01", b"\x8a\x7d\x03abc", b"\x83\x7d\x84\x7d", b"\x83\x7d"))
    return data


def message_bytes(rng: Random, valid: Message, hints: Hints) -> bytes:
    """A valid message as it is, with fields mutated, with its bytes mutated, or one that was filled at random."""
    drawn = rng.random()
    message = type(valid)()
    message.CopyFrom(valid)
    if drawn < 0.1:
        return message.SerializeToString()
    if drawn < 0.25:
        message.Clear()
        fill(rng, message, hints, odd=rng.choice((0.0, 0.2, 0.6)))
    else:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutate(rng, message, hints)
    data = serialized(rng, message)
    return (mutate_bytes(rng, data) if drawn > 0.8 else data)[:_MAX_BYTES]


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """Flipped bits, other lengths, cut, doubled or foreign parts."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) or 1)
        match rng.randrange(8):
            case 0 | 1 | 2 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
            case 5:
                del changed[at : at + rng.choice((1, 4, 8, 100))]
            case 6:
                number = rng.choice(INTEGERS) & (2**64 - 1)
                width = rng.choice((1, 2, 4, 8))
                changed[at : at + width] = (number & (256**width - 1)).to_bytes(width, rng.choice(("little", "big")))
            case _:
                end = at + rng.choice((1, 8, 64))
                changed[at:at] = changed[at:end]
    return bytes(changed)


def mutate_json(rng: Random, document: Any) -> Any:
    """A copy with one to three nodes replaced, removed, renamed or added."""
    changed = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder = {"": changed}
        _mutate_node(rng, holder)
        changed = holder[""]
    return changed


def _mutate_node(rng: Random, document: dict[str, Any]) -> None:
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [document]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    holder, key = rng.choice(places[1:] or places) if rng.random() < 0.97 else places[0]
    match rng.randrange(6):
        case 0 if len(places) > 1 and holder is not document:
            del holder[key]
        case 1 if isinstance(holder, dict) and holder is not document:
            holder[json_value(rng, keys_only=True)] = holder.pop(key) if rng.random() < 0.5 else json_value(rng)
        case 2 if isinstance(holder, list):
            holder += holder[: rng.choice((1, 5))]
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice(
                (holder[key] + 1, -holder[key], holder[key] * 1000, float(holder[key]), str(holder[key]))
            )
        case 4:
            other = rng.choice(places)
            holder[key] = copy.deepcopy(other[0][other[1]]) if len(str(other)) < 10_000 else None
        case _:
            holder[key] = json_value(rng)


def json_value(rng: Random, *, keys_only: bool = False) -> Any:
    """Any value that JSON can hold; `keys_only`: a string."""
    texts = [*TEXTS[:30], "\ud800", "item-1", "NaN", "-1"]
    if keys_only or rng.random() < 0.25:
        return rng.choice(texts)
    scalars = [
        None,
        True,
        False,
        [],
        {},
        [[]],
        {"a": 1},
        [0],
        ["a"],
        *INTEGERS,
        *NUMBERS,
        10**30,
        "2026-01-31T12:00:00Z",
    ]
    return copy.deepcopy(rng.choice(scalars))

"""Parse JSON requests."""

import json
from collections import Counter
from typing import Any, cast

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from services.platform.errors import InvalidRequest
from services.platform.rpc.request_counts import MAX_FIELDS, RequestCounts

_MAX_DEPTH = 20
_MAX_VALUE, _MAX_ERROR = 80, 600
_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_INT32: "a whole number, 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number, 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number, not negative, 32 bits",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number, not negative, 64 bits",
}


def parse(data: bytes, kind: type[Message], counts: RequestCounts | None = None) -> Message:
    """Check a JSON message's number of entries and parse it. Raises: InvalidRequest with the first invalid field."""
    marks = data.count(b",") + data.count(b"{") + data.count(b"[")
    if marks > MAX_FIELDS:
        raise InvalidRequest(f"JSON: {marks} commas and opening brackets; allowed: at most {MAX_FIELDS}")
    try:
        document = json.loads(data or b"{}", object_pairs_hook=_object)
        if counts is not None:
            counts.check_json(document)
    except (ValueError, RecursionError) as exc:
        raise _refused(str(exc)) from exc
    try:
        return json_format.ParseDict(document, kind(), max_recursion_depth=_MAX_DEPTH)
    # upb raises SystemError for a name with half of a surrogate pair.
    except (json_format.ParseError, RecursionError, SystemError) as exc:
        raise _refused(_first_wrong(document, kind) or str(exc)) from exc


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"the name {names.most_common(1)[0][0]!r:.80} occurs twice")
    return found


def _refused(wrong: str) -> InvalidRequest:
    # An answer cannot contain half of a surrogate pair.
    return InvalidRequest(f"JSON: {wrong[:_MAX_ERROR].encode(errors='backslashreplace').decode()}")


def _first_wrong(document: Any, kind: type[Message]) -> str:
    try:
        return _wrong_in(document, cast(Descriptor, kind.DESCRIPTOR), "")
    except (ValueError, RecursionError):
        return ""


def _wrong_in(given: Any, message: Descriptor, path: str) -> str:
    if not isinstance(given, dict):
        return f"{path and path + '='}{_short(given)} allowed: an object"
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    for name, value in given.items():
        inside = f"{path}.{name}" if path else name
        if (field := fields.get(name)) is None:
            allowed = ", ".join(one.json_name for one in message.fields)
            return f"{inside}={_short(value)} is no field of {message.name}; allowed: {allowed}"
        if not _is_refused(message, name, value):
            continue
        if not field.is_repeated or _is_map(field):
            return _wrong_value(field, value, inside)
        if not isinstance(value, list):
            return f"{inside}={_short(value)} allowed: a list"
        for place, one in enumerate(value):
            if _is_refused(message, name, [one]):
                return _wrong_value(field, one, f"{inside}[{place}]")
    return ""


def _wrong_value(field: FieldDescriptor, value: Any, path: str) -> str:
    inner = field.message_type
    if inner is not None and inner.file.package != "google.protobuf" and not _is_map(field):
        return _wrong_in(value, inner, path)
    return f"{path}={_short(value)} allowed: {_allowed(field)}"


def _allowed(field: FieldDescriptor) -> str:
    inner = field.message_type
    if inner is not None and _is_map(field):
        return "an object whose values are each " + _allowed(inner.fields_by_name["value"])
    if field.enum_type is not None:
        return "one of " + ", ".join(value.name for value in field.enum_type.values)
    if inner is not None:
        return "a time like 2026-01-31T12:00:00Z" if inner.name == "Timestamp" else "an object"
    is_bytes = field.type == FieldDescriptor.TYPE_BYTES
    return _KINDS.get(field.cpp_type, "bytes in base64" if is_bytes else "a string")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_refused(message: Descriptor, name: str, value: Any) -> bool:
    try:
        json_format.ParseDict({name: value}, message_factory.GetMessageClass(message)(), max_recursion_depth=_MAX_DEPTH)
    except json_format.ParseError:
        return True
    return False


def _short(value: Any) -> str:
    text = ""
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += part
        if len(text) > _MAX_VALUE:
            return f"{text[:_MAX_VALUE]}…"
    return text

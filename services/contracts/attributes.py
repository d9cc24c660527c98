"""Attributes of items, and conditions on them, as Protobuf and plain values.

A value's type is its kind: float a number, int a time in Unix milliseconds, str a tag. `algorithms.rules.attributes`
evaluates conditions.
"""

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from freshet.v1 import common_pb2

from services.platform.errors import InvalidRequest
from services.platform.stream.records import MOST_MS, read_ms, set_ms
from services.platform.validation import MAX_ID_BYTES, validate_text

Value = float | int | str
KINDS: dict[type, str] = {float: "number", int: "time", str: "tag"}
# Protobuf number -> text, a value of `algorithms.rules.attributes.Comparison`.
COMPARISONS = {
    number: name.removeprefix("COMPARISON_").replace("_", " ").lower()
    for name, number in common_pb2.AttributeCondition.Comparison.items()
    if number
}
_NUMBERS: dict[str, Any] = {text: number for number, text in COMPARISONS.items()}

# name, comparison, values
ParsedCondition = tuple[str, str, tuple[Value, ...]]


def read_value(message: Any, name: str) -> Value:
    """Return an AttributeValue's value. Raises: InvalidRequest for an absent value or invalid time."""
    match message.WhichOneof("value"):
        case "number":
            return float(message.number)
        case "time":
            return read_ms(message.time, f"{name}.time")
        case "tag":
            return str(message.tag)
    raise InvalidRequest.of(name, "no value", "a number, a time or a tag")


def set_value(message: Any, value: Value) -> None:
    if isinstance(value, str):
        message.tag = value
    elif isinstance(value, float):
        message.number = value
    else:
        set_ms(message.time, value)


def validate_value(name: str, value: Value) -> None:
    """Raise InvalidRequest for NaN, infinity, other types, and a tag that is not 1-128 bytes of UTF-8."""
    if type(value) not in KINDS:
        raise InvalidRequest.of(name, type(value).__name__, "a number, a time or a tag")
    if isinstance(value, str):
        validate_text(name, value, 1, MAX_ID_BYTES)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest.of(name, value, "a finite number")
    elif isinstance(value, int) and value > MOST_MS:
        raise InvalidRequest.of(name, value, f"at most {MOST_MS} ms: year 9999")


def condition_message(name: str, comparison: str, values: Iterable[Value]) -> Any:
    message = common_pb2.AttributeCondition(name=name, comparison=_NUMBERS[comparison])
    for value in values:
        set_value(message.values.add(), value)
    return message


_NAME = r"([A-Za-z_][A-Za-z0-9_]*)"
_PRESENCE = re.compile(rf"\s*has\s+(no\s+)?{_NAME}\s*")
_ORDERED = re.compile(rf"\s*{_NAME}\s*(<=|>=|<|>|=)\s*([^\s<>=].*?)\s*")
_LISTED = re.compile(rf"\s*{_NAME}\s+(not\s+)?in\s+(.+?)\s*")
_COMPARISONS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above", "=": "one of"}
_SYMBOLS = {one: symbol for symbol, one in _COMPARISONS.items()} | {"one of": " in ", "none of": " not in "}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[-+]\d\d:\d\d)?)?")
_VALUES = re.compile(r'\s*("[^"]*"|[^",]+?)\s*(,|$)')
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALLOWED = "e.g. price<=20, released>=2026-01-01, language in en,de, language not in fr, has price, has no price"


def parse_condition(text: str) -> ParsedCondition:
    """Return name, comparison and values. Raises: InvalidRequest."""
    if match := _PRESENCE.fullmatch(text):
        return match[2], "absent" if match[1] else "present", ()
    if match := _ORDERED.fullmatch(text):
        return match[1], _COMPARISONS[match[2]], (parse_value(match[3]),)
    if match := _LISTED.fullmatch(text):
        return match[1], "none of" if match[2] else "one of", _values(match[3], text)
    raise InvalidRequest.of("condition", text[:200], _ALLOWED)


def parse_value(text: str) -> Value:
    """Return a number, Unix milliseconds (UTC by default), or a tag. Raises: InvalidRequest for an invalid date."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _TIME.fullmatch(text):
        return text
    try:
        time = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidRequest.of("time", text, f"a date of the calendar ({exc}); a tag in double quotes") from exc
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)


def condition_text(name: str, comparison: str, values: Iterable[Value]) -> str:
    """Return the text that `parse_condition` reads. Tags must not contain double quotes."""
    if comparison in ("present", "absent"):
        return f"has {'no ' if comparison == 'absent' else ''}{name}"
    texts = [
        f'"{one}"'
        if isinstance(one, str)
        else repr(one)
        if isinstance(one, float)
        else (_EPOCH + timedelta(milliseconds=one)).isoformat()
        for one in values
    ]
    return f"{name}{_SYMBOLS[comparison]}{','.join(texts)}"


def _values(text: str, condition: str) -> tuple[Value, ...]:
    values, start = [], 0
    while match := _VALUES.match(text, start):
        values.append(parse_value(match[1]))
        start = match.end()
        if not match[2]:
            return tuple(values)
    raise InvalidRequest.of("condition", condition[:200], _ALLOWED)

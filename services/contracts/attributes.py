"""Attributes of items, and conditions on them, as Protobuf and plain values.

A value's type is its kind: float a number, int a time in Unix milliseconds, str a tag. `algorithms.rules.attributes`
evaluates conditions.
"""

import math
from collections.abc import Iterable
from typing import Any

from freshet.v1 import common_pb2

from services.platform.errors import InvalidRequest
from services.platform.stream.records import MOST_MS, read_ms, set_ms
from services.platform.validation import MAX_ID_BYTES, validate_text

Value = float | int | str
KINDS: dict[type, str] = {float: "number", int: "time", str: "tag"}
# By number; the texts are the names of `Comparison` values.
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

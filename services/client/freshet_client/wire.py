"""Converts Protobuf messages to plain values and back, by field name; fields that a dataclass lacks are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from functools import cache, partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.timestamp_pb2 import Timestamp

from freshet_client import answers, described, requests
from freshet_client.errors import InvalidArgument

T = TypeVar("T")

# Messages whose dataclass has another name.
_CLASSES: dict[str, Any] = {
    "InteractionReceipt": answers.Receipt,
    "RecommendResponse": answers.Recommendation,
    "GatewayServiceSearchResponse": answers.SearchAnswer,
    "GatewayServiceSimilarResponse": answers.SimilarAnswer,
    "ExplainResponse": answers.Explanation,
    "ExplainScoreResponse": answers.ExplainedSimilarity,
    "ExplainVotesResponse": answers.ExplainedVotes,
    "ForgetUserResponse": answers.ForgetReport,
    "GetFreshnessResponse": answers.FreshnessReport,
    "DescribeCatalogueResponse": described.CatalogueDescription,
    "GetItemResponse": described.ItemReport,
    "GetUserResponse": described.UserReport,
    "ListExposuresResponse": described.ShownAnswers,
    "GetHealthResponse": described.HealthReport,
    "ListDeadLettersResponse": described.DeadLetterList,
    "ReplayDeadLetterResponse": described.ReplayedLetter,
    "ListItemsResponse": described.ItemPage,
    "TailInteractionsResponse": described.TailedInteractions,
    "AttributeCondition": requests.Condition,
    "ChangeVersionSetResponse": described.Changed,
    "GetVersionSetsResponse": described.VersionSets,
    "ListRulesResponse": described.StandingRules,
    "PutRulesResponse": described.Changed,
}
_WHOLE = {
    FieldDescriptor.TYPE_UINT32: "a whole number, 0 to 4294967295",
    FieldDescriptor.TYPE_INT32: "a whole number, -2147483648 to 2147483647",
    FieldDescriptor.TYPE_INT64: "a whole number of 64 bits",
}


def read(message: Any, cls: Any = None) -> Any:
    """An answer's plain value; absent optional fields are None."""
    descriptor = message.DESCRIPTOR
    cls = cls or _class_of(descriptor.name)
    return cls(**{name: value_of(message) for name, value_of in _plan(cls, descriptor)})


@cache
def _class_of(name: str) -> Any:
    found = _CLASSES.get(name)
    for one in (answers, described, requests):
        found = found or vars(one).get(name)
    if found is None:
        raise TypeError(f"freshet_client has no class for the message {name}")
    return found


@cache
def _plan(cls: Any, descriptor: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(one.name, _reader(one.name, descriptor)) for one in fields(cls)]


def _reader(name: str, descriptor: Any) -> Callable[[Any], Any]:
    if name == "provenance":
        return lambda message: read(message, answers.Provenance)
    field = descriptor.fields_by_name[name]
    convert = _converter(field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_entry = _converter(field.message_type.fields_by_name["value"])
        return lambda message: {key: of_entry(value) for key, value in getattr(message, name).items()}
    if field.is_repeated:
        return lambda message: tuple(convert(value) for value in getattr(message, name))
    if field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _converter(field: Any) -> Callable[[Any], Any]:
    if field.enum_type is not None:
        return lambda number: enum_name(field.enum_type, number)
    if field.message_type is None:
        return lambda value: value
    if field.message_type.full_name == Timestamp.DESCRIPTOR.full_name:
        return lambda value: value.ToDatetime(tzinfo=timezone.utc)
    if field.message_type.name == "AttributeValue":
        return _attribute_value
    return read


def _attribute_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return value.time.ToDatetime(tzinfo=timezone.utc) if kind == "time" else getattr(value, kind) if kind else None


def enum_name(enum: Any, number: int) -> str:
    """The value's lower-case name without the enum's prefix; "degradation_99" if unknown."""
    prefix = f"{enum.name.upper()}_"
    known = enum.values_by_number.get(number)
    return known.name[len(prefix) :].lower() if known is not None else f"{prefix.lower()}{number}"


def write(message: T, values: Any, path: str = "") -> T:
    """Fill and return a request; None leaves a field absent.

    Raises: InvalidArgument naming the field, its value and what is allowed.
    """
    named = {one.name: getattr(values, one.name) for one in fields(values)} if is_dataclass(values) else values
    descriptor: Any = message.DESCRIPTOR  # type: ignore[attr-defined]
    for name, value in named.items():
        if value is not None:
            _set(message, descriptor.fields_by_name[name], value, path + name)
    return message


def _set(message: Any, field: Any, value: Any, path: str) -> None:
    kind = field.message_type
    if kind is None and not field.is_repeated:
        _set_scalar(message, field, value, path)
    elif kind is not None and kind.GetOptions().map_entry:
        _set_map(message, field, value, path)
    elif field.is_repeated:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            raise InvalidArgument.of(path, value, "a sequence")
        target = getattr(message, field.name)
        for position, one in enumerate(value):
            if kind is not None:
                _fill(target.add(), one, f"{path}[{position}]")
            else:
                _attempt(target.append, one, f"{path}[{position}]", _allowed(field))
    else:
        # A nested message without fields is still set.
        part = getattr(message, field.name)
        part.SetInParent()
        _fill(part, value, path)


def _set_scalar(message: Any, field: Any, value: Any, path: str) -> None:
    if field.enum_type is not None:
        number = field.enum_type.values_by_name.get(f"{field.enum_type.name}_{value}".upper())
        if number is None:
            names = [enum_name(field.enum_type, one) for one in field.enum_type.values_by_number if one]
            raise InvalidArgument.of(path, value, ", ".join(names))
        value = number.number
    _attempt(partial(setattr, message, field.name), value, path, _allowed(field))


def _set_map(message: Any, field: Any, value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgument.of(path, value, "a mapping")
    target, of_messages = getattr(message, field.name), field.message_type.fields_by_name["value"].message_type
    for key, one in value.items():
        if of_messages is not None:
            _fill(target[key], one, f"{path}[{key!r}]")
        else:
            _attempt(partial(target.__setitem__, key), one, f"{path}[{key!r}]", "text to text")


def _fill(part: Any, value: Any, path: str) -> None:
    name = part.DESCRIPTOR.name
    if name == "Timestamp":
        _attempt(part.FromDatetime, value, path, "a datetime")
    elif name == "AttributeValue":
        kind = "tag" if isinstance(value, str) else "number"
        act = part.time.FromDatetime if isinstance(value, datetime) else partial(setattr, part, kind)
        _attempt(act, value, path, "a number, a datetime or a tag")
    elif is_dataclass(value):
        write(part, value, f"{path}.")
    else:
        raise InvalidArgument.of(path, value, f"a {name}")


def _attempt(act: Callable[[Any], Any], value: Any, path: str, allowed: str) -> None:
    try:
        act(value)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise InvalidArgument.of(path, value, allowed) from None


def _allowed(field: Any) -> str:
    """A scalar field's allowed values."""
    if field.type in _WHOLE:
        return _WHOLE[field.type]
    return {field.TYPE_STRING: "text, UTF-8", field.TYPE_BOOL: "True or False"}.get(field.type, "a number")

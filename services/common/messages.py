"""Dataclasses to Protobuf messages by their field names, for answers whose fields are named alike on both sides."""

from typing import Any, TypeVar

from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)


def message_of(kind: type[_M], record: Any, **others: Any) -> _M:
    """A message whose fields are the attributes of `record` of the same name; `others` come in place of them."""
    names = (one.name for one in kind.DESCRIPTOR.fields if one.name not in others)
    return kind(**{name: getattr(record, name) for name in names if hasattr(record, name)}, **others)

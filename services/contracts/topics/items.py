"""The topic `items`: catalogue metadata.

The gateway writes it; readers validate with the same rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from freshet.v1 import events_pb2

from services.contracts.attributes import KINDS, Value, read_value, set_value, validate_value
from services.platform.errors import InvalidRequest
from services.platform.stream.records import check_key, parse
from services.platform.stream.topic import COMPACTED, Topic
from services.platform.validation import validate_id, validate_text

ITEMS = "items"
TOPIC = Topic(name=ITEMS, num_partitions=1, settings=COMPACTED, has_dead_letters=True)

MAX_TITLE_BYTES = 512
MAX_CATEGORIES = 64
MAX_CATEGORY_BYTES = 128
MAX_ATTRIBUTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueItem:
    """An item from its newest record.

    available: False means that answers omit the item, but its state stays. withdrawn: answers omit the item until a new
    record puts it back.
    """

    item_id: str
    title: str = ""
    categories: tuple[str, ...] = ()
    attributes: Mapping[str, Value] = field(default_factory=dict)
    available: bool = True
    withdrawn: bool = False
    # Attributes that this bundle does not declare; another model's bundle may.
    undeclared: Mapping[str, Value] = field(default_factory=dict, compare=False)
    # The record's Unix milliseconds and offset, if the reader sets them.
    written_ms: int = field(default=0, compare=False)
    offset: int = field(default=-1, compare=False)

    @property
    def is_served(self) -> bool:
        return self.available and not self.withdrawn


def validate_item(item: CatalogueItem) -> None:
    """Raise InvalidRequest for a field beyond its limit, or a text not in UTF-8."""
    validate_id("item_id", item.item_id)
    validate_text("title", item.title, 0, MAX_TITLE_BYTES)
    if len(item.categories) > MAX_CATEGORIES:
        raise InvalidRequest.of("categories", f"{len(item.categories)} of them", f"at most {MAX_CATEGORIES}")
    for name in item.categories:
        validate_text("categories", name, 1, MAX_CATEGORY_BYTES)
    if (count := len(item.attributes.keys() | item.undeclared.keys())) > MAX_ATTRIBUTES:
        raise InvalidRequest.of("attributes", f"{count} of them", f"at most {MAX_ATTRIBUTES}")
    for name, value in item.attributes.items():
        validate_value(f"attributes[{name[:64]!r}]", value)


def check_kinds(item: CatalogueItem, kinds: Mapping[str, str], *, unknown: bool) -> None:
    """Raise InvalidRequest if an attribute's kind is not the declared one. unknown: also reject undeclared ones."""
    for name, value in item.attributes.items():
        declared, found = kinds.get(name), KINDS[type(value)]
        if declared is None and unknown:
            allowed = ", ".join(f"{one} ({kind})" for one, kind in kinds.items())
            raise InvalidRequest.of("attributes", name[:64], allowed or "none, the bundle declares no attribute")
        if declared is not None and found != declared:
            raise InvalidRequest.of(f"attributes[{name[:64]!r}]", f"a {found} ({value!r:.80})", f"a {declared}")


def item_from_message(message: events_pb2.Item) -> CatalogueItem:
    """Return a message's dataclass, checking only that attributes have values. Raises: InvalidRequest."""
    return CatalogueItem(
        item_id=message.item_id,
        title=message.title,
        categories=tuple(message.categories),
        attributes={
            name: read_value(value, f"attributes[{name[:64]!r}]") for name, value in message.attributes.items()
        },
        available=message.available if message.HasField("available") else True,
        withdrawn=message.withdrawn,
    )


def encode_item(item: CatalogueItem) -> bytes:
    """Return a record's value; its key is the item id."""
    message = events_pb2.Item(
        item_id=item.item_id, title=item.title, categories=item.categories, withdrawn=item.withdrawn
    )
    if not item.available:
        message.available = False
    for name, one in ({**item.undeclared, **item.attributes}).items():
        set_value(message.attributes[name], one)
    return message.SerializeToString()


def decode_item(
    key: bytes | None, value: bytes | None, kinds: Mapping[str, str] = MappingProxyType({})
) -> CatalogueItem:
    """Decode and validate a record. Raises: InvalidRequest with the field.

    Attributes not in `kinds` become `undeclared`.
    """
    item = item_from_message(parse(events_pb2.Item, value))
    validate_item(item)
    check_kinds(item, kinds, unknown=False)
    check_key(key, item.item_id.encode(), "the record's item_id")
    if others := {name: value for name, value in item.attributes.items() if name not in kinds}:
        declared = {name: value for name, value in item.attributes.items() if name in kinds}
        item = replace(item, attributes=declared, undeclared=others)
    return item

"""The topic `items`: catalogue metadata, its limits, and how it is written and read.

The gateway checks and encodes, the refresher, candidates and the reranker decode and check again with the same rules.
Whatever is wrong is an InvalidRequest naming the field and what is allowed. It knows nothing of item states.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from freshet.v1 import events_pb2

from services.contracts.attributes import KINDS, Value, read_value, set_value, validate_value
from services.platform.errors import InvalidRequest
from services.platform.stream.topic import COMPACTED, Topic, check_key, parse
from services.platform.validation import validate_id, validate_text

ITEMS = "items"
TOPIC = Topic(name=ITEMS, num_partitions=1, settings=COMPACTED, has_dead_letters=True)

MAX_TITLE_BYTES = 512
MAX_CATEGORIES = 64
MAX_CATEGORY_BYTES = 128
MAX_ATTRIBUTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueItem:
    """An item as its newest record describes it, whole.

    available: False keeps its state and leaves it out of answers; withdrawn does, too, until it is put again.
    """

    item_id: str
    title: str = ""
    categories: tuple[str, ...] = ()
    attributes: Mapping[str, Value] = field(default_factory=dict)
    available: bool = True
    withdrawn: bool = False
    # When the record was written, Unix milliseconds, where a reader of the topic says so.
    written_ms: int = field(default=0, compare=False)

    @property
    def is_served(self) -> bool:
        """Whether it may be answered."""
        return self.available and not self.withdrawn


def validate_item(item: CatalogueItem) -> None:
    """Raise InvalidRequest, naming the field, for ids and texts beyond their limits or not UTF-8."""
    validate_id("item_id", item.item_id)
    validate_text("title", item.title, 0, MAX_TITLE_BYTES)
    if len(item.categories) > MAX_CATEGORIES:
        raise InvalidRequest.of("categories", f"{len(item.categories)} of them", f"at most {MAX_CATEGORIES}")
    for name in item.categories:
        validate_text("categories", name, 1, MAX_CATEGORY_BYTES)
    if len(item.attributes) > MAX_ATTRIBUTES:
        raise InvalidRequest.of("attributes", f"{len(item.attributes)} of them", f"at most {MAX_ATTRIBUTES}")
    for name, value in item.attributes.items():
        validate_value(f"attributes[{name[:64]!r}]", value)


def check_kinds(item: CatalogueItem, kinds: Mapping[str, str], *, unknown: bool) -> None:
    """Raise InvalidRequest, naming the attribute, for one of another kind than declared; for `unknown` ones, too."""
    for name, value in item.attributes.items():
        declared, found = kinds.get(name), KINDS[type(value)]
        if declared is None and unknown:
            allowed = ", ".join(f"{one} ({kind})" for one, kind in kinds.items())
            raise InvalidRequest.of("attributes", name[:64], allowed or "none, the bundle declares no attribute")
        if declared is not None and found != declared:
            raise InvalidRequest.of(f"attributes[{name[:64]!r}]", f"a {found} ({value!r:.80})", f"a {declared}")


def item_from_message(message: events_pb2.Item) -> CatalogueItem:
    """The dataclass of a Protobuf message, unchecked but for attributes without a value. Raises: InvalidRequest."""
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
    """The value of a record; its key is the item id."""
    message = events_pb2.Item(
        item_id=item.item_id, title=item.title, categories=item.categories, withdrawn=item.withdrawn
    )
    if not item.available:
        message.available = False
    for name, one in item.attributes.items():
        set_value(message.attributes[name], one)
    value: bytes = message.SerializeToString()
    return value


def decode_item(
    key: bytes | None, value: bytes | None, kinds: Mapping[str, str] = MappingProxyType({})
) -> CatalogueItem:
    """Read and check a record. Raises: InvalidRequest naming the field.

    Attributes that are not in `kinds` are left out: the bundle of another model, served beside this one, may declare
    them.
    """
    item = item_from_message(parse(events_pb2.Item, value))
    validate_item(item)
    check_kinds(item, kinds, unknown=False)
    check_key(key, item.item_id.encode(), "the record's item_id")
    if any(name not in kinds for name in item.attributes):
        item = replace(item, attributes={name: value for name, value in item.attributes.items() if name in kinds})
    return item

"""Catalogue metadata on the topic `items`: its limits, and how a record is written and read.

The gateway checks and encodes, the refresher, candidates and the reranker decode and check again with the same rules.
Whatever is wrong is an InvalidRequest naming the field and what is allowed. It knows nothing of item states.
"""

from dataclasses import dataclass

from freshet.v1 import events_pb2
from google.protobuf.message import DecodeError

from services.common.errors import InvalidRequest
from services.common.events import validate_id

MAX_TITLE_BYTES = 512
MAX_CATEGORIES = 64
MAX_CATEGORY_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueItem:
    """An item as its newest record describes it, whole.

    available: False keeps its state and leaves it out of answers; withdrawn does, too, until it is put again.
    """

    item_id: str
    title: str = ""
    categories: tuple[str, ...] = ()
    available: bool = True
    withdrawn: bool = False

    @property
    def is_served(self) -> bool:
        """Whether it may be answered."""
        return self.available and not self.withdrawn


def validate_item(item: CatalogueItem) -> None:
    """Raise InvalidRequest, naming the field, for ids and texts beyond their limits or not UTF-8."""
    validate_id("item_id", item.item_id)
    _check_text("title", item.title, 0, MAX_TITLE_BYTES)
    if len(item.categories) > MAX_CATEGORIES:
        raise InvalidRequest.of("categories", f"{len(item.categories)} of them", f"at most {MAX_CATEGORIES}")
    for name in item.categories:
        _check_text("categories", name, 1, MAX_CATEGORY_BYTES)


def item_from_message(message: events_pb2.Item) -> CatalogueItem:
    """The dataclass of a Protobuf message, unchecked."""
    return CatalogueItem(
        item_id=message.item_id,
        title=message.title,
        categories=tuple(message.categories),
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
    value: bytes = message.SerializeToString()
    return value


def decode_item(key: bytes | None, value: bytes | None) -> CatalogueItem:
    """Read and check a record. Raises: InvalidRequest naming the field."""
    if not value:
        raise InvalidRequest.of("value", "no bytes", "an Item")
    try:
        message = events_pb2.Item.FromString(value)
    except DecodeError as exc:
        raise InvalidRequest.of("value", f"{len(value)} unreadable bytes", "a whole Item message") from exc
    item = item_from_message(message)
    validate_item(item)
    if key != item.item_id.encode():
        raise InvalidRequest.of("key", "absent" if key is None else f"{len(key)} other bytes", "the record's item_id")
    return item


def _check_text(name: str, text: str, least: int, most: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidRequest.of(name, "text that is not UTF-8", "UTF-8") from exc
    if not least <= size <= most:
        raise InvalidRequest.of(name, f"text of {size} bytes", f"{least}-{most} bytes of UTF-8")

"""A batch of items for a mutable index, validated before any change.

Errors name the item and the value, since one bad row rejects the batch. An item whose component is zero lacks that
component.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.ids import MAX_ID_BYTES, ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.scoring.states import ItemStates


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemBatch:
    """n items. `ItemIds` and `Categories` are not copied.

    categories, attributes: one per item. With None, known items keep their values and new items have no values; a
    stream of refreshed states uses None.
    """

    item_ids: Collection[str]
    states: ItemStates
    categories: Sequence[Sequence[str]] | None = None
    attributes: AttributeTable | None = None

    def __post_init__(self) -> None:
        """Raise ValueError as `check_ids`, and for columns of unequal length."""
        if isinstance(self.item_ids, ItemIds):
            self.item_ids.check("item_ids")
        else:
            check_ids("item_ids", self.item_ids)
        if len(self.item_ids) != len(self.states):
            raise ValueError(f"{len(self.item_ids)} item ids but states of {len(self.states)} items")
        if self.categories is not None and len(self.categories) != len(self.item_ids):
            raise ValueError(f"{len(self.item_ids)} item ids but categories of {len(self.categories)} items")
        if self.attributes is not None and self.attributes.num_items != len(self.item_ids):
            raise ValueError(f"{len(self.item_ids)} item ids but attributes of {self.attributes.num_items} items")

    def __len__(self) -> int:
        return len(self.item_ids)

    @property
    def ids(self) -> ItemIds:
        """The ids as an `ItemIds` column."""
        return self.item_ids if isinstance(self.item_ids, ItemIds) else ItemIds(Strings.of(self.item_ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A batch's result: the new version and the numbers of changed items. unknown: ids that the batch removes but the
    index lacks.
    """

    version: str
    added: int = 0
    updated: int = 0
    removed: int = 0
    unknown: tuple[str, ...] = field(default=())


def check_ids(name: str, item_ids: Collection[str]) -> None:
    """Raise ValueError with the id unless all are distinct and 1-128 bytes of UTF-8."""
    for item_id in item_ids:
        try:
            size = len(item_id) if item_id.isascii() else len(item_id.encode())
        except UnicodeEncodeError as exc:
            raise ValueError(f"{name} holds {item_id!r}, which is not UTF-8") from exc
        if not 1 <= size <= MAX_ID_BYTES:
            raise ValueError(f"{name} holds {item_id!r} of {size} bytes; allowed: 1-{MAX_ID_BYTES}")
    if len(set(item_ids)) != len(item_ids):
        seen: set[str] = set()
        repeated = next(item_id for item_id in item_ids if item_id in seen or seen.add(item_id))  # type: ignore[func-returns-value]
        raise ValueError(f"{name} holds {repeated!r} more than once; a batch names each item once")

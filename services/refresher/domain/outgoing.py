"""What a partition has published, and what it has to publish."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outgoing:
    """dirty_items: items to publish; True if something was subtracted since the last publication. dirty_entries: memory
    entries to publish. published: the published items, in order. dropped: keys of `index-deltas` that the last batch
    dropped. quiet_until: nothing is published below this offset, because an earlier process may have published up to
    it, and readers must not see an item go back.
    """

    dirty_items: dict[str, bool] = field(default_factory=dict)
    dirty_entries: set[str] = field(default_factory=set)
    published: dict[str, None] = field(default_factory=dict)
    dropped: list[bytes] = field(default_factory=list)
    quiet_until: int = -1

    @property
    def num_changes(self) -> int:
        """Items and entries to publish."""
        return len(self.dirty_items) + len(self.dirty_entries)

    def touch(self, item_id: str, *, removed: bool = False) -> None:
        """Mark an item as changed. removed: something was subtracted."""
        self.dirty_items[item_id] = removed or self.dirty_items.get(item_id, False)

    def touch_all(self, item_ids: Iterable[str]) -> None:
        """Mark items as changed by additions."""
        for item_id in item_ids:
            self.dirty_items.setdefault(item_id, False)

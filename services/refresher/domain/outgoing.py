"""What readers hold of one partition, and what they are still to be told."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outgoing:
    """dirty_items: what has to be published again, True where something was taken out of it since. dirty_entries:
    likewise of the memory. published: the model weight of each item state that readers hold from here. dropped: keys of
    `index-deltas` that the last batch dropped. quiet_until: an earlier life may have published up to this offset; below
    it nothing is published, so that readers never see an item go back. to_sweep: published items that the sweep at hand
    has not looked at yet.
    """

    dirty_items: dict[str, bool] = field(default_factory=dict)
    dirty_entries: set[str] = field(default_factory=set)
    published: dict[str, float] = field(default_factory=dict)
    dropped: list[bytes] = field(default_factory=list)
    quiet_until: int = -1
    to_sweep: list[str] = field(default_factory=list)

    @property
    def num_changes(self) -> int:
        """Items and entries that are still to be published."""
        return len(self.dirty_items) + len(self.dirty_entries)

    def touch(self, item_id: str, *, removed: bool = False) -> None:
        """An item has changed; removed: something was taken out of it."""
        self.dirty_items[item_id] = removed or self.dirty_items.get(item_id, False)

    def touch_all(self, item_ids: Iterable[str]) -> None:
        """These items have changed, by additions alone."""
        for item_id in item_ids:
            self.dirty_items.setdefault(item_id, False)

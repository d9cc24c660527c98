"""The memory of one partition, and the entries to publish."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from services.algorithms.pefa.memory import MemoryEntry, QueryMemory
from services.platform.stream.records import unpack_position
from services.refresher.domain.records import Interaction
from services.refresher.domain.rules import Rules


def entry_id_of(source_position: int) -> str:
    partition, offset = unpack_position(source_position)
    return f"{partition}-{offset}"


class Remembered:
    """A partition's memory. Methods that change it return the ids of entries that may have changed for readers.

    `visible` has the memory's entries to publish.
    """

    def __init__(self, rules: Rules) -> None:
        items = rules.items
        self._leave_out = items.leave_out
        self.memory = QueryMemory(
            capacity=rules.max_remembered, num_components=items.num_query_components, width=items.width
        )
        self.visible: dict[str, MemoryEntry] = {}
        # The sum of every visible entry's hash; the memory's digest would read them all.
        self._mix = 0

    def digest(self) -> bytes:
        return (self._mix % (1 << 128)).to_bytes(16, "little")

    def add(self, interactions: Sequence[Interaction], weights: Sequence[float]) -> set[str]:
        """Offer interactions with a nonzero weight to the memory."""
        offered = [
            self._entry(interaction, weight)
            for interaction, weight in zip(interactions, weights, strict=True)
            if weight and self.memory.admits(entry_id_of(interaction.source_position))
        ]
        self.memory.add(offered)
        # Include entries that were evicted at once, because with other batch boundaries readers may have seen them.
        return {entry.entry_id for entry in offered} | self._follow()

    def leave(self, positions: Iterable[int]) -> set[str]:
        entry_ids = [entry_id_of(position) for position in positions]
        stored = {entry_id for entry_id in entry_ids if entry_id in self.memory}
        self.memory.remove(entry_ids)
        return stored | self._follow()

    @property
    def refill_size(self) -> int:
        """The number of interactions for a refill. One more than fits shows that others were left out."""
        return self.memory.capacity + self.memory.reserve + 1 - len(self.memory)

    def refill(self, interactions: Sequence[Interaction], weights: Sequence[float]) -> set[str]:
        self.memory.refill(
            self._entry(one, weight) for one, weight in zip(interactions, weights, strict=True) if weight
        )
        return self._follow()

    def replace(self, memory: QueryMemory) -> None:
        """Replace the memory; all its entries are visible."""
        self.memory = memory
        self.visible = {entry.entry_id: entry for entry in memory}
        self._mix = sum(map(_hash_entry, self.visible.values()))

    def _follow(self) -> set[str]:
        changes = self.memory.take_changes()
        for entry in changes.entered:
            self.visible[entry.entry_id] = entry
            self._mix += _hash_entry(entry)
        for entry_id in changes.left:
            self._mix -= _hash_entry(self.visible.pop(entry_id))
        return {entry.entry_id for entry in changes.entered} | set(changes.left)

    def _entry(self, interaction: Interaction, weight: float) -> MemoryEntry:
        query, leave_out = interaction.query, self._leave_out
        components = np.frombuffer(query.components, "<f2").reshape(query.num_components, query.component_width)
        if leave_out is not None:
            # Entries leave this process; this component identifies the user.
            components = components.copy()
            components[leave_out] = 0
        return MemoryEntry(
            entry_id=entry_id_of(interaction.source_position),
            item_id=interaction.item_id,
            components=components,
            weight=weight,
            interaction_type=interaction.type,
            event_seconds=interaction.moment_ms // 1000,
        )


def _hash_entry(entry: MemoryEntry) -> int:
    names = f"{entry.entry_id}\0{entry.item_id}\0{entry.interaction_type}\0"
    numbers = f"{entry.weight!r}\0{entry.event_seconds}\0"
    digest = hashlib.blake2b((names + numbers).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(entry.components, "<f2").data)
    return int.from_bytes(digest.digest(), "little")

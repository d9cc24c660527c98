"""The folded state of one partition of `attributions`: sums, memory, ledger, and unpublished changes.

It depends only on the records up to `folded_offset` and the known items, which are in the bundle or listed.
Interactions of unknown items are stored as offsets, and folded once the item is listed. Nothing here blocks.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from threading import Lock
from zlib import crc32

import numpy as np

from services.algorithms.pefa.memory import hash_of
from services.algorithms.pefa.policy import NEW_ITEM_SHARE, SharePolicy
from services.algorithms.pefa.share_choice import new_item_share_from_sums
from services.algorithms.pefa.sums import ItemSums
from services.refresher.domain.ledger import NO_ITEM, Ledger, Standing
from services.refresher.domain.pending import Pending
from services.refresher.domain.records import Interaction, hash_text
from services.refresher.domain.remembered import Remembered, entry_id_of
from services.refresher.domain.rules import ContributionRows, Rules, contributions_of, weights_of

# The new items' model weight is chosen from at most _JUDGED items with at least _WELL_USED interactions each.
_JUDGED = 1000
_WELL_USED = 20
# Items per checkpoint part. A part is written again if the sums of one of its items changed.
SHARD_ITEMS = 64
COUNTS = ("folded", "duplicates", "undone", "forgotten", "void", "other_model", "unknown_item", "dead_lettered")


class ItemNumbers:
    """Numbers all items that ever had sums. `shard_versions` counts the changes of each `SHARD_ITEMS` items."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.of: dict[str, int] = {}
        self.shard_versions: list[int] = []

    def get(self, item_id: str) -> int:
        number = self.of.get(item_id)
        if number is None:
            number = self.of[item_id] = len(self.ids)
            self.ids.append(item_id)
            if number % SHARD_ITEMS == 0:
                self.shard_versions.append(0)
        return number

    def changed(self, item_id: str) -> None:
        self.shard_versions[self.get(item_id) // SHARD_ITEMS] += 1


@dataclass(slots=True)
class Outgoing:
    """What a partition has published, and what it still has to publish.

    `dirty_items` are items to publish, with True if something was subtracted since their last publication.
    `dirty_entries` are memory entries to publish. `published` are the published items, in order. `dropped` are the keys
    of `index-deltas` that the last batch dropped. An earlier process may have published up to the offset `quiet_until`,
    so nothing is published below it.
    """

    dirty_items: dict[str, bool] = field(default_factory=dict)
    dirty_entries: set[str] = field(default_factory=set)
    published: dict[str, None] = field(default_factory=dict)
    dropped: list[bytes] = field(default_factory=list)
    quiet_until: int = -1

    @property
    def num_changes(self) -> int:
        return len(self.dirty_items) + len(self.dirty_entries)

    def touch(self, item_id: str, *, removed: bool = False) -> None:
        """Mark an item as changed. `removed` tells that something was subtracted."""
        self.dirty_items[item_id] = removed or self.dirty_items.get(item_id, False)

    def touch_all(self, item_ids: Iterable[str]) -> None:
        """Mark items as changed by additions only."""
        for item_id in item_ids:
            self.dirty_items.setdefault(item_id, False)


class Partition:
    """The state of one partition.

    `listed` are the items of topic `items`; it may grow. `newest_recorded_ms` is the broker's time of the newest
    interaction. `mark` has offset and source position of the last interaction, which identify the log. `leaving` maps
    forgotten users who are not yet subtracted to their forgotten offsets. `returning` has the offsets of counted
    interactions to read again for recomputed sums.
    """

    def __init__(self, number: int, rules: Rules, listed: Container[str]) -> None:
        self.number, self.rules, self.listed = number, rules, listed
        self.folded_offset = -1
        self.newest_recorded_ms: int | None = None
        self.mark: tuple[int, int] | None = None
        self.numbers = ItemNumbers()
        self.outgoing, self.remembered = Outgoing(), Remembered(rules)
        self.sums = ItemSums(num_components=rules.items.num_components, width=rules.items.width)
        self.ledger, self.pending = Ledger(), Pending(rules.max_pending)
        # Per new item in the sums, the user's hash of each interaction.
        self.contributor_hashes: dict[str, array[int]] = {}
        self.leaving: dict[str, Mapping[int, int]] = {}
        self.returning: list[int] = []
        self.counts: Counter[str] = Counter()
        self.other_models: Counter[str] = Counter()
        # Model weight of new items; see `judge_new_items`.
        self.new_item_policy: SharePolicy = NEW_ITEM_SHARE

    @property
    def is_quiet(self) -> bool:
        """True if more records have to be folded before a publication."""
        return self.folded_offset < self.outgoing.quiet_until

    def is_known(self, item_id: str) -> bool:
        return self.rules.items.row(item_id) >= 0 or item_id in self.listed

    def num_users(self, item_id: str) -> int:
        """Return the number of distinct users in an item's sums, in O(counted interactions) for a known item."""
        users = self.contributor_hashes.get(item_id)
        if users is None and item_id in self.sums:
            return len(np.unique(self.ledger.of_item(self.numbers.of[item_id])["users"]))
        return len(set(users or ()))

    def has_users(self, item_id: str, least: int) -> bool:
        """Return whether a new item has at least `least` distinct users."""
        found: set[int] = set()
        for user in self.contributor_hashes.get(item_id, ()):
            found.add(user)
            if len(found) >= least:
                return True
        return least <= 0

    def digest(self) -> str:
        """Return a hash (32 hex digits) of position, sums, memory and ledger. A rebuild gives the same hash.

        Only the sums that changed since the last digest are hashed again.
        """
        digest = hashlib.blake2b(f"{self.rules.text}\0{self.number}\0{self.folded_offset}".encode(), digest_size=16)
        digest.update(self.sums.digest().encode())
        digest.update(self.remembered.digest())
        digest.update(self.ledger.digest())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        contributors = 8 * sum(map(len, self.contributor_hashes.values()))
        parts = (self.sums, self.remembered.memory, self.ledger, self.pending)
        return contributors + sum(part.nbytes for part in parts)

    def fold(self, interactions: Sequence[Interaction]) -> None:
        """Fold all interactions in order. An exception leaves the state unchanged."""
        accepted, again, counts, others = self._accept(interactions)
        weights = weights_of(self.rules, accepted)
        known = [self.is_known(interaction.item_id) for interaction in accepted]
        rows = contributions_of(
            self.rules,
            [interaction for interaction, is_known in zip(accepted, known, strict=True) if is_known],
            [weight for weight, is_known in zip(weights, known, strict=True) if is_known],
        )
        # Nothing below fails.
        for part in rows:
            self._add_to_sums(part)
        for interaction, weight, is_known in zip(accepted, weights, known, strict=True):
            number = self.numbers.of[interaction.item_id] if weight and is_known else NO_ITEM
            self.ledger.add(interaction.user, interaction.source_position, interaction.offset, number)
            if not is_known:
                self.pending.add(interaction.item_id, interaction.offset)
        for interaction in again:
            self._give(interaction)
        self.outgoing.dirty_entries |= self.remembered.add(accepted, weights)
        for interaction in interactions:
            self.newest_recorded_ms = max(self.newest_recorded_ms or 0, interaction.recorded_ms)
            self.mark = (interaction.offset, interaction.source_position)
        counts.update(folded=sum(known), unknown_item=len(known) - sum(known))
        self.counts.update(counts)
        self.other_models.update(others)

    def take_back(self, interactions: Sequence[Interaction]) -> None:
        """Subtract exactly what counted interactions added. Their positions no longer count."""
        in_sums: list[Interaction] = []
        owners: dict[int, int] = {}
        for interaction in interactions:
            owner, item = self.ledger.strike(interaction.source_position)
            owners[interaction.source_position] = owner
            if self.pending.holds(interaction.item_id, interaction.offset):
                self.pending.remove(interaction.item_id, interaction.offset)
            # With NO_ITEM the interaction has no weight, or the item's sums are being recomputed.
            elif item != NO_ITEM:
                in_sums.append(interaction)
        for part in contributions_of(self.rules, in_sums, weights_of(self.rules, in_sums)):
            self.sums.remove(part.item_ids, part.contributions, part.weights)
            for interaction in part.interactions:
                self._touch(interaction.item_id, removed=True)
                users = self.contributor_hashes.get(interaction.item_id)
                if users is not None:
                    users.remove(owners[interaction.source_position])
                    if not users:
                        del self.contributor_hashes[interaction.item_id]
        self.leave_memory([interaction.source_position for interaction in interactions])

    def lose(self, positions: Sequence[int], first: int) -> tuple[int, int]:
        """Void counted positions whose attributions the log lost. first: the log's first offset.

        Their contributions cannot be subtracted, so their items' sums are recomputed from the log. Return the numbers
        of items, and of other interactions lost with them.
        """
        numbers: set[int] = set()
        for position in positions:
            offset = self.ledger.offset_of(position)
            _, item = self.ledger.strike(position)
            if item != NO_ITEM:
                numbers.add(item)
            for item_id in [item_id for item_id in self.pending if self.pending.holds(item_id, offset or 0)]:
                self.pending.remove(item_id, offset or 0)
        others = 0
        for number in numbers:
            item_id = self.numbers.ids[number]
            lost, left = self.ledger.release(number, first)
            others += lost
            self.returning += left
            if item_id in self.sums:
                self.sums.drop(item_id)
            self.contributor_hashes.pop(item_id, None)
            self._touch(item_id, removed=True)
        self.leave_memory(positions)
        return len(numbers), others

    def come_back(self, offsets: Sequence[int], found: Mapping[int, Interaction]) -> None:
        """Add the found interactions that still count to the sums, and remove `offsets` from `returning`."""
        still = [one for one in found.values() if self.ledger.offset_of(one.source_position) == one.offset]
        self._settle(still)
        del self.returning[: len(offsets)]

    def leave_memory(self, positions: Sequence[int]) -> None:
        self.outgoing.dirty_entries |= self.remembered.leave(positions)

    def adopt(self, item_id: str, interactions: Sequence[Interaction]) -> None:
        self._settle(interactions)
        self.pending.take(item_id)

    def _settle(self, interactions: Sequence[Interaction]) -> None:
        for part in contributions_of(self.rules, interactions, weights_of(self.rules, interactions)):
            self._add_to_sums(part, self.ledger.user_of)
            for interaction in part.interactions:
                self.ledger.settle(interaction.source_position, self.numbers.of[interaction.item_id])

    def lacks(self) -> list[tuple[int, int]]:
        """(source position, attribution offset) of counted interactions outside the memory, in its order of
        preference.
        """
        positions, offsets = self.ledger.counted()
        gone = {position for user, up_to in self.leaving.items() for position, _ in self.ledger.covered(user, up_to)}
        found = []
        for position, offset in zip(positions.tolist(), offsets.tolist(), strict=True):
            entry_id = entry_id_of(position)
            if entry_id not in self.remembered.memory and position not in gone:
                found.append((hash_of(entry_id), position, offset))
        return [(position, offset) for _, position, offset in sorted(found)]

    def is_remembered(self, interaction: Interaction) -> bool:
        """Return whether the interaction has a weight, which the memory requires."""
        return bool(weights_of(self.rules, [interaction])[0])

    def refill(self, interactions: Sequence[Interaction]) -> None:
        """Rebuild the memory from its entries and these interactions, which come next by hash."""
        weights = weights_of(self.rules, interactions)
        self.outgoing.dirty_entries |= self.remembered.refill(interactions, weights)

    def judge_new_items(self) -> None:
        """Choose the model weight of new items from the sums of frequently used known items."""
        is_new = self.rules.items.is_new
        learnt = [item_id for item_id in self.sums if not is_new(item_id)]
        counts = self.sums.counts(learnt)
        used = [item_id for item_id, count in zip(learnt, counts, strict=True) if count >= _WELL_USED]
        known = sorted(nsmallest(_JUDGED, used, key=lambda item_id: (crc32(item_id.encode()), item_id)))
        policy = (
            new_item_share_from_sums(self.rules.items.rows(known), self.sums.of(known)) if known else NEW_ITEM_SHARE
        )
        if policy != self.new_item_policy:
            self.new_item_policy = policy
            self.outgoing.touch_all(filter(is_new, self.outgoing.published))

    def mark_everything(self) -> None:
        """Mark all items and memory entries for publication."""
        self.outgoing.touch_all((*self.sums, *self.outgoing.published))
        self.outgoing.dirty_entries.update(self.remembered.visible)

    def _accept(
        self, interactions: Sequence[Interaction]
    ) -> tuple[list[Interaction], list[Interaction], Counter[str], Counter[str]]:
        again: list[Interaction] = []
        accepted: list[Interaction] = []
        counts: Counter[str] = Counter()
        others: Counter[str] = Counter()
        fresh: set[int] = set()
        own = self.rules.items.model_version
        for interaction in interactions:
            if interaction.query.model_version != own:
                counts["other_model"] += 1
                others[interaction.query.model_version] += 1
                continue
            standing = self.ledger.standing(interaction.user, interaction.source_position)
            key = interaction.source_position
            if standing is Standing.VOID:
                counts["void"] += 1
            elif standing is Standing.COUNTED or key in fresh:
                counts["duplicates"] += 1
                again.append(interaction)
            else:
                fresh.add(key)
                accepted.append(interaction)
        return accepted, again, counts, others

    def _add_to_sums(self, part: ContributionRows, owner_of: Callable[[int], int] | None = None) -> None:
        """Add `part` to the sums.

        `owner_of` returns the user hash of a counted position, which may now belong to another pseudonym.
        """
        self.sums.add(part.item_ids, part.contributions, part.weights)
        for interaction in part.interactions:
            self._touch(interaction.item_id)
            if self.rules.items.is_new(interaction.item_id):
                owner = owner_of(interaction.source_position) if owner_of else hash_text(interaction.user)
                self.contributor_hashes.setdefault(interaction.item_id, array("Q")).append(owner)

    def _give(self, interaction: Interaction) -> None:
        before = self.ledger.give(interaction.source_position, interaction.user)
        users = self.contributor_hashes.get(interaction.item_id)
        if users is not None and before in users and before != hash_text(interaction.user):
            users[users.index(before)] = hash_text(interaction.user)

    def _touch(self, item_id: str, *, removed: bool = False) -> None:
        self.numbers.changed(item_id)
        self.outgoing.touch(item_id, removed=removed)


@dataclass(slots=True)
class PartitionRegistry:
    """The partitions, shared under `lock`."""

    lock: Lock = field(default_factory=Lock)
    partitions: dict[int, Partition] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    checkpoints: dict[int, int] = field(default_factory=dict)

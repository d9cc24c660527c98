"""One partition of `attributions` folded: sums, memory, ledger, and what has changed since it was last published.

The state is a function of the records up to `folded_offset` and of which items are known (in the bundle, or listed):
the same after a crash, on another machine, or from zero. Interactions of unknown items are kept as offsets to read
again, 8 bytes each, and folded once their item is listed. Reading records again is the handlers' work; here nothing
waits for anything.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from zlib import crc32

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.memory import hash_of
from services.algorithms.pefa.policy import NEW_ITEM_SHARE, SharePolicy
from services.algorithms.pefa.share_choice import new_item_share_from_sums
from services.algorithms.pefa.sums import ItemSums
from services.refresher.domain.contributions import ContributionRows, contributions_of, weights_of
from services.refresher.domain.ledger import Ledger, Standing
from services.refresher.domain.ledger_rows import NO_ITEM
from services.refresher.domain.outgoing import Outgoing
from services.refresher.domain.pending import Pending
from services.refresher.domain.records import Interaction, hash_text
from services.refresher.domain.remembered import Remembered, entry_id_of
from services.refresher.domain.rules import Rules

# What is asked how long new items may become: so many items, of so many interactions each.
_JUDGED = 1000
_WELL_USED = 20
# Items whose sums are one part of a checkpoint, written again when one of them has changed.
SHARD_ITEMS = 64
COUNTS = ("folded", "duplicates", "undone", "forgotten", "void", "other_model", "unknown_item", "dead_lettered")


class ItemNumbers:
    """Every item that ever had sums, in order: the ledger knows it by its number here. shard_versions: counts the
    changes of each `SHARD_ITEMS` of them."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.of: dict[str, int] = {}
        self.shard_versions: list[int] = []

    def get(self, item_id: str) -> int:
        """The item's number, a new one where it has none."""
        number = self.of.get(item_id)
        if number is None:
            number = self.of[item_id] = len(self.ids)
            self.ids.append(item_id)
            if number % SHARD_ITEMS == 0:
                self.shard_versions.append(0)
        return number

    def changed(self, item_id: str) -> None:
        """The item's sums have changed."""
        self.shard_versions[self.get(item_id) // SHARD_ITEMS] += 1


@dataclass(slots=True)
class StreamTime:
    """Stream time is the newest moment of any interaction of a partition, whatever becomes of it.

    newest_recorded_ms: when the broker took the newest one. mark: offset and source position of the last one: by it a
    log is known again.
    """

    stream_ms: int = 0
    newest_recorded_ms: int | None = None
    mark: tuple[int, int] | None = None

    def note(self, interaction: Interaction) -> None:
        """One more was folded."""
        self.stream_ms = max(self.stream_ms, interaction.moment_ms)
        self.newest_recorded_ms = max(self.newest_recorded_ms or 0, interaction.recorded_ms)
        self.mark = (interaction.offset, interaction.source_position)

    def age_seconds(self, last_seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Stream time since these moments; 0 for those that lie ahead of it."""
        return np.asarray(np.maximum(self.stream_ms // 1000 - last_seconds, 0))


class Partition:
    """The state of one partition under `rules`. `listed` holds the items of topic `items`, and may grow outside.

    leaving: forgotten users of whom something is still to be read again and taken out, each with up to where.
    returning: offsets of interactions that count and are still to be read again and added to the sums of their items,
    which were made anew.
    """

    def __init__(self, number: int, rules: Rules, listed: Container[str]) -> None:
        self.number, self.rules, self.listed = number, rules, listed
        self.folded_offset = -1
        self.time, self.numbers = StreamTime(), ItemNumbers()
        self.outgoing, self.remembered = Outgoing(), Remembered(rules)
        self.sums = ItemSums(
            num_components=rules.items.num_components, width=rules.items.width, decay=rules.decay, times=self.times_of
        )
        self.ledger, self.pending = Ledger(), Pending(rules.max_pending)
        # Per new item in the sums: a hash of the user for each interaction.
        self.contributor_hashes: dict[str, array[int]] = {}
        self.leaving: dict[str, Mapping[int, int]] = {}
        self.returning: list[int] = []
        self.counts: Counter[str] = Counter()
        self.other_models: Counter[str] = Counter()
        # How far new items may go; see `judge_new_items`.
        self.new_item_policy: SharePolicy = NEW_ITEM_SHARE

    @property
    def is_quiet(self) -> bool:
        """Whether there is still something to fold before anything is published."""
        return self.folded_offset < self.outgoing.quiet_until

    def is_known(self, item_id: str) -> bool:
        """In the bundle, or listed."""
        return item_id in self.rules.items.index or item_id in self.listed

    def num_users(self, item_id: str) -> int:
        """Distinct users behind an item's sums. Cost: O(interactions held) for one that is not new."""
        users = self.contributor_hashes.get(item_id)
        if users is None and item_id in self.sums:
            return len(np.unique(self.ledger.of_item(self.numbers.of[item_id])["users"]))
        return len(set(users or ()))

    def has_users(self, item_id: str, least: int) -> bool:
        """Whether at least so many users stand behind a new item; stops counting there."""
        found: set[int] = set()
        for user in self.contributor_hashes.get(item_id, ()):
            found.add(user)
            if len(found) >= least:
                return True
        return least <= 0

    def times_of(self, item_id: str) -> npt.NDArray[np.int64]:
        """When the interactions of an item's sums happened, in any order."""
        return np.asarray(self.ledger.of_item(self.numbers.of[item_id])["seconds"], np.int64)

    def digest(self) -> str:
        """32 hex digits of position, sums, memory and ledger: equal after a rebuild from zero.

        Cost: a hash over the sums that changed since the last digest; memory and ledger keep theirs.
        """
        digest = hashlib.blake2b(f"{self.rules.text}\0{self.number}\0{self.folded_offset}".encode(), digest_size=16)
        digest.update(self.sums.digest().encode())
        digest.update(self.remembered.digest())
        digest.update(self.ledger.digest())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes held for items, interactions and the memory, as far as they are counted."""
        contributors = 8 * sum(map(len, self.contributor_hashes.values()))
        parts = (self.sums, self.remembered.memory, self.ledger, self.pending)
        return contributors + sum(part.nbytes for part in parts)

    def fold(self, interactions: Sequence[Interaction]) -> None:
        """Fold a run of interactions, in order. All or nothing."""
        accepted, again, counts, others = self._accept(interactions)
        weights = weights_of(self.rules, accepted)
        known = [self.is_known(interaction.item_id) for interaction in accepted]
        rows = contributions_of(
            self.rules,
            [interaction for interaction, is_known in zip(accepted, known, strict=True) if is_known],
            [weight for weight, is_known in zip(weights, known, strict=True) if is_known],
        )
        # From here on nothing fails.
        for part in rows:
            self._add_to_sums(part)
        for interaction, weight, is_known in zip(accepted, weights, known, strict=True):
            number = self.numbers.of[interaction.item_id] if weight and is_known else NO_ITEM
            second = interaction.moment_ms // 1000
            self.ledger.add(interaction.user, interaction.source_position, interaction.offset, number, second)
            if not is_known:
                self.pending.add(interaction.item_id, interaction.offset)
        for interaction in again:
            self._give(interaction)
        self.outgoing.dirty_entries |= self.remembered.add(accepted, weights)
        for interaction in interactions:
            self.time.note(interaction)
        counts.update(folded=sum(known), unknown_item=len(known) - sum(known))
        self.counts.update(counts)
        self.other_models.update(others)

    def take_back(self, interactions: Sequence[Interaction]) -> None:
        """Take out interactions that count, given as they were folded; their positions count no more."""
        in_sums: list[Interaction] = []
        owners: dict[int, int] = {}
        for interaction in interactions:
            owner, item = self.ledger.strike(interaction.source_position)
            owners[interaction.source_position] = owner
            if self.pending.holds(interaction.item_id, interaction.offset):
                self.pending.remove(interaction.item_id, interaction.offset)
            elif item != NO_ITEM:  # else the sums do not contain it: it weighs nothing, or they are being recomputed
                in_sums.append(interaction)
        for part in contributions_of(self.rules, in_sums, weights_of(self.rules, in_sums)):
            self.sums.remove(part.item_ids, part.contributions, part.weights, part.seconds)
            for interaction in part.interactions:
                self._touch(interaction.item_id, removed=True)
                users = self.contributor_hashes.get(interaction.item_id)
                if users is not None:
                    users.remove(owners[interaction.source_position])
                    if not users:
                        del self.contributor_hashes[interaction.item_id]
        self.leave_memory([interaction.source_position for interaction in interactions])

    def lose(self, positions: Sequence[int], first: int) -> tuple[int, int]:
        """Void counted positions whose attributions the log, which begins at `first` now, has no more.

        What they added to the sums cannot be computed again, so the sums of their items go, and what the log still has
        of them is to come back. Returns the number of items, and of others' interactions that are lost with them; these
        count no more, and are folded again should they be attributed again.
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
        """Of the first of `returning`, fold what was found and still counts."""
        still = [one for one in found.values() if self.ledger.offset_of(one.source_position) == one.offset]
        self._settle(still)
        del self.returning[: len(offsets)]

    def leave_memory(self, positions: Sequence[int]) -> None:
        """Take the interactions at these positions out of the memory alone."""
        self.outgoing.dirty_entries |= self.remembered.leave(positions)

    def adopt(self, item_id: str, interactions: Sequence[Interaction]) -> None:
        """Fold what was pending of an item that is known now."""
        self._settle(interactions)
        self.pending.take(item_id)

    def _settle(self, interactions: Sequence[Interaction]) -> None:
        """Add interactions that count already to the sums."""
        for part in contributions_of(self.rules, interactions, weights_of(self.rules, interactions)):
            self._add_to_sums(part, self.ledger.user_of)
            for interaction in part.interactions:
                number, second = self.numbers.of[interaction.item_id], interaction.moment_ms // 1000
                self.ledger.settle(interaction.source_position, number, second)

    def lacks(self) -> list[tuple[int, int]]:
        """(source position, attribution offset) of what counts and the memory lacks, in the order in which it wants it.

        Cost: O(n log n) of the interactions that count.
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
        """Whether the memory takes such an interaction at all: one without weight votes for nothing."""
        return bool(weights_of(self.rules, [interaction])[0])

    def refill(self, interactions: Sequence[Interaction]) -> None:
        """Make the memory again from what it holds and these, the next ones by hash."""
        weights = weights_of(self.rules, interactions)
        self.outgoing.dirty_entries |= self.remembered.refill(interactions, weights)

    def judge_new_items(self) -> None:
        """Take from the sums of well-used known items how long a new item's components may become in this model.

        At most `_JUDGED` items, by the hash of their ids. New items that readers hold are published again.
        """
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
        """Publish all of it again: a full snapshot."""
        self.outgoing.touch_all((*self.sums, *self.outgoing.published))
        self.outgoing.dirty_entries.update(self.remembered.visible)

    def _accept(
        self, interactions: Sequence[Interaction]
    ) -> tuple[list[Interaction], list[Interaction], Counter[str], Counter[str]]:
        """Those that are to count; those that count already; what the others are, and of which models."""
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
        """owner_of: the hash of the user of a position that counts already; another pseudonym may have given it."""
        self.sums.add(part.item_ids, part.contributions, part.weights, part.seconds)
        for interaction in part.interactions:
            self._touch(interaction.item_id)
            if self.rules.items.is_new(interaction.item_id):
                owner = owner_of(interaction.source_position) if owner_of else hash_text(interaction.user)
                self.contributor_hashes.setdefault(interaction.item_id, array("Q")).append(owner)

    def _give(self, interaction: Interaction) -> None:
        """What counts already came again: it is the user's under the pseudonym that came last."""
        before = self.ledger.give(interaction.source_position, interaction.user)
        users = self.contributor_hashes.get(interaction.item_id)
        if users is not None and before in users and before != hash_text(interaction.user):
            users[users.index(before)] = hash_text(interaction.user)

    def _touch(self, item_id: str, *, removed: bool = False) -> None:
        """An item's sums have changed."""
        self.numbers.changed(item_id)
        self.outgoing.touch(item_id, removed=removed)

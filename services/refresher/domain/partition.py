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

from services.algorithms.pefa.memory import MemoryEntry, QueryMemory, hash_of, offer_all
from services.algorithms.pefa.policy import NEW_ITEM_SHARE, SharePolicy
from services.algorithms.pefa.share_choice import new_item_share_from_sums
from services.algorithms.pefa.sums import ItemSums
from services.algorithms.states import QueryStates
from services.platform.stream.position import unpack_position
from services.refresher.domain.ledger import Ledger, Standing
from services.refresher.domain.ledger_rows import NO_ITEM
from services.refresher.domain.pending import Pending
from services.refresher.domain.records import Interaction, hash_text
from services.refresher.domain.rules import Rules

# Rows whose contributions are computed together: a few megabytes of float64 at 8 x 4 x 64.
_ROWS = 1024
# What is asked how long new items may become: so many items, of so many interactions each.
_JUDGED = 1000
_WELL_USED = 20
# Items whose sums are one part of a checkpoint, written again when one of them has changed.
SHARD_ITEMS = 64
COUNTS = ("folded", "duplicates", "undone", "forgotten", "void", "other_model", "unknown_item", "dead_lettered")


def entry_id_of(source_position: int) -> str:
    """The memory's name for the interaction at a position."""
    partition, offset = unpack_position(source_position)
    return f"{partition}-{offset}"


@dataclass(frozen=True, slots=True)
class _Rows:
    """n interactions that say something. Shapes: weights (n,), contributions (n, P_x, d), seconds (n,)."""

    interactions: Sequence[Interaction]
    item_ids: list[str]
    weights: npt.NDArray[np.float64]
    contributions: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.int64]


class Partition:
    """The state of one partition under `rules`. `listed` holds the items of topic `items`, and may grow outside.

    dirty_items: what has to be published again, True where something was taken out of it since. dirty_entries: likewise
    of the memory. visible: the memory's entries as they are to be published. published: the model weight of each item
    state that readers hold from here. dropped: keys of `index-deltas` that the last batch dropped. quiet_until: an
    earlier life may have published up to this offset; below it nothing is published, so that readers never see an item
    go back. leaving: forgotten users of whom something is still to be read again and taken out, each with up to where.
    returning: offsets of interactions that count and are still to be read again and added to the sums of their items,
    which were made anew.
    """

    def __init__(self, number: int, rules: Rules, listed: Container[str]) -> None:
        items = rules.items
        self.number = number
        self.rules = rules
        self.listed = listed
        self.folded_offset = -1
        self.stream_ms = 0
        self.newest_recorded_ms: int | None = None
        # Offset and source position of the last interaction: by it a log is known again.
        self.mark: tuple[int, int] | None = None
        # Every item that ever had sums, in order: the ledger knows it by its number here. shard_versions: counts the
        # changes of each `SHARD_ITEMS` of them.
        self.item_ids: list[str] = []
        self.item_numbers: dict[str, int] = {}
        self.shard_versions: list[int] = []
        self.sums = ItemSums(
            num_components=items.num_components, width=items.width, decay=rules.decay, times=self.times_of
        )
        self.memory = QueryMemory(
            capacity=rules.max_remembered, num_components=items.num_query_components, width=items.width
        )
        self.ledger = Ledger()
        self.pending = Pending(rules.max_pending)
        # Per new item in the sums: a hash of the user for each interaction.
        self.contributor_hashes: dict[str, array[int]] = {}
        self.leaving: dict[str, Mapping[int, int]] = {}
        self.returning: list[int] = []
        self.counts: Counter[str] = Counter()
        self.other_models: Counter[str] = Counter()
        self.dirty_items: dict[str, bool] = {}
        self.dirty_entries: set[str] = set()
        self.visible: dict[str, MemoryEntry] = {}
        self.published: dict[str, float] = {}
        # The sum of a hash of every visible entry: the memory's own digest reads all of it.
        self._memory_mix = 0
        self.quiet_until = -1
        # How far new items may go; see `judge_new_items`.
        self.new_item_policy: SharePolicy = NEW_ITEM_SHARE
        # Published items that the sweep at hand has not looked at yet.
        self.to_sweep: list[str] = []
        self.dropped: list[bytes] = []

    @property
    def is_quiet(self) -> bool:
        """Whether there is still something to fold before anything is published."""
        return self.folded_offset < self.quiet_until

    def is_known(self, item_id: str) -> bool:
        """In the bundle, or listed."""
        return item_id in self.rules.items.index or item_id in self.listed

    def num_users(self, item_id: str) -> int:
        """Distinct users behind an item's sums. Cost: O(interactions held) for one that is not new."""
        users = self.contributor_hashes.get(item_id)
        if users is None and item_id in self.sums:
            return len(np.unique(self.ledger.of_item(self.item_numbers[item_id])["users"]))
        return len(set(users or ()))

    def has_users(self, item_id: str, least: int) -> bool:
        """Whether at least so many users stand behind a new item; stops counting there."""
        found: set[int] = set()
        for user in self.contributor_hashes.get(item_id, ()):
            found.add(user)
            if len(found) >= least:
                return True
        return least <= 0

    def number_of(self, item_id: str) -> int:
        """The item's number in the ledger, a new one where it has none."""
        number = self.item_numbers.get(item_id)
        if number is None:
            number = self.item_numbers[item_id] = len(self.item_ids)
            self.item_ids.append(item_id)
            if number % SHARD_ITEMS == 0:
                self.shard_versions.append(0)
        return number

    def times_of(self, item_id: str) -> npt.NDArray[np.int64]:
        """When the interactions of an item's sums happened, in any order."""
        return np.asarray(self.ledger.of_item(self.item_numbers[item_id])["seconds"], np.int64)

    def age_seconds(self, last_seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Stream time since these moments; 0 for those that lie ahead of it."""
        return np.asarray(np.maximum(self.stream_ms // 1000 - last_seconds, 0))

    def digest(self) -> str:
        """32 hex digits of position, sums, memory and ledger: equal after a rebuild from zero.

        Cost: a hash over the sums that changed since the last digest; memory and ledger keep theirs.
        """
        digest = hashlib.blake2b(f"{self.rules.text}\0{self.number}\0{self.folded_offset}".encode(), digest_size=16)
        digest.update(self.sums.digest().encode())
        digest.update((self._memory_mix % (1 << 128)).to_bytes(16, "little"))
        digest.update(self.ledger.digest())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes held for items, interactions and the memory, as far as they are counted."""
        contributors = 8 * sum(map(len, self.contributor_hashes.values()))
        return self.sums.nbytes + self.memory.nbytes + self.ledger.nbytes + contributors + self.pending.nbytes

    def note_time(self, interaction: Interaction) -> None:
        """Stream time is the newest moment of any interaction here, whatever becomes of it."""
        self.stream_ms = max(self.stream_ms, interaction.moment_ms)
        self.newest_recorded_ms = max(self.newest_recorded_ms or 0, interaction.recorded_ms)
        self.mark = (interaction.offset, interaction.source_position)

    def fold(self, interactions: Sequence[Interaction]) -> None:
        """Fold a run of interactions, in order. All or nothing."""
        accepted, again, counts, others = self._accept(interactions)
        weights = self._weights(accepted)
        known = [self.is_known(interaction.item_id) for interaction in accepted]
        rows = self._rows(
            [interaction for interaction, is_known in zip(accepted, known, strict=True) if is_known],
            [weight for weight, is_known in zip(weights, known, strict=True) if is_known],
        )
        # From here on nothing fails.
        for part in rows:
            self._add_to_sums(part)
        for interaction, weight, is_known in zip(accepted, weights, known, strict=True):
            number = self.item_numbers[interaction.item_id] if weight and is_known else NO_ITEM
            second = interaction.moment_ms // 1000
            self.ledger.add(interaction.user, interaction.source_position, interaction.offset, number, second)
            if not is_known:
                self.pending.add(interaction.item_id, interaction.offset)
        for interaction in again:
            self._give(interaction)
        self._remember(accepted, weights)
        for interaction in interactions:
            self.note_time(interaction)
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
        for part in self._rows(in_sums, self._weights(in_sums)):
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
            item_id = self.item_ids[number]
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
        entry_ids = [entry_id_of(position) for position in positions]
        self.dirty_entries.update(entry_id for entry_id in entry_ids if entry_id in self.memory)
        self.memory.remove(entry_ids)
        self._follow_memory()

    def adopt(self, item_id: str, interactions: Sequence[Interaction]) -> None:
        """Fold what was pending of an item that is known now."""
        self._settle(interactions)
        self.pending.take(item_id)

    def _settle(self, interactions: Sequence[Interaction]) -> None:
        """Add interactions that count already to the sums."""
        for part in self._rows(interactions, self._weights(interactions)):
            self._add_to_sums(part, self.ledger.user_of)
            for interaction in part.interactions:
                number, second = self.item_numbers[interaction.item_id], interaction.moment_ms // 1000
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
            if entry_id not in self.memory and position not in gone:
                found.append((hash_of(entry_id), position, offset))
        return [(position, offset) for _, position, offset in sorted(found)]

    @property
    def refill_size(self) -> int:
        """How many a refill has to bring: one more than there is room for, so that the memory knows of others."""
        return self.memory.capacity + self.memory.reserve + 1 - len(self.memory)

    def is_remembered(self, interaction: Interaction) -> bool:
        """Whether the memory takes such an interaction at all: one without weight votes for nothing."""
        return bool(self._weights([interaction])[0])

    def refill(self, interactions: Sequence[Interaction]) -> None:
        """Make the memory again from what it holds and these, the next ones by hash."""
        before = set(self.visible)
        weights = self._weights(interactions)
        offered = [self._entry(one, weight) for one, weight in zip(interactions, weights, strict=True) if weight]
        # A memory that wants a refill shows all that it holds: its reserve is used up.
        self.memory = offer_all(self.memory, [*self.memory, *offered])
        self.memory.take_changes()
        self.show_memory()
        self.dirty_entries |= before ^ self.visible.keys()

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
            for item_id in self.published:
                if is_new(item_id):
                    self.dirty_items.setdefault(item_id, False)

    def show_memory(self) -> None:
        """Take `visible` from a memory that was made again."""
        self.visible = {entry.entry_id: entry for entry in self.memory}
        self._memory_mix = sum(map(_hash_entry, self.visible.values()))

    def mark_everything(self) -> None:
        """Publish all of it again: a full snapshot."""
        for item_id in (*self.sums, *self.published):
            self.dirty_items.setdefault(item_id, False)
        self.dirty_entries.update(self.visible)

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

    def _weights(self, interactions: Sequence[Interaction]) -> list[float]:
        weight = self.rules.feedback.weight
        return [weight(interaction.type, interaction.value) for interaction in interactions]

    def _rows(self, interactions: Sequence[Interaction], weights: Sequence[float]) -> list[_Rows]:
        """What those with a weight add to their items."""
        pairs = [(one, weight) for one, weight in zip(interactions, weights, strict=True) if weight]
        return [self._rows_of(pairs[start : start + _ROWS]) for start in range(0, len(pairs), _ROWS)]

    def _rows_of(self, pairs: Sequence[tuple[Interaction, float]]) -> _Rows:
        items, decay = self.rules.items, self.rules.decay
        interactions = [interaction for interaction, _ in pairs]
        item_ids = [interaction.item_id for interaction in interactions]
        seconds = np.array([interaction.moment_ms // 1000 for interaction in interactions], np.int64)
        weights = np.array([weight for _, weight in pairs], np.float64) * decay.factors(seconds)
        components = _halves([interaction.query.components for interaction in interactions])
        gates = None
        if items.states.gate is not None:
            gates = _halves([interaction.query.gate for interaction in interactions]).reshape(len(pairs), -1)
        queries = QueryStates(
            components=components.reshape(len(pairs), items.num_query_components, items.width), gate=gates
        )
        return _Rows(
            interactions, item_ids, weights, items.contributions(queries, weights, items.rows(item_ids)), seconds
        )

    def _add_to_sums(self, part: _Rows, owner_of: Callable[[int], int] | None = None) -> None:
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
        self.shard_versions[self.number_of(item_id) // SHARD_ITEMS] += 1
        self.dirty_items[item_id] = removed or self.dirty_items.get(item_id, False)

    def _remember(self, interactions: Sequence[Interaction], weights: Sequence[float]) -> None:
        offered = []
        for interaction, weight in zip(interactions, weights, strict=True):
            if weight and self.memory.admits(entry_id_of(interaction.source_position)):
                entry = self._entry(interaction, weight)
                offered.append(entry)
                # Even one that is pushed out at once: cut otherwise, the same records may have shown it to readers.
                self.dirty_entries.add(entry.entry_id)
        self.memory.add(offered)
        self._follow_memory()

    def _follow_memory(self) -> None:
        changes = self.memory.take_changes()
        for entry in changes.entered:
            self.visible[entry.entry_id] = entry
            self._memory_mix += _hash_entry(entry)
            self.dirty_entries.add(entry.entry_id)
        for entry_id in changes.left:
            self._memory_mix -= _hash_entry(self.visible.pop(entry_id))
            self.dirty_entries.add(entry_id)

    def _entry(self, interaction: Interaction, weight: float) -> MemoryEntry:
        query, leave_out = interaction.query, self.rules.items.leave_out
        components = np.frombuffer(query.components, "<f2").reshape(query.num_components, query.component_width)
        if leave_out is not None:
            # Entries leave this process, and that component says who the user is.
            components = components.copy()
            components[leave_out] = 0
        return MemoryEntry(
            entry_id=entry_id_of(interaction.source_position),
            item_id=interaction.item_id,
            components=components,
            weight=weight,
            interaction_type=interaction.type,
            event_seconds=interaction.moment_ms // 1000,
            user=interaction.user,
        )


def _hash_entry(entry: MemoryEntry) -> int:
    # Whose it is the ledger says: under another key of pseudonyms it may have come under another one.
    names = f"{entry.entry_id}\0{entry.item_id}\0{entry.interaction_type}\0"
    numbers = f"{entry.weight!r}\0{entry.event_seconds}\0"
    digest = hashlib.blake2b((names + numbers).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(entry.components, "<f2").data)
    return int.from_bytes(digest.digest(), "little")


def _halves(pieces: Sequence[bytes]) -> npt.NDArray[np.float32]:
    return np.frombuffer(b"".join(pieces), "<f2").astype(np.float32)

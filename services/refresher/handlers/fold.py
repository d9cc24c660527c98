"""Fold records into a partition's state, and read records again to subtract them.

Each step reads before it changes the state. `folded_offset` advances after each run of records, and the next attempt
continues from it. A forget beyond `_MOST` records or `_MOST_S` seconds continues in `go_on`, between polls.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import groupby

import structlog

from services.contracts.topics.attributions import ATTRIBUTIONS
from services.platform.errors import FreshetError, PreconditionFailed
from services.platform.stream.follower import PoisonPolicy
from services.platform.stream.records import DeadLetter, SourceRecord, furthest
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.records import Entry, Forgetting, Interaction, Undo
from services.refresher.handlers.open_partition import OpenPartition
from services.refresher.handlers.publish import Publication
from services.refresher.ports import Log

# The new items' model weight is chosen at fixed offsets, so that publication depends only on the log.
_JUDGE_EVERY = 2048
# Records read again per slice.
_SLICE = 32
# Limits of records and seconds per turn.
_MOST, _MOST_S = 256, 0.2

logger = structlog.get_logger()


class FoldRecords:
    """Folds and re-reads a log's records."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def fold(self, partition: Partition, entries: Sequence[Entry]) -> list[DeadLetter]:
        """Fold entries beyond the state's position, in order. Return the unreadable entries.

        Raises: DependencyUnavailable (try again); PreconditionFailed (the log lost records, so rebuild). The state
        stays correct for its `folded_offset`.
        """
        entries = [entry for entry in entries if entry.offset > partition.folded_offset]
        recent = {entry.offset: entry for entry in entries if isinstance(entry, Interaction)}
        unreadable: list[DeadLetter] = []
        self.mend(partition)
        for (kind, _), group in groupby(entries, key=lambda entry: (type(entry), entry.offset // _JUDGE_EVERY)):
            run = list(group)
            if kind is Interaction:
                partition.fold([entry for entry in run if isinstance(entry, Interaction)])
            else:
                for entry in run:
                    self._fold_one(partition, entry, recent, unreadable)
                    partition.folded_offset = entry.offset
            partition.folded_offset = run[-1].offset
            if (partition.folded_offset + 1) % _JUDGE_EVERY == 0:
                partition.judge_new_items()
        return unreadable

    def mend(self, partition: Partition) -> None:
        """Fold pending interactions of newly known items, and refill the memory.

        It raises what `fold` raises.
        """
        for item_id in [item_id for item_id in partition.pending if partition.is_known(item_id)]:
            offsets = partition.pending.offsets(item_id)
            found = self._read(partition, offsets, {})
            if len(found) < len(offsets):
                logger.error("pending_interactions_lost", partition=partition.number, records=len(offsets) - len(found))
            partition.adopt(item_id, list(found.values()))
        if not partition.remembered.memory.wants_refill:
            return
        # Refill even if no interaction is lacking, because the rebuilt memory accepts entries that the present memory
        # would reject.
        lacking = partition.lacks()
        wanted = partition.remembered.refill_size
        brought: list[Interaction] = []
        for start in range(0, len(lacking), wanted):
            found = self._read(partition, [offset for _, offset in lacking[start : start + wanted]], {})
            brought += [interaction for interaction in found.values() if partition.is_remembered(interaction)]
            if len(brought) >= wanted:
                break
        partition.refill(brought[:wanted])

    def go_on(self, partition: Partition) -> None:
        """Recompute dropped sums and then subtract forgotten users, for one turn.

        It raises what `fold` raises.
        """
        deadline, left = time.monotonic() + _MOST_S, _MOST
        while partition.returning and left > 0 and time.monotonic() < deadline:
            offsets = partition.returning[:_SLICE]
            partition.come_back(offsets, self._read(partition, offsets, {}))
            left -= len(offsets)
        for user in list(partition.leaving):
            left -= self._take_out(partition, user, {}, left, deadline)
        if not partition.leaving:
            self.mend(partition)

    def _fold_one(
        self, partition: Partition, entry: Entry, recent: Mapping[int, Interaction], unreadable: list[DeadLetter]
    ) -> None:
        ledger = partition.ledger
        if isinstance(entry, Undo):
            offset = ledger.offset_of(entry.source_position)
            if offset is not None:
                self._void(partition, [(entry.source_position, offset)], recent)
            ledger.undo(entry.source_position)
            partition.counts["undone"] += 1
        elif isinstance(entry, Forgetting):
            covered = ledger.covered(entry.user, entry.up_to)
            first = self._read(partition, [offset for _, offset in covered[:_SLICE]], recent)
            ledger.forget(entry.user, entry.up_to)
            partition.leave_memory([position for position, _ in covered])
            if covered:
                partition.leaving[entry.user] = furthest(partition.leaving.get(entry.user, {}), entry.up_to)
                self._take_out(partition, entry.user, {**recent, **first}, _MOST, time.monotonic() + _MOST_S)
            partition.counts["forgotten"] += 1
        elif isinstance(entry, DeadLetter):
            unreadable.append(entry)
            partition.counts["dead_lettered"] += 1
        if not isinstance(entry, DeadLetter):
            # The record is folded. If `mend` fails, the next attempt begins with `mend`.
            partition.folded_offset = entry.offset
            if not partition.leaving:
                self.mend(partition)

    def _take_out(
        self, partition: Partition, user: str, recent: Mapping[int, Interaction], most: int, deadline: float
    ) -> int:
        covered = partition.ledger.covered(user, partition.leaving[user])
        done = 0
        while done < min(most, len(covered)) and time.monotonic() < deadline:
            part = covered[done : done + _SLICE]
            self._void(partition, part, recent)
            done += len(part)
        if done >= len(covered):
            del partition.leaving[user]
        return done

    def _void(self, partition: Partition, rows: Sequence[tuple[int, int]], recent: Mapping[int, Interaction]) -> None:
        """Subtract the interactions at these positions and offsets.

        If the log lost an interaction, the item's sums are dropped, and `go_on` recomputes them.
        """
        found = self._read(partition, [offset for _, offset in rows], recent)
        partition.take_back([found[offset] for _, offset in rows if offset in found])
        lost = [position for position, offset in rows if offset not in found]
        if lost:
            first = self._log.bounds([partition.number])[partition.number][0]
            items, others = partition.lose(lost, first)
            logger.error(
                "sums_recomputed",
                partition=partition.number,
                reason="the log no longer has the records to subtract",
                items=items,
                lost_interactions_of_others=others,
                first=first,
            )

    def _read(
        self, partition: Partition, offsets: Sequence[int], recent: Mapping[int, Interaction]
    ) -> dict[int, Interaction]:
        """Return the interactions at these offsets in this order, without interactions that retention deleted."""
        absent = [offset for offset in offsets if offset not in recent]
        try:
            again = self._log.read_again(partition.number, absent) if absent else {}
        except PreconditionFailed:
            first = self._log.bounds([partition.number])[partition.number][0]
            left = [offset for offset in absent if offset >= first]
            if len(left) == len(absent):
                raise
            again = self._log.read_again(partition.number, left) if left else {}
        return {
            offset: recent[offset] if offset in recent else again[offset]
            for offset in offsets
            if offset in recent or offset in again
        }


class CarefulFold:
    """Folds record by record after an unexpected exception, and dead-letters poison records.

    The exception may leave half a change, so the partition is folded again from its checkpoint.
    """

    def __init__(
        self,
        fold: FoldRecords,
        opener: OpenPartition,
        registry: PartitionRegistry,
        publication: Publication,
        poison: PoisonPolicy[Entry],
    ) -> None:
        self._fold, self._opener, self._registry, self._publication = fold, opener, registry, publication
        self._policy = poison
        # `_careful_to` has the offset up to which a partition's records are folded singly, `_poison` the reasons.
        self._careful_to: dict[int, int] = {}
        self._poison: dict[tuple[int, int], str] = {}
        # Per partition, the offset up to which folded records were counted.
        self._counted_to: dict[int, int] = {}

    def __call__(self, state: Partition, entries: Sequence[Entry]) -> None:
        """Fold entries together, or singly if they failed before.

        A poison record becomes a dead letter at the next attempt. Raises: what `FoldRecords.fold` raises, and the
        unexpected exception.
        """
        number = state.number
        parts: list[Sequence[Entry]] = [entries]
        if entries[0].offset <= self._careful_to.get(number, -1):
            entries = [
                _dead_letter(number, entry, self._poison[number, entry.offset])
                if (number, entry.offset) in self._poison
                else entry
                for entry in entries
            ]
            parts = [[entry] for entry in entries]
        for at, part in enumerate(parts):
            try:
                with self._registry.lock:
                    self._publication.set_aside(self._fold.fold(state, part))
            except FreshetError:
                raise
            except Exception as exc:
                self._careful_to[number] = max(entries[-1].offset, self._careful_to.get(number, -1))
                if len(parts) == len(entries) and self._is_poison(number, entries, at, exc):
                    self._poison[number, part[0].offset] = f"internal error: {type(exc).__name__}"
                raise

    def counted(self, number: int, entries: Sequence[Entry]) -> None:
        counted_to = self._counted_to.get(number, -1)
        self._policy.applied([entry for entry in entries if entry.offset > counted_to])
        self._counted_to[number] = max(entries[-1].offset, counted_to)

    def _is_poison(self, number: int, entries: Sequence[Entry], at: int, exc: Exception) -> bool:
        entry = entries[at]

        def rehearse(one: Entry) -> None:
            self._fold.fold(self._opener.scratch(number), [one])

        return self._policy.is_poison(
            (number, entry.offset), entry, exc, behind=entries[at + 1 :], applied=at, rehearse=rehearse
        )


def _dead_letter(number: int, entry: Entry, reason: str) -> DeadLetter:
    return DeadLetter(SourceRecord(ATTRIBUTIONS, number, entry.offset, 0, None, None), reason)

"""Fold records into a partition's state, reading records again where something has to be taken out.

Whatever has to be read is read before anything is changed, and the state's position moves with each run of records, so
a failure at any point leaves a state that is right for its position: the next attempt goes on from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from services.common.stream.record import DeadLetter
from services.refresher.domain.partition import Partition
from services.refresher.domain.records import Entry, Forgetting, Interaction, Undo
from services.refresher.ports import Log

# At these offsets, whatever the polls, so that what is published stays a function of the log.
_JUDGE_EVERY = 2048


class FoldRecords:
    """Folds what a log gives, and reads from the same log again."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def fold(self, partition: Partition, entries: Sequence[Entry]) -> list[DeadLetter]:
        """Fold entries in order; those at or below the state's position are passed over. Returns the unreadable ones.

        Raises: DependencyUnavailable (try again), PreconditionFailed (the log has lost records: rebuild it); the
        state is right for its `folded_offset` in either case.
        """
        entries = [entry for entry in entries if entry.offset > partition.folded_offset]
        recent = {entry.offset: entry for entry in entries if isinstance(entry, Interaction)}
        unreadable: list[DeadLetter] = []
        self.mend(partition)
        for kind, run in _runs(entries):
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
        """Bring in what waits in the log alone: pending interactions of items that are known now, a memory's refill.

        Raises: as `fold`.
        """
        for item_id in [item_id for item_id in partition.pending if partition.is_known(item_id)]:
            found = self._read(partition, list(partition.pending.offsets(item_id)), {})
            partition.adopt(item_id, found)
        if not partition.memory.wants_refill:
            return
        # Even if nothing is lacking: made again, the memory is open to what it would have turned away.
        lacking = partition.lacks()
        wanted = partition.refill_size
        brought: list[Interaction] = []
        for start in range(0, len(lacking), wanted):
            found = self._read(partition, [offset for _, offset in lacking[start : start + wanted]], {})
            brought += [interaction for interaction in found if partition.is_remembered(interaction)]
            if len(brought) >= wanted:
                break
        partition.refill(brought[:wanted])

    def _fold_one(
        self, partition: Partition, entry: Entry, recent: Mapping[int, Interaction], unreadable: list[DeadLetter]
    ) -> None:
        ledger = partition.ledger
        if isinstance(entry, Undo):
            offset = ledger.offset_of(entry.user, entry.source_position)
            if offset is not None:
                partition.take_back(self._read(partition, [offset], recent))
            ledger.undo(entry.user, entry.source_position)
            partition.counts["undone"] += 1
        elif isinstance(entry, Forgetting):
            offsets = [offset for _, offset in ledger.covered(entry.user, entry.up_to)]
            partition.take_back(self._read(partition, offsets, recent))
            ledger.forget(entry.user, entry.up_to)
            partition.counts["forgotten"] += 1
        elif isinstance(entry, DeadLetter):
            unreadable.append(entry)
            partition.counts["dead_lettered"] += 1
        if not isinstance(entry, DeadLetter):
            # The record is folded; should the refill fail, the next attempt begins with it.
            partition.folded_offset = entry.offset
            self.mend(partition)

    def _read(
        self, partition: Partition, offsets: Sequence[int], recent: Mapping[int, Interaction]
    ) -> list[Interaction]:
        """The interactions at these offsets, in this order."""
        absent = [offset for offset in offsets if offset not in recent]
        again = self._log.read_again(partition.number, absent) if absent else {}
        return [recent[offset] if offset in recent else again[offset] for offset in offsets]


def _runs(entries: Sequence[Entry]) -> Iterator[tuple[type[Entry], list[Entry]]]:
    """Neighbours of one kind together, cut where new items are judged."""
    for (kind, _), run in groupby(entries, key=lambda entry: (type(entry), entry.offset // _JUDGE_EVERY)):
        yield kind, list(run)

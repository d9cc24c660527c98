"""Fold record by record after an unexpected exception, and dead-letter poison records.

The exception may leave half a change, so the partition is folded again from its checkpoint.
"""

from collections.abc import Sequence

from services.contracts.topics.attributions import ATTRIBUTIONS
from services.platform.errors import FreshetError
from services.platform.stream.follower import PoisonPolicy
from services.platform.stream.records import DeadLetter, SourceRecord
from services.refresher.domain.partition import Partition
from services.refresher.domain.records import Entry
from services.refresher.handlers.describe import PartitionRegistry
from services.refresher.handlers.fold import FoldRecords
from services.refresher.handlers.open_partition import OpenPartition
from services.refresher.handlers.publication import Publication


class CarefulFold:
    """poison: judges a record that fails alone, with its neighbours in an empty partition."""

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
        # Per partition, the offset up to which records are folded singly. Per poison record, the reason.
        self._careful_to: dict[int, int] = {}
        self._poison: dict[tuple[int, int], str] = {}
        # Per partition, the offset up to which folded records were counted.
        self._counted_to: dict[int, int] = {}

    def __call__(self, state: Partition, entries: Sequence[Entry]) -> None:
        """Fold entries together, or singly if they failed before; a poison record becomes a dead letter at the next
        attempt.

        Raises: as `FoldRecords.fold`, and the unexpected exception.
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

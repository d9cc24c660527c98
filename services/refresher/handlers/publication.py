"""Publish folded changes in batches that are acknowledged together."""

import time
from collections.abc import Collection, Mapping, Sequence

from services.platform.stream.records import DeadLetter
from services.platform.tracing import OFF, Tracing
from services.refresher.domain.records import Entry, Interaction
from services.refresher.handlers.describe import PartitionRegistry
from services.refresher.handlers.publish import Batch, Publisher
from services.refresher.metrics import RefresherMetrics
from services.refresher.ports import Outbox

# Batch numbers per lease term: a later term's numbers are higher.
_BATCHES_PER_TERM = 1 << 32
_MAX_WAITING = 10_000


class Publication:
    """Publishes batches. Not thread-safe.

    max_changes: per publication, over all partitions. every_s: shortest pause between publications, in seconds; no
    pause if changes are left and no records wait. share: largest share of time for publications while records wait.
    """

    def __init__(
        self,
        publisher: Publisher,
        outbox: Outbox,
        registry: PartitionRegistry,
        metrics: RefresherMetrics,
        *,
        max_changes: int,
        every_s: float,
        share: float,
        tracing: Tracing = OFF,
    ) -> None:
        self._publisher, self._outbox, self._registry, self._metrics = publisher, outbox, registry, metrics
        self._max_changes, self._every_s, self._share, self._tracing = max_changes, every_s, share, tracing
        # Start of the next publication (monotonic clock).
        self.at_s = 0.0
        self._sequence = self._turn = 0
        self._unreadable: list[DeadLetter] = []
        # Traces of records polled since the last publication.
        self._traceparents: list[str] = []
        # Broker times of folded, unpublished interactions, by partition.
        self._waiting: dict[int, list[int]] = {}

    @property
    def has_news(self) -> bool:
        return (
            bool(self._unreadable)
            or any(self._waiting.values())
            or any(not state.is_quiet and state.outgoing.num_changes for state in self._registry.partitions.values())
        )

    def polled(self, traceparents: Collection[str]) -> None:
        if len(self._traceparents) < _MAX_WAITING:
            self._traceparents += traceparents

    def folded(self, number: int, entries: Sequence[Entry]) -> None:
        waiting = self._waiting.setdefault(number, [])
        room = max(0, _MAX_WAITING - len(waiting))
        waiting += [entry.recorded_ms for entry in entries if isinstance(entry, Interaction)][:room]

    def set_aside(self, unreadable: Collection[DeadLetter]) -> None:
        self._unreadable += unreadable

    def forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._waiting.pop(number, None)

    def write_unreadable(self) -> None:
        """Write the dead letters now: a checkpoint may include a record only after its dead letter is written.

        Raises: as the outbox.
        """
        if self._unreadable:
            self._outbox.publish([], self._unreadable)
            self._unreadable = []

    def look(self, terms: Mapping[int, int], *, idle: bool) -> None:
        """Publish changes if due. idle: no records wait to be folded. Raises: as `publish`."""
        now = time.monotonic()
        if now >= self.at_s and self.has_news:
            left = self.publish(terms)
            done = time.monotonic()
            pause = max(self._every_s, (done - now) * (1 / self._share - 1))
            self.at_s = done if left and idle else done + pause

    def publish(self, terms: Mapping[int, int]) -> bool:
        """Publish at most `max_changes`; return whether some are left. terms: lease terms, for batch numbers.

        Raises: DependencyUnavailable; then nothing counts as published.
        """
        started = time.perf_counter()
        numbers = sorted(number for number, state in self._registry.partitions.items() if not state.is_quiet)
        batches = self._batches(numbers, terms)
        deltas = [delta for batch in batches for delta in batch.deltas]
        if deltas or self._unreadable:
            tombstones = [key for batch in batches for key in batch.tombstones]
            with self._tracing.batch("publish deltas", self._traceparents, deltas=len(deltas)):
                self._outbox.publish(deltas, self._unreadable, tombstones)
            self._unreadable, self._traceparents = [], []
            entries = sum(len(batch.entries) for batch in batches)
            self._metrics.published(len(deltas) - entries, entries, time.perf_counter() - started)
        with self._registry.lock:
            for batch in batches:
                batch.published()
        return self._count_fresh(numbers)

    def close(self) -> None:
        self._outbox.close()

    def _batches(self, numbers: Sequence[int], terms: Mapping[int, int]) -> list[Batch]:
        room, batches = self._max_changes, list[Batch]()
        self._turn += 1
        for step in range(len(numbers)):
            # The first partition rotates, so that one partition's backlog does not delay the others.
            number = numbers[(step + self._turn) % len(numbers)]
            self._sequence += 1
            batch_number = terms.get(number, 0) * _BATCHES_PER_TERM + self._sequence
            with self._registry.lock:
                batch = self._publisher.batch(self._registry.partitions[number], batch_number, room)
            if batch is not None:
                batches.append(batch)
                room -= len(batch.items) + len(batch.entries)
        return batches

    def _count_fresh(self, numbers: Sequence[int]) -> bool:
        left, done_ms = False, time.time_ns() // 1_000_000
        for number in numbers:
            state = self._registry.partitions[number]
            if state.outgoing.num_changes:
                left = True
            else:
                waited = self._waiting.pop(number, [])
                self._metrics.fresh(max(0, done_ms - recorded_ms) / 1000 for recorded_ms in waited)
        return left

"""Makes deltas of a partition's state for readers of `index-deltas`, and publishes them in batches.

The deltas of a batch are acknowledged together. They depend only on the state, so a repetition is harmless. An item is
published if it is known, is not withdrawn and has a nonzero sum. A new item also needs enough users; until then it may
be published from its text.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.content import TextStates
from services.algorithms.pefa.policy import SharePolicy
from services.algorithms.pefa.refresh import refreshed
from services.algorithms.pefa.sums import SumsOf
from services.algorithms.scoring.states import ItemStates
from services.contracts.topics.index_deltas import IndexDelta, ItemDelta, MemoryDelta
from services.platform.request_context import OFF, Tracing
from services.platform.stream.records import DeadLetter
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.records import Entry, Interaction, Listing
from services.refresher.metrics import RefresherMetrics
from services.refresher.ports import Outbox

Floats = npt.NDArray[np.float64]

WITHDRAWN = "withdrawn"
UNKNOWN = "unknown item"
TOO_FEW = "too few users"
NO_DIRECTION = "no direction"
NOTHING = "no interactions"

# A new item that is not published for these reasons is published from its text.
_TEXT_REASONS = (NOTHING, TOO_FEW, NO_DIRECTION)
# Texts encoded per batch, while interactions wait.
_MAX_TEXTS = 8


class ContentStates:
    """The listed items' texts, and the states encoded so far."""

    def __init__(self, texts: TextStates) -> None:
        self._texts = texts
        self._listings: dict[str, Listing] = {}
        self._states: dict[str, ItemStates] = {}

    def put(self, listing: Listing) -> None:
        """Store a listing; a changed text drops its state."""
        if listing != self._listings.get(listing.item_id):
            self._listings[listing.item_id] = listing
            self._states.pop(listing.item_id, None)

    def __contains__(self, item_id: object) -> bool:
        listing = self._listings.get(str(item_id))
        return listing is not None and bool(listing.title or listing.categories)

    def of(self, item_ids: Sequence[str]) -> ItemStates:
        """The states of one or more items with texts."""
        new = [self._listings[item_id] for item_id in item_ids if item_id not in self._states]
        if new:
            made = self._texts.of([one.title for one in new], [one.categories for one in new])
            for row, listing in enumerate(new):
                gate = None if made.gate is None else made.gate[row : row + 1]
                self._states[listing.item_id] = ItemStates(components=made.components[row : row + 1], gate=gate)
        return ItemStates.joined([self._states[item_id] for item_id in item_ids])


@dataclass(slots=True)
class Batch:
    """Changes of one partition to publish together.

    tombstones: keys dropped in the previous batch, written before this one. If compaction deleted the last record of
    the previous batch, this batch ends it for readers.
    """

    partition: Partition
    deltas: list[IndexDelta]
    items: list[str]
    entries: list[str]

    @property
    def tombstones(self) -> list[bytes]:
        return self.partition.outgoing.dropped if self.deltas else []

    def published(self) -> None:
        state = self.partition
        for item_id in self.items:
            state.outgoing.dirty_items.pop(item_id, None)
            state.outgoing.published.pop(item_id, None)
        changes = (delta.change for delta in self.deltas)
        written = [one.item_id for one in changes if isinstance(one, ItemDelta) and not one.dropped]
        state.outgoing.published.update(dict.fromkeys(written))
        state.outgoing.dirty_entries.difference_update(self.entries)
        if self.deltas:
            state.outgoing.dropped = [delta.key for delta in self.deltas if delta.change.dropped]


@dataclass(kw_only=True, eq=False)
class Publisher:
    """Makes batches. `withdrawn` tells for each listed item whether it is withdrawn; it may change.

    `content` has states from texts, if a text encoder is configured. `new_item_policy` is the model weight policy of
    new items. If it is None, each partition chooses it from its sums.
    """

    weight_policy: SharePolicy
    min_users: int
    withdrawn: Mapping[str, bool]
    content: ContentStates | None = None
    new_item_policy: SharePolicy | None = None

    def reasons(self, state: Partition, item_ids: Sequence[str]) -> list[str]:
        """Why each item is not published; "" if it is."""
        sums = state.sums.of(item_ids)
        reasons = []
        for row, item_id in enumerate(item_ids):
            if self.withdrawn.get(item_id, False):
                reasons.append(WITHDRAWN)
            elif not state.is_known(item_id):
                reasons.append(UNKNOWN)
            elif not sums.counts[row]:
                reasons.append(NOTHING)
            elif state.rules.items.is_new(item_id) and not state.has_users(item_id, self.min_users):
                reasons.append(TOO_FEW)
            else:
                reasons.append("" if sums.sums[row].any() else NO_DIRECTION)
        return reasons

    def model_weights(self, state: Partition, item_ids: Sequence[str]) -> Floats:
        """lambda of each item (n,); 0 if unknown to training."""
        return np.where(_in_model(state, item_ids), self._lambdas(state, item_ids, state.sums.of(item_ids)), 0.0)

    def batch(self, state: Partition, number: int, limit: int) -> Batch | None:
        """Return a batch of at most `limit` changes, or None if there are no changes."""
        item_ids = _first(state.outgoing.dirty_items, limit)
        entry_ids = _first(state.outgoing.dirty_entries, limit - len(item_ids))
        changes: list[ItemDelta | MemoryDelta] = [*self._items(state, item_ids), *_entries(state, entry_ids)]
        if not item_ids and not entry_ids:
            return None
        deltas = [
            IndexDelta(
                model_version=state.rules.items.model_version,
                partition=state.number,
                # An empty partition publishes only items from texts, with offset 0.
                offset=max(0, state.folded_offset),
                batch=number,
                last_of_batch=row == len(changes) - 1,
                newest_recorded_ms=state.newest_recorded_ms,
                change=change,
            )
            for row, change in enumerate(changes)
        ]
        return Batch(state, deltas, item_ids, entry_ids)

    def _items(self, state: Partition, item_ids: list[str]) -> list[ItemDelta]:
        """Return the items' deltas. Items whose texts have to wait move to the end of `dirty_items`."""
        reasons = dict(zip(item_ids, self.reasons(state, item_ids), strict=True))
        texts = [item_id for item_id in item_ids if self._is_published_from_text(state, item_id, reasons[item_id])]
        for item_id in texts[_MAX_TEXTS:]:
            state.outgoing.dirty_items[item_id] = state.outgoing.dirty_items.pop(item_id)
            item_ids.remove(item_id)
        found: list[ItemDelta] = []
        if self.content is not None and texts:
            texts = texts[:_MAX_TEXTS]
            nothing = np.zeros(len(texts))
            found = _item_deltas(texts, self.content.of(texts), nothing, nothing)
        for item_id in item_ids:
            reason = "" if item_id in texts else reasons[item_id]
            # An earlier process may have published an item after its last checkpoint, so items outside `published` are
            # dropped, too.
            was_taken_out = state.outgoing.dirty_items[item_id]
            if reason and (item_id in state.outgoing.published or was_taken_out or reason in (WITHDRAWN, NO_DIRECTION)):
                found.append(ItemDelta(item_id=item_id, dropped=True))
        live = [item_id for item_id in item_ids if not reasons[item_id]]
        if not live:
            return found
        sums = state.sums.of(live)
        lambdas = self._lambdas(state, live, sums)
        known, base = _in_model(state, live), state.rules.items.rows(live)
        base.components[~known] = 0
        states = refreshed(base, sums.sums, lambdas)
        return found + _item_deltas(live, states, np.where(known, lambdas, 0.0), sums.counts)

    def _is_published_from_text(self, state: Partition, item_id: str, reason: str) -> bool:
        new = state.rules.items.is_new(item_id)
        return self.content is not None and new and reason in _TEXT_REASONS and item_id in self.content

    def _lambdas(self, state: Partition, item_ids: Sequence[str], sums: SumsOf) -> Floats:
        """Lambda of each item (n,). New items' components are shorter, so they have their own policy."""
        known = self.weight_policy.model_share(sums.evidence, sums.coherence)
        new = (self.new_item_policy or state.new_item_policy).model_share(sums.evidence, sums.coherence)
        return np.where(_in_model(state, item_ids), known, new)


def _in_model(state: Partition, item_ids: Sequence[str]) -> npt.NDArray[np.bool_]:
    return np.array([not state.rules.items.is_new(item_id) for item_id in item_ids], bool)


def _item_deltas(
    item_ids: Sequence[str], states: ItemStates, lambdas: Floats, counts: npt.NDArray[np.number]
) -> list[ItemDelta]:
    return [
        ItemDelta(
            item_id=item_id,
            components=states.components[row],
            gate=None if states.gate is None else states.gate[row],
            model_share=float(lambdas[row]),
            num_interactions=int(counts[row]),
        )
        for row, item_id in enumerate(item_ids)
    ]


def _entries(state: Partition, entry_ids: Sequence[str]) -> list[MemoryDelta]:
    found = []
    for entry_id in entry_ids:
        entry = state.remembered.visible.get(entry_id)
        if entry is None:
            found.append(MemoryDelta(entry_id=entry_id, dropped=True))
            continue
        found.append(
            MemoryDelta(
                entry_id=entry_id,
                item_id=entry.item_id,
                components=entry.components.astype(np.float32),
                weight=entry.weight,
                type=entry.interaction_type,
                event_time_ms=entry.event_seconds * 1000,
            )
        )
    return found


def _first(keys: Iterable[str], count: int) -> list[str]:
    return list(islice(keys, max(0, count)))


# Batch numbers per lease term: a later term's numbers are higher.
_BATCHES_PER_TERM = 1 << 32
_MAX_WAITING = 10_000


class Publication:
    """Publishes batches. It is not thread-safe.

    A publication has at most `max_changes` changes over all partitions. `every_s` is the shortest pause between
    publications in seconds; there is none if changes are left and no records wait. `share` is the largest share of time
    for publications while records wait.
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
        """Write the dead letters now, because a checkpoint may include a record only after its dead letter is written.

        It raises what the outbox raises.
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
        """Publish at most `max_changes` changes; return whether changes are left.

        The lease terms `terms` determine the batch numbers. Raises: DependencyUnavailable; then nothing counts as
        published.
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

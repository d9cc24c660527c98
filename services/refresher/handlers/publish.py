"""What readers of `index-deltas` have to be told of a partition's state.

Content depends on the state alone (its age is stream time), so writing something again after a crash is harmless, and a
reader that holds something newer ignores it. An item is published when it is known, not withdrawn, points somewhere,
and, if only interactions speak for it, rests on enough users.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.policy import SharePolicy
from services.algorithms.pefa.refresh import refreshed
from services.algorithms.pefa.sums import SumsOf
from services.contracts.topics.index_deltas import IndexDelta, ItemDelta, MemoryDelta
from services.refresher.domain.partition import Partition
from services.refresher.handlers.content import ContentStates

Floats = npt.NDArray[np.float64]

WITHDRAWN = "withdrawn"
UNKNOWN = "unknown item"
TOO_FEW = "too few users"
NO_DIRECTION = "no direction"
NOTHING = "no interactions"

# What an item without a bundle state may lack to be published from interactions: its text stands in until then.
_STANDS_IN = (NOTHING, TOO_FEW, NO_DIRECTION)
# Texts encoded for one batch, about 10 ms each: interactions wait for it.
_MAX_TEXTS = 8
# Items that a sweep looks at in one turn: a few milliseconds.
_MAX_SWEPT = 500
# Below this a change of lambda through age alone is not worth a record.
_WEIGHT_STEP = 0.01


@dataclass(slots=True)
class Batch:
    """Changes of one partition to be published together; `model_weights`: of each item written.

    tombstones: keys that the batch before dropped, to be written in front of this one: a batch whose last record they
    replace is ended by the next batch of its writer, which is this one.
    """

    partition: Partition
    deltas: list[IndexDelta]
    items: list[str]
    entries: list[str]
    model_weights: dict[str, float]

    @property
    def tombstones(self) -> list[bytes]:
        return self.partition.outgoing.dropped if self.deltas else []

    def published(self) -> None:
        """All of it was acknowledged."""
        state = self.partition
        for item_id in self.items:
            state.outgoing.dirty_items.pop(item_id, None)
            state.outgoing.published.pop(item_id, None)
        state.outgoing.published.update(self.model_weights)
        state.outgoing.dirty_entries.difference_update(self.entries)
        if self.deltas:
            state.outgoing.dropped = [delta.key for delta in self.deltas if delta.change.dropped]


@dataclass(kw_only=True, eq=False)
class Publisher:
    """Makes batches. `withdrawn` says of each listed item whether it is; it may change outside.

    `content`: states of listed items from their texts, where a text encoder is configured. `new_item_policy`: how far
    new items may go, where that is not left to each partition's own sums.
    """

    weight_policy: SharePolicy
    min_users: int
    withdrawn: Mapping[str, bool]
    content: ContentStates | None = None
    new_item_policy: SharePolicy | None = None

    def reasons(self, state: Partition, item_ids: Sequence[str]) -> list[str]:
        """Why each item is not published; empty where it is."""
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
        """lambda of each item (n,): 0 for one that the model never saw."""
        return np.where(_in_model(state, item_ids), self._lambdas(state, item_ids, state.sums.of(item_ids)), 0.0)

    def sweep(self, state: Partition) -> None:
        """Mark those of the next items to sweep whose model weight has moved since, as stream time went on."""
        turn, state.outgoing.to_sweep = state.outgoing.to_sweep[:_MAX_SWEPT], state.outgoing.to_sweep[_MAX_SWEPT:]
        item_ids = [item_id for item_id in turn if item_id in state.outgoing.published and item_id in state.sums]
        if not item_ids:
            return
        before = np.array([state.outgoing.published[item_id] for item_id in item_ids])
        moved = np.abs(self.model_weights(state, item_ids) - before) > _WEIGHT_STEP
        for row in np.flatnonzero(moved).tolist():
            state.outgoing.dirty_items.setdefault(item_ids[row], False)

    def batch(self, state: Partition, number: int, limit: int) -> Batch | None:
        """At most `limit` changes under a batch number; None when nothing has changed."""
        item_ids = _first(state.outgoing.dirty_items, limit)
        entry_ids = _first(state.outgoing.dirty_entries, limit - len(item_ids))
        model_weights: dict[str, float] = {}
        changes: list[ItemDelta | MemoryDelta] = [
            *self._items(state, item_ids, model_weights),
            *_entries(state, entry_ids),
        ]
        if not item_ids and not entry_ids:
            return None
        deltas = [
            IndexDelta(
                model_version=state.rules.items.model_version,
                partition=state.number,
                # An empty partition has only what its items' texts say: that counts as its first record's.
                offset=max(0, state.folded_offset),
                batch=number,
                last_of_batch=row == len(changes) - 1,
                newest_recorded_ms=state.time.newest_recorded_ms,
                change=change,
            )
            for row, change in enumerate(changes)
        ]
        return Batch(state, deltas, item_ids, entry_ids, model_weights)

    def _items(self, state: Partition, item_ids: list[str], model_weights: dict[str, float]) -> list[ItemDelta]:
        """The deltas of these items; those whose texts have to wait are moved to the end of the queue and left out."""
        reasons = dict(zip(item_ids, self.reasons(state, item_ids), strict=True))
        texts = [item_id for item_id in item_ids if self._speaks_by_text(state, item_id, reasons[item_id])]
        for item_id in texts[_MAX_TEXTS:]:
            state.outgoing.dirty_items[item_id] = state.outgoing.dirty_items.pop(item_id)
            item_ids.remove(item_id)
        found = self._by_text(texts[:_MAX_TEXTS], model_weights)
        for item_id in item_ids:
            reason = "" if item_id in texts else reasons[item_id]
            # An earlier process may have published the item, which no checkpoint says: before something was taken out
            # of it, before a withdrawal, or before interactions cancelled each other.
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
        lambdas = np.where(known, lambdas, 0.0)
        for row, item_id in enumerate(live):
            model_weights[item_id] = float(lambdas[row])
            found.append(
                ItemDelta(
                    item_id=item_id,
                    components=states.components[row],
                    gate=None if states.gate is None else states.gate[row],
                    model_share=float(lambdas[row]),
                    num_interactions=int(sums.counts[row]),
                )
            )
        return found

    def _speaks_by_text(self, state: Partition, item_id: str, reason: str) -> bool:
        new = state.rules.items.is_new(item_id)
        return self.content is not None and new and reason in _STANDS_IN and item_id in self.content

    def _by_text(self, item_ids: Sequence[str], model_weights: dict[str, float]) -> list[ItemDelta]:
        if self.content is None or not item_ids:
            return []
        states = self.content.of(item_ids)
        model_weights.update(dict.fromkeys(item_ids, 0.0))
        return [
            ItemDelta(
                item_id=item_id,
                components=states.components[row],
                gate=None if states.gate is None else states.gate[row],
                model_share=0.0,
            )
            for row, item_id in enumerate(item_ids)
        ]

    def _lambdas(self, state: Partition, item_ids: Sequence[str], sums: SumsOf) -> Floats:
        """As they take effect: a new item's components are shorter than a trained one's."""
        ages = state.time.age_seconds(np.where(sums.counts > 0, sums.last_seconds, state.time.stream_ms // 1000))
        known = self.weight_policy.model_share(sums.evidence, sums.coherence, ages)
        new = (self.new_item_policy or state.new_item_policy).model_share(sums.evidence, sums.coherence, ages)
        return np.where(_in_model(state, item_ids), known, new)


def _in_model(state: Partition, item_ids: Sequence[str]) -> npt.NDArray[np.bool_]:
    return np.array([not state.rules.items.is_new(item_id) for item_id in item_ids], bool)


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

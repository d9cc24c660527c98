"""Describe the state: status with digests, one item's evidence, one user's contributions.

Reads lock the registry in slices of about a millisecond.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts.pseudonyms import PSEUDONYMS_BETWEEN
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.remembered import entry_id_of
from services.refresher.domain.rules import Rules
from services.refresher.handlers.publish import NOTHING, UNKNOWN, Publisher

# Between slices: a thread that locks again at once would starve the waiting one.
_PAUSE_S = 0.0001


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionStatus:
    """One partition. end_offset: one past the last record. checkpoint_offset: -1 without one."""

    partition: int
    folded_offset: int
    end_offset: int
    checkpoint_offset: int
    newest_recorded_ms: int | None
    digest: str
    num_items: int
    num_remembered: int
    counts: Mapping[str, int]
    other_models: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """This process's partitions."""

    model_version: str
    policy: str
    partitions: list[PartitionStatus]
    bytes_per_item: float
    bytes_per_remembered: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemEvidence:
    """An item's evidence. reason: why its interactions do not publish it. min_users: for an item unknown to
    training.
    """

    found: bool
    min_users: int
    num_interactions: int = 0
    num_users: int = 0
    evidence: float = 0.0
    coherence: float = 0.0
    model_share: float = 1.0
    reason: str = NOTHING
    is_published: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UserContributions:
    """A user's contributions to this process's partitions."""

    interactions: int
    items: int
    remembered: int
    forgotten_up_to: Mapping[int, int]
    partitions: list[int]


class Describe:
    """Reads the registry."""

    def __init__(self, registry: PartitionRegistry, publisher: Publisher, rules: Rules) -> None:
        self._registry, self._publisher, self._rules = registry, publisher, rules

    def status(self) -> Status:
        """Every partition with its digest. Cost: a hash over the sums that changed since the last call."""
        partitions = []
        with self._registry.lock:
            numbers = sorted(self._registry.partitions)
        for number in numbers:
            status = self._status_in_slices(number)
            if status is not None:
                partitions.append(status)
        empty = Partition(-1, self._rules, ())
        per_item, per_entry = float(empty.sums.bytes_per_item), float(empty.remembered.memory.bytes_per_entry)
        return Status(
            model_version=self._rules.items.model_version,
            policy=f"{self._rules.text} share={self._publisher.weight_policy.text}",
            partitions=partitions,
            bytes_per_item=per_item,
            bytes_per_remembered=per_entry,
        )

    def item(self, item_id: str) -> ItemEvidence:
        least = self._publisher.min_users
        with self._registry.lock:
            for state in self._registry.partitions.values():
                if item_id in state.sums:
                    return self._evidence(state, item_id)
                if item_id in state.pending:
                    count = len(state.pending.offsets(item_id))
                    return ItemEvidence(found=True, min_users=least, num_interactions=count, reason=UNKNOWN)
        return ItemEvidence(found=False, min_users=least)

    def user(self, pseudonym: str) -> UserContributions:
        """Return what a user contributed. pseudonym: one or several, joined with `PSEUDONYMS_BETWEEN`."""
        pseudonyms = pseudonym.split(PSEUDONYMS_BETWEEN)
        interactions = remembered = items = 0
        forgotten: list[Mapping[int, int]] = []
        with self._registry.lock:
            states = dict(self._registry.partitions)
        for state in states.values():
            numbers: set[int] = set()
            for name in pseudonyms:
                with self._registry.lock:
                    positions, found = state.ledger.of_user(name)
                    interactions, numbers = interactions + len(positions), numbers | found
                    remembered += sum(entry_id_of(position) in state.remembered.visible for position in positions)
                    # The sums still contain part of a leaving user.
                    forgotten.append({} if name in state.leaving else state.ledger.forgotten_up_to(name))
                time.sleep(_PAUSE_S)
            items += len(numbers)
        # The least forgotten offset of all partitions here.
        everywhere = set.intersection(*map(set, forgotten)) if forgotten else set()
        up_to = {partition: min(found[partition] for found in forgotten) for partition in sorted(everywhere)}
        return UserContributions(
            interactions=interactions,
            items=items,
            remembered=remembered,
            forgotten_up_to=up_to,
            partitions=sorted(states),
        )

    def _status_in_slices(self, number: int) -> PartitionStatus | None:
        """The status after hashing changes in slices; None if the partition was released."""
        while True:
            with self._registry.lock:
                state = self._registry.partitions.get(number)
                if state is None:
                    return None
                if state.sums.hash_some():
                    return self._status_of(state)
            time.sleep(_PAUSE_S)

    def _status_of(self, state: Partition) -> PartitionStatus:
        return PartitionStatus(
            partition=state.number,
            folded_offset=state.folded_offset,
            end_offset=max(self._registry.ends.get(state.number, 0), state.folded_offset + 1),
            checkpoint_offset=self._registry.checkpoints.get(state.number, -1),
            newest_recorded_ms=state.time.newest_recorded_ms,
            # While a forgotten user is subtracted, the digest equals no other.
            digest="" if state.leaving or state.returning else state.digest(),
            num_items=len(state.sums),
            num_remembered=len(state.remembered.memory),
            counts=dict(state.counts),
            other_models=dict(state.other_models),
        )

    def _evidence(self, state: Partition, item_id: str) -> ItemEvidence:
        sums = state.sums.of([item_id])
        return ItemEvidence(
            found=True,
            min_users=self._publisher.min_users,
            num_interactions=int(sums.counts[0]),
            num_users=state.num_users(item_id),
            evidence=float(sums.evidence[0]),
            coherence=float(sums.coherence[0]),
            model_share=float(self._publisher.model_weights(state, [item_id])[0]),
            reason=self._publisher.reasons(state, [item_id])[0],
            is_published=item_id in state.outgoing.published,
        )

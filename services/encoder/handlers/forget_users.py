"""Forget users: erase them from the state store and publish the forget to every partition of `attributions`.

Each encoder process reads `forgets` before it applies records, and erases the users of its home partitions. The order
makes a crash harmless:

1. `Forgotten` prevents new results from void records.
2. The forget is published; readers deduplicate by id.
3. The rest of the history is written to `histories`, so that no restore brings forgotten data back.
4. Each user's keys are deleted in one transaction that retains the applied positions.
5. The progress is stored.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from services.algorithms.bundles.event_schema import EventSchema, default_schema
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.stored_history import PackedHistory
from services.contracts.topics.attributions import Attributed, ForgetUpTo, Undo
from services.contracts.topics.forgets import Forget
from services.encoder.domain import cache_key
from services.encoder.ports import Keeper, Outbox
from services.platform.errors import Conflict, FreshetError
from services.platform.stream.kafka import partition_for
from services.platform.stream.ports import Offsets
from services.platform.stream.records import DeadLetter, Position, covers, is_covered
from services.user_state.forgetting import (
    ForgetRecord,
    KnownForgets,
    check_same_log,
    erase,
    packed,
    seen_in,
    whole_update,
)
from services.user_state.layout import home_of, num_partitions_of
from services.user_state.ports import Store
from services.user_state.values import ForgetsApplied, UserHistory
from services.user_state.write_histories import WriteHistories

log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class ForgetUsers:
    """Applies `forgets`.

    pseudonym_keys: the current one, then earlier ones. reader: the name of this progress in the store. check_in_step:
    raises Conflict if the store's watermarks differ.
    """

    known: KnownForgets
    store: Store
    outbox: Outbox
    encoder: Keeper
    model_version: str
    pseudonym_keys: Sequence[bytes]
    reader: str
    keep: WriteHistories | None = None
    check_in_step: Callable[[], None] = lambda: None
    schema: EventSchema = field(default_factory=default_schema)
    # The progress in this process's partitions.
    _progress: ForgetsApplied = field(default_factory=lambda: ForgetsApplied("", {}, {}), init=False)
    # The epoch, and all partitions' last known progress. Replaced as a whole, because other threads read it.
    _applied: tuple[str, Mapping[int, int]] = field(default=("", {}), init=False)

    def resync(self, epoch: str, ends: Offsets, partitions: Collection[int] | None = None) -> int:
        """Read the topic, apply the forgets that this store does not reflect, and return their number. ends: see
        `check_same_log`. partitions: home partitions whose users to erase; None means all. Raises: PreconditionFailed.
        """
        self.known.read()
        check_same_log(self.known.named, ends)
        found = self.store.forgets_applied(self.reader, epoch)
        self._applied = epoch, dict(found.offsets)
        self._progress = found if partitions is None else found.of(partitions)
        return self._apply(self.known.behind(self._progress.offset))

    def follow(self) -> int:
        """Apply new forgets; return their number. After an error, call `resync`."""
        return self._apply(self.known.read())

    def check(self) -> None:
        """Check the store. Raises: Conflict if it lost an applied forget; DependencyUnavailable."""
        epoch, _ = self._applied
        found = self.store.forgets_applied(self.reader, epoch)
        if found.of(self._progress.texts) != self._progress:
            raise Conflict("the state store is not where the last forget left it")
        self._applied = epoch, found.offsets

    def applied_up_to(self, user_id: str) -> Mapping[int, int]:
        """Return the user's last forgotten offset per partition; empty until the user is erased. Thread-safe."""
        epoch, offsets = self._applied
        found = self.known.of(user_id)
        if found is None or not offsets:
            return {}
        offset, up_to = found
        return up_to if offset <= offsets[home_of(user_id, epoch).partition] else {}

    def close(self) -> None:
        self.known.topic.close()

    def _apply(self, records: Sequence[ForgetRecord]) -> int:
        unreadable, epoch = self.known.unreadable, self._applied[0]
        if not records and not unreadable:
            return 0
        forgets = [record.forget for record in records if record.forget is not None and self._is_ours(record)]
        latest = {forget.user_id: forget for forget in forgets}
        histories = self.store.load_users(latest.keys(), epoch)
        # An emptied or older store's histories must not be written.
        self.check_in_step()
        voided = [one for forget in forgets for one in self._voided(forget)]
        messages: list[Attributed] = [*voided]
        updates = []
        kept: dict[str, PackedHistory | None] = {}
        for forget in latest.values():
            user_id = forget.user_id
            history, up_to = histories[user_id], self.known.forgotten.up_to(user_id)
            if covers(history.forgotten, up_to):
                continue
            rest = erase(history, up_to)
            seen = seen_in(rest.events)
            # The remaining events have no state until the next event or request.
            updates.append(whole_update(user_id, self.model_version, rest, seen, self.schema, expected=rest.expected))
            if not history.is_lost:  # a lost user is erased when restored
                kept[user_id] = packed(rest, seen) if rest.positions else None
            messages += self._tainted(forget, history, rest)
        dead_letters = [DeadLetter(one.record, one.reason) for one in unreadable if self._is_ours(one)]
        self.outbox.publish(messages, dead_letters, voided)
        if self.keep is not None:
            self.keep.write(kept)
        self.store.rewrite(updates, epoch, self._progress)
        # Also users of partitions that this process lost just now.
        self._drop_cached({record.forget.user_id for record in records if record.forget is not None})
        offsets = [record.record.offset for record in (*records, *unreadable)]
        self.store.note_forgets(self._progress, max(offsets), epoch)
        unreadable.clear()
        self._applied = epoch, {**self._applied[1], **self._progress.offsets}
        return len(forgets)

    def _is_ours(self, record: ForgetRecord) -> bool:
        home = partition_for(record.record.key or b"", num_partitions_of(self._applied[0]))
        return home in self._progress.texts

    def _drop_cached(self, users: Collection[str]) -> None:
        try:
            self.encoder.drop([cache_key(user_id) for user_id in users])
        except FreshetError as exc:
            # The cache is bounded and never changes a state, so the forget continues.
            log.warning("encoder_cache_not_dropped", users=len(users), reason=exc.message)

    def _voided(self, forget: Forget) -> list[ForgetUpTo]:
        return [
            ForgetUpTo(
                forget_id=forget.forget_id,
                up_to=forget.up_to,
                user_pseudonym=pseudonym_of(forget.user_id, key),
                recorded_ms=forget.requested_ms,
            )
            for key in self.pseudonym_keys
        ]

    def _tainted(self, forget: Forget, history: UserHistory, rest: UserHistory) -> list[Undo]:
        """Undo the attributions of interactions that arrived while the forget was in flight: their query states came
        from void records. The interactions and their search clicks stay.
        """
        void = any(is_covered(rest.forgotten, entry.partition, entry.offset) for entry in history.recent)
        if not void and len(rest.events) == len(history.events):
            return []
        # `rest` has no item of void or undone records.
        items = {Position(entry.partition, entry.offset): entry.item_id for entry in rest.recent if entry.item_id}
        items |= {Position(event.partition, event.offset): event.item_id for event in rest.events}
        pseudonym = pseudonym_of(forget.user_id, self.pseudonym_keys[0])
        return [
            Undo(
                event_id="",
                item_id=item_id,
                undoes=place,
                event_time_ms=forget.requested_ms,
                recorded_ms=forget.requested_ms,
                partition=place.partition,
                offset=place.offset,
                user_pseudonym=pseudonym,
            )
            for place, item_id in items.items()
        ]

"""Forget users: whole users out of the state store, and the word of it into every partition of `attributions`.

Each encoder process reads `forgets` whole when it starts, before it applies anything, and follows it. It erases the
users who are at home in its partitions, and notes that for these partitions: whoever takes one over goes on from there.
The order makes a crash harmless: first nothing more is made of what is void (`Forgotten`, which `apply_records` asks),
then the voided user is published (readers know it by its id), then the user's keys go in one transaction that leaves
the applied positions, then the progress is noted in the state store, so that a store that comes back older is cleaned
again. What is to stay is written to `histories` before, so that no history that the store lost brings the user back.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from services.algorithms.bundles.event_schema import EventSchema, default_schema
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.retraction import ForgetUpTo, Undo, covers, is_covered
from services.contracts.stored_history import PackedHistory
from services.contracts.topics.attributions import Attributed
from services.contracts.topics.forgets import Forget
from services.encoder.encoding import cache_key
from services.encoder.ports import Keeper, Outbox
from services.platform.errors import Conflict, FreshetError
from services.platform.stream.kafka import partition_for
from services.platform.stream.ports import Offsets
from services.platform.stream.position import Position
from services.platform.stream.record import DeadLetter
from services.user_state.forget_topic import ForgetRecord, KnownForgets
from services.user_state.forgetting import check_same_log, erase, packed, pseudonyms_of, seen_in, whole_update
from services.user_state.keep_histories import KeepHistories
from services.user_state.layout import home_of, num_partitions_of
from services.user_state.ports import Store
from services.user_state.values import ForgetsApplied, UserHistory

log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class ForgetUsers:
    """Applies `forgets`. pseudonym_keys: the present one, then those of before, under which there may be something of
    users still. reader: names all who share the stream in the progress that they note. keep: the durable histories.
    check_in_step: raises Conflict where the store is not the one whose records were applied."""

    known: KnownForgets
    store: Store
    outbox: Outbox
    encoder: Keeper
    model_version: str
    pseudonym_keys: Sequence[bytes]
    reader: str
    keep: KeepHistories | None = None
    check_in_step: Callable[[], None] = lambda: None
    schema: EventSchema = field(default_factory=default_schema)
    # Of this process's partitions.
    _progress: ForgetsApplied = field(default_factory=lambda: ForgetsApplied("", {}, {}), init=False)
    # The epoch, and how far those of all partitions were when the store was asked last. Replaced as a whole: other
    # threads read it.
    _applied: tuple[str, Mapping[int, int]] = field(default=("", {}), init=False)

    def resync(self, epoch: str, ends: Offsets, partitions: Collection[int] | None = None) -> int:
        """Read on, then apply whatever this store has not seen; the number of forgets applied.

        ends: one past the last record of each assigned partition of `interactions`. partitions: whose users are erased;
        None: all.
        Raises: PreconditionFailed when a forget names a position that the topic does not have (it is another one).
        """
        self.known.read()
        check_same_log(self.known.named, ends)
        found = self.store.forgets_applied(self.reader, epoch)
        self._applied = epoch, dict(found.offsets)
        self._progress = found if partitions is None else found.of(partitions)
        return self._apply(self.known.behind(self._progress.offset))

    def follow(self) -> int:
        """Apply what came since; the number of forgets applied. After an error only `resync` goes on."""
        return self._apply(self.known.read())

    def check(self) -> None:
        """Raises: Conflict when the store lost what was applied to it; DependencyUnavailable."""
        epoch, _ = self._applied
        found = self.store.forgets_applied(self.reader, epoch)
        if found.of(self._progress.texts) != self._progress:
            raise Conflict("the state store is not where the last forget left it")
        self._applied = epoch, found.offsets

    def applied_up_to(self, user_id: str) -> Mapping[int, int]:
        """Per partition the last forgotten offset, once the user is erased; another process's work is known within a
        second. From any thread."""
        epoch, offsets = self._applied
        found = self.known.of(user_id)
        if found is None or not offsets:
            return {}
        offset, up_to = found
        return up_to if offset <= offsets[home_of(user_id, epoch).partition] else {}

    def close(self) -> None:
        """Give the connection up."""
        self.known.topic.close()

    def _apply(self, records: Sequence[ForgetRecord]) -> int:
        unreadable, epoch = self.known.unreadable, self._applied[0]
        if not records and not unreadable:
            return 0
        forgets = [record.forget for record in records if record.forget is not None and self._is_ours(record)]
        latest = {forget.user_id: forget for forget in forgets}
        histories = self.store.load_users(latest.keys(), epoch)
        # What an emptied or older store says of users must not go into `histories`.
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
            # Later events have no state until the next one comes or somebody asks for one.
            updates.append(whole_update(user_id, self.model_version, rest, seen, self.schema, expected=rest.expected))
            if not history.is_lost:  # what restores the user erases, too
                kept[user_id] = packed(rest, seen) if rest.positions else None
            messages += self._tainted(forget, history, rest)
        dead_letters = [DeadLetter(one.record, one.reason) for one in unreadable if self._is_ours(one)]
        self.outbox.publish(messages, dead_letters, voided)
        if self.keep is not None:
            self.keep.write(kept)
        self.store.rewrite(updates, epoch, self._progress)
        # Of everybody: a partition may have been this process's until a moment ago.
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
            # Its cache is bounded, in memory, and never decides what a state is: no reason to hold a forget up.
            log.warning("encoder_cache_not_dropped", users=len(users), reason=exc.message)

    def _voided(self, forget: Forget) -> list[ForgetUpTo]:
        """What goes out of a forget: under each pseudonym that the user ever had."""
        return [
            ForgetUpTo(
                forget_id=forget.forget_id,
                up_to=forget.up_to,
                user_pseudonym=pseudonym,
                recorded_ms=forget.requested_ms,
            )
            for pseudonym in pseudonyms_of(forget.user_id, self.pseudonym_keys)
        ]

    def _tainted(self, forget: Forget, history: UserHistory, rest: UserHistory) -> list[Undo]:
        """Interactions that came while the forget was on its way: the query states that went out with them were made
        of what is void now, so they are taken back, also where either has left the window since. They stay in the
        user's own history, and search clicks among them stay: words hold nothing of what came before."""
        void = any(is_covered(rest.forgotten, entry.partition, entry.offset) for entry in history.recent)
        if not void and len(rest.events) == len(history.events):
            return []
        # Of what is void, and of what was undone, `rest` names no item.
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

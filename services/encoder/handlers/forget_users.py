"""Forget users: whole users out of the state store, and the word of it into every partition of `attributions`.

Each encoder process reads `forgets` whole when it starts, before it applies anything, and follows it. It erases the
users who are at home in its partitions, and notes that for these partitions: whoever takes one over goes on from there.
The order makes a crash harmless: first nothing more is made of what is void (`Forgotten`, which `apply_records` asks),
then the voided user is published (readers know it by its id), then the user's keys go in one transaction that leaves
the applied positions, then the progress is noted in the state store, so that a store that comes back older is cleaned
again. What is to stay is written to `histories` before, so that no history that the store lost brings the user back.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from services.algorithms.event_schema import EventSchema, default_schema
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.retraction import ForgetUpTo, Undo, covers, furthest, is_covered
from services.contracts.stored_history import PackedHistory
from services.contracts.topics.attributions import Attributed
from services.contracts.topics.forgets import Forget
from services.encoder.encoding import cache_key, turned_down
from services.encoder.ports import ForgetLog, Keeper, Outbox
from services.platform.errors import Conflict, DependencyUnavailable, FreshetError
from services.platform.stream.kafka import partition_for
from services.platform.stream.ports import Offsets
from services.platform.stream.position import Position
from services.platform.stream.record import DeadLetter
from services.user_state.forgetting import (
    ForgetRecord,
    Forgotten,
    check_same_log,
    erase,
    packed,
    pseudonyms_of,
    seen_in,
)
from services.user_state.keep_histories import KeepHistories
from services.user_state.layout import home_of, num_partitions_of
from services.user_state.ports import Store
from services.user_state.values import ForgetsApplied, UserHistory, UserUpdate

log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class ForgetUsers:
    """Applies `forgets`. reader: names all who share the stream in the progress that they note. keep: the durable
    histories. check_in_step: raises Conflict where the store is not the one whose records were applied. ends: one past
    the last record of each partition of `interactions`."""

    log: ForgetLog
    store: Store
    outbox: Outbox
    encoder: Keeper
    forgotten: Forgotten
    model_version: str
    pseudonym_key: bytes
    reader: str
    # Keys of before, under which there may be something of users still.
    earlier_keys: Sequence[bytes] = ()
    keep: KeepHistories | None = None
    check_in_step: Callable[[], None] = lambda: None
    ends: Callable[[], Offsets] = dict
    schema: EventSchema = field(default_factory=default_schema)
    _epoch: str = field(default="", init=False)
    # Of this process's partitions; and how far those of all partitions were when the store was asked last.
    _progress: ForgetsApplied = field(default_factory=lambda: ForgetsApplied("", {}, {}), init=False)
    _offsets: dict[int, int] = field(default_factory=dict, init=False)
    # The latest of each user, as compaction keeps them; and what could not be read and is no dead letter yet.
    _latest: dict[str, ForgetRecord] = field(default_factory=dict, init=False)
    _unreadable: list[ForgetRecord] = field(default_factory=list, init=False)
    # Read and not compared with the log's ends yet; whether some were ahead of them when it was tried last; and per
    # partition the furthest that any forget names.
    _compared_next: list[ForgetRecord] = field(default_factory=list, init=False)
    _was_ahead: bool = field(default=False, init=False)
    _named: Mapping[int, int] = field(default_factory=dict, init=False)
    # Of what `applied_up_to` asks for.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def resync(self, epoch: str, ends: Offsets, partitions: Collection[int] | None = None) -> int:
        """Read on, then apply whatever this store has not seen; the number of forgets applied.

        ends: one past the last record of each assigned partition of `interactions`. partitions: whose users are erased;
        None: all.
        Raises: PreconditionFailed when a forget names a position that the topic does not have (it is another one).
        """
        self._read()
        check_same_log(self._named, ends)
        found = self.store.forgets_applied(self.reader, epoch)
        with self._lock:
            self._epoch, self._offsets = epoch, dict(found.offsets)
        self._progress = found if partitions is None else found.of(partitions)
        done = self._progress.offset
        self._unreadable = [record for record in self._unreadable if record.record.offset > done]
        return self._apply([record for record in self._latest.values() if record.record.offset > done])

    def follow(self) -> int:
        """Apply what came since; the number of forgets applied. After an error only `resync` goes on."""
        return self._apply(self._read())

    def check(self) -> None:
        """Raises: Conflict when the store lost what was applied to it; DependencyUnavailable."""
        found = self.store.forgets_applied(self.reader, self._epoch)
        if found.of(self._progress.texts) != self._progress:
            raise Conflict("the state store is not where the last forget left it")
        with self._lock:
            self._offsets = found.offsets

    def applied_up_to(self, user_id: str) -> Mapping[int, int]:
        """Per partition the last forgotten offset, once the user is erased; another process's work is known within a
        second. From any thread."""
        with self._lock:
            latest = self._latest.get(user_id)
            if latest is None or not self._offsets:
                return {}
            applied = self._offsets[home_of(user_id, self._epoch).partition]
            return self.forgotten.up_to(user_id) if latest.record.offset <= applied else {}

    def close(self) -> None:
        """Give the connection up."""
        self.log.close()

    def _read(self) -> list[ForgetRecord]:
        self._compared_next += self.log.read()
        ends = self.ends() if self._compared_next else {}
        found = [_within(ends, record) for record in self._compared_next]
        ahead = [one.record.offset for one, within in zip(self._compared_next, found, strict=True) if within is not one]
        was_ahead, self._was_ahead = self._was_ahead, bool(ahead)
        if ahead and not was_ahead:  # a leader that was just elected may not know its end yet
            raise DependencyUnavailable(
                f"forgets {ahead[:10]} name positions behind the log's end; they are read again"
            )
        if ahead:
            log.error("forgets_ahead_of_log", offsets=ahead, ends=dict(ends))
        readable = []
        for record, within in zip(self._compared_next, found, strict=True):
            if record.forget is None or within.forget is None:
                self._unreadable.append(record)
                continue
            self._named = furthest(self._named, record.forget.up_to)
            with self._lock:
                self.forgotten.add(within.forget)
                self._latest[within.forget.user_id] = within
            readable.append(within)
        self._compared_next = []
        return readable

    def _apply(self, records: Sequence[ForgetRecord]) -> int:
        if not records and not self._unreadable:
            return 0
        forgets = [record.forget for record in records if record.forget is not None and self._is_ours(record)]
        latest = {forget.user_id: forget for forget in forgets}
        users = latest.keys()
        histories = self.store.load_users(users, self._epoch)
        # What an emptied or older store says of users must not go into `histories`.
        self.check_in_step()
        voided = [one for forget in forgets for one in self._voided(forget)]
        messages: list[Attributed] = [*voided]
        updates = []
        kept: dict[str, PackedHistory | None] = {}
        for forget in latest.values():
            user_id = forget.user_id
            history, up_to = histories[user_id], self.forgotten.up_to(user_id)
            if covers(history.forgotten, up_to):
                continue
            rest = erase(history, up_to)
            updates.append(self._update(user_id, rest))
            if not history.is_lost:  # what restores the user erases, too
                kept[user_id] = packed(rest, seen_in(rest.events)) if rest.positions else None
            messages += self._tainted(forget, history, rest)
        dead_letters = [DeadLetter(one.record, one.reason) for one in self._unreadable if self._is_ours(one)]
        self.outbox.publish(messages, dead_letters, voided)
        if self.keep is not None:
            self.keep.write(kept)
        self.store.rewrite(updates, self._epoch, self._progress)
        # Of everybody: a partition may have been this process's until a moment ago.
        self._drop_cached({record.forget.user_id for record in records if record.forget is not None})
        offsets = [record.record.offset for record in (*records, *self._unreadable)]
        self.store.note_forgets(self._progress, max(offsets), self._epoch)
        self._unreadable.clear()
        with self._lock:
            self._offsets.update(self._progress.offsets)
        return len(forgets)

    def _is_ours(self, record: ForgetRecord) -> bool:
        home = partition_for(record.record.key or b"", num_partitions_of(self._epoch))
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
            for pseudonym in pseudonyms_of(forget.user_id, (self.pseudonym_key, *self.earlier_keys))
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
        pseudonym = pseudonym_of(forget.user_id, self.pseudonym_key)
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

    def _update(self, user_id: str, rest: UserHistory) -> UserUpdate:
        """What is written in the place of all that was stored. Later events have no state until the next one comes or
        somebody asks for one."""
        return UserUpdate(
            user_id=user_id,
            model_version=self.model_version,
            expected=rest.expected,
            positions=rest.positions,
            events=rest.events,
            recent=rest.recent,
            seen_times=seen_in(rest.events),
            turned_down=turned_down(self.schema, rest.events),
            forgotten=rest.forgotten,
        )


def _within(ends: Offsets, record: ForgetRecord) -> ForgetRecord:
    """The record itself; one that names positions which the log does not have yet with the log's end in their place:
    what the user does later counts, whoever wrote the record."""
    if record.forget is None:
        return record
    named = record.forget.up_to
    up_to = {partition: min(offset, ends.get(partition, offset + 1) - 1) for partition, offset in named.items()}
    return record if up_to == named else replace(record, forget=replace(record.forget, up_to=up_to))

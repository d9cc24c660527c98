"""Apply records of `interactions` to user states, with an exactly-once effect.

The order within a batch is what makes a crash harmless at every point: attributions and search clicks (in the order of
the records that they come from) and dead letters are published first (readers know them by source position), then each
user is written under the condition that nobody wrote it in between, then the watermark moves under the same condition.
Whatever is delivered again finds the positions stored and is counted as it was the first time. Progress lives in the
state store alone; Kafka's committed offsets serve lag monitoring, and say up to where attributions went out before the
state store was lost.

Histories are the same for every model, so one process makes the states and attributions of several: its own, for which
the stream waits, and those beside it, whose failures cost their states and attributions alone.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from services.algorithms.popularity import joined, level_of, without
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.retraction import Undo, furthest
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.attributions import Attribution
from services.contracts.topics.interactions import SEARCH_CLICK, Interaction
from services.contracts.topics.search_clicks import SearchClick
from services.encoder.domain import EncodedStates, EncodeJob
from services.encoder.encoding import Vocabulary, attributed_state, encode_job, turned_down, user_state
from services.encoder.handlers.restore_users import RestoreUsers
from services.encoder.models import Model
from services.encoder.ports import Outbox, SequenceEncoder
from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.position import Position
from services.platform.stream.record import DeadLetter, SourceRecord
from services.platform.tracing import OFF, Tracing
from services.user_state.forgetting import Forgotten
from services.user_state.keep_histories import KeepHistories
from services.user_state.layout import home_of
from services.user_state.log_identity import LogIdentity, LostTail
from services.user_state.merging import (
    MAX_RECORDS_PER_USER,
    Arrival,
    Merge,
    Outcome,
    Prefix,
    merge,
    read_arrival,
    rounds,
)
from services.user_state.ports import Store
from services.user_state.values import (
    AdvanceStep,
    ModelState,
    PopularityStep,
    StoredState,
    StoreUsage,
    UserHistory,
    UserUpdate,
    now_ms,
)

log = structlog.get_logger()

# Of a turn, for looking for lost users.
_LOOK_S = 0.05
_COUNTED_AS = {
    Outcome.APPLIED: ("applied",),
    Outcome.DUPLICATE: ("duplicates",),
    Outcome.LATE: ("applied", "late"),
    Outcome.UNDONE: ("applied", "undone"),
    Outcome.UNDO_WITHOUT_EVENT: ("applied",),
    Outcome.FORGOTTEN: ("applied", "forgotten"),
    Outcome.KEPT_OUT: ("applied", "kept_out"),
    Outcome.KEPT_OUT_UNSEEN: ("applied", "kept_out"),
}

# What counts for what is popular. A late event does not: what the person did with the item before is not known.
_TAKEN = (Outcome.APPLIED, Outcome.KEPT_OUT, Outcome.KEPT_OUT_UNSEEN)


@dataclass(slots=True)
class Applied:
    """What a batch did: counts as stored, types of events that the schema does not name, users encoded, seconds in the
    model, and when the broker got the news."""

    counts: Counter[str] = field(default_factory=Counter)
    unknown_types: Counter[str] = field(default_factory=Counter)
    users: int = 0
    encode_seconds: float = 0.0
    recorded_ms: list[int] = field(default_factory=list)

    def add(self, other: "Applied") -> None:
        """Sum up."""
        self.counts += other.counts
        self.unknown_types += other.unknown_types
        self.users += other.users
        self.encode_seconds += other.encode_seconds
        self.recorded_ms += other.recorded_ms


@dataclass(slots=True)
class _UserWork:
    """One user within a batch: arrivals, their merge, and which states are wanted."""

    arrivals: list[Arrival]
    merged: Merge
    history: UserHistory
    # sequence number -> prefix lengths whose states are wanted
    wanted: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What a model answered to a batch: by user and sequence number, the states, and prefix length -> row of them."""

    vocabulary: Vocabulary
    found: Mapping[tuple[str, int], tuple[EncodedStates, Mapping[int, int]]]

    def after(self, user_id: str, prefix: Prefix) -> tuple[EncodedStates, int] | None:
        """The state after a prefix, as states and a row of them; None where there is none."""
        states, rows = self.found.get((user_id, prefix.sequence), (None, {}))
        row = rows.get(prefix.num_events)
        return None if states is None or row is None else (states, row)


@dataclass(slots=True)
class _Made:
    """What a model makes of a batch. states: of users whose history changed, where the model knows any of it.
    encode_seconds: 0 where there was nothing to encode."""

    attributions: list[Attribution] = field(default_factory=list)
    states: dict[str, StoredState] = field(default_factory=dict)
    encode_seconds: float = 0.0


@dataclass(kw_only=True, eq=False)
class ApplyRecords:
    """Applies batches of records. Holds what the state store last said about progress; `resync` asks it again.

    forgotten: who was forgotten up to where; whoever follows `forgets` adds to it. restore_users: brings back whom the
    store lost; None: over a store that loses nobody. stores_states: False when only the
    attributions are wanted (a model's, over a store of their own). attributes: False when no attributions are wanted.
    records_per_user: at most so many of one user are
    applied together. popularity_half_life_s: after it an event counts half as much for what is popular. epoch: the
    store's, as of the last `resync`. others: models of other version sets, whose states and attributions are made
    beside; another thread replaces them with `hold`. beside_failed: one of them failed in a batch, and left its part of
    it out.
    """

    store: Store
    outbox: Outbox
    encoder: SequenceEncoder
    vocabulary: Vocabulary
    pseudonym_key: bytes
    forgotten: Forgotten = field(default_factory=Forgotten)
    restore_users: RestoreUsers | None = None
    keep: KeepHistories | None = None
    stores_states: bool = True
    attributes: bool = True
    records_per_user: int = MAX_RECORDS_PER_USER
    popularity_half_life_s: float = 7 * 86_400
    tracing: Tracing = OFF
    clock_ms: Callable[[], int] = now_ms
    others: tuple[Model, ...] = ()
    beside_failed: Callable[[], None] = lambda: None
    epoch: str = field(default="", init=False)
    watermarks: dict[int, int] = field(default_factory=dict, init=False)
    # How often a log had lost its end, so that a new epoch was begun.
    tails_lost: int = field(default=0, init=False)
    # By home partition: users written since its watermark moved.
    _unfinished: dict[int, int] = field(default_factory=dict, init=False)
    # The look for lost users that goes on, when it began, when the next may begin, and how many keys the store had
    # taken away when the last one did.
    _looking: Iterator[Collection[str]] | None = field(default=None, init=False)
    _look_began_ms: int = field(default=0, init=False)
    _next_look_ms: int = field(default=0, init=False)
    _removed: int = field(default=-1, init=False)
    _attribute_from: dict[int, int] = field(default_factory=dict, init=False)
    _identity: LogIdentity = field(default_factory=LogIdentity, init=False)
    _may_have_lost: bool = field(default=False, init=False)
    _batch: threading.Lock = field(default_factory=threading.Lock, init=False)
    # Models that the store knows by name, and the kinds of their failures that were logged.
    _named: set[str] = field(default_factory=set, init=False)
    _logged: set[tuple[str, str]] = field(default_factory=set, init=False)

    def hold(self, others: tuple[Model, ...]) -> None:
        """Have these models beside the own one from the next batch on. Returns when the batch at hand, which may use
        those of before, is over. From any thread."""
        with self._batch:
            self.others = others

    def resync(self, stream: Reader) -> bool:
        """Take epoch and watermarks from the store and seek the stream there; True when the epoch is new to us.

        The stream's partitions are those that are applied from now on.
        A store without an epoch gets one and everything is read again from the beginning; what was committed before
        then yields no attributions a second time. Where a log has lost its end, the store is emptied and gets a new
        epoch, too; attributions of that partition go out again (readers know them by their position).
        Raises: PreconditionFailed when the topic is another one than the one whose records were applied.
        """
        partitions = stream.partitions()
        epoch, _ = self.store.ensure_epoch(stream.num_partitions())
        self._named.clear()
        self._name(self.vocabulary)
        progress = self.store.begin(partitions, epoch)
        self._attribute_from = dict(stream.committed())
        if self.watermarks.keys() != set(partitions):
            self._looking, self._removed = None, -1
            if self.restore_users is not None:
                self.restore_users.look_again()
        self.watermarks = {partition: progress[partition].watermark for partition in partitions}
        try:
            self._identity.resync(stream, self.watermarks, {p: progress[p].anchors for p in partitions})
        except LostTail as lost:
            self._begin_anew(stream, epoch, lost)
            return self.resync(stream)
        self._may_have_lost = False
        if self.keep is not None:
            self.keep.anchors = self._identity.text
            if self.keep.take_over(stream, epoch, progress):
                return self.resync(stream)
        self._unfinished = {partition: progress[partition].unfinished for partition in partitions}
        stream.seek({partition: watermark + 1 for partition, watermark in self.watermarks.items()})
        changed = epoch != self.epoch
        self.epoch = epoch
        if changed and self.restore_users is not None:
            self.restore_users.clear()
        if changed or self._looking is not None:
            self._looking, self._removed = None, -1
        return changed

    def _name(self, vocabulary: Vocabulary) -> None:
        if vocabulary.model_version not in self._named:
            self.store.add_model(vocabulary.model_version)
            self._named.add(vocabulary.model_version)

    def _begin_anew(self, stream: Reader, epoch: str, lost: LostTail) -> None:
        """Everything is read again from a log that lost its end. Raises: DependencyUnavailable when it looks so for the
        first time: a leader that was just elected may not know its end yet."""
        if not self._may_have_lost:
            self._may_have_lost = True
            raise DependencyUnavailable(f"{lost}, before what was applied; it is looked at once more")
        log.error("log_lost_its_tail", ends=dict(lost.ends), applied={p: self.watermarks[p] for p in lost.ends})
        stream.commit(dict.fromkeys(lost.ends, 0))
        self._identity.keep()
        if self.keep is not None:
            self.keep.void(stream.partitions(), stream.num_partitions())
        self.store.begin_anew(epoch)
        self.tails_lost += 1

    def check_log(self, stream: Reader, partitions: Collection[int]) -> None:
        """Before records of these partitions are applied: whether they are the logs that they were.

        Raises: Conflict when one is not; DependencyUnavailable.
        """
        self._identity.check(stream, partitions)

    def unknown_logs(self, ends: Offsets) -> Offsets:
        """The ends of those partitions of which nothing is remembered that would tell another log."""
        return {partition: end for partition, end in ends.items() if partition not in self._identity.partitions}

    def pass_over(self, positions: Offsets) -> None:
        """Nothing readable is left before these positions (aborted transactions and their marks, say): move the
        watermarks behind it. Raises: Conflict, DependencyUnavailable."""
        steps = [
            AdvanceStep(
                partition=partition,
                from_watermark=watermark,
                to_watermark=positions[partition] - 1,
                counts={},
                unfinished=self._unfinished[partition],
            )
            for partition, watermark in self.watermarks.items()
            if positions.get(partition, 0) - 1 > watermark
        ]
        if steps:
            self.store.advance(steps, self.epoch)
            self.watermarks.update({step.partition: step.to_watermark for step in steps})
            self._unfinished.update({step.partition: 0 for step in steps})

    def check_epoch(self) -> None:
        """Raises: Conflict when the store lost or changed its epoch, or went back; DependencyUnavailable."""
        epoch = self.store.epoch()
        if epoch != self.epoch:
            raise Conflict(f"the state store's epoch is {epoch}, not {self.epoch}")
        self.check_in_step()
        # On a cluster models' names may be lost alone; a forget would leave the states of those models.
        self._named.clear()
        self._name(self.vocabulary)

    def find_lost(self, *, look: bool) -> StoreUsage:
        """Begin to look for users of these partitions whom the store lost; `turn` goes on with it and brings them back.
        look: also if it says that it has taken no keys away since the last time (a key that somebody deleted is not
        counted)."""
        usage = self.store.usage()
        if self.restore_users is None or self._looking is not None or self.clock_ms() < self._next_look_ms:
            return usage
        if usage.removed != self._removed or look:
            self._looking, self._removed = self.store.find_lost(self.watermarks.keys(), self.epoch), usage.removed
            self._look_began_ms = self.clock_ms()
        return usage

    def _look(self, restore_users: RestoreUsers) -> int:
        """A slice of the look for lost users; how many it looked for, at least one while it goes on."""
        if self._looking is None:
            return 0
        until, num_lost = time.monotonic() + _LOOK_S, 0
        for found in self._looking:
            restore_users.add(found)
            num_lost += len(found)
            if time.monotonic() > until:
                return max(1, num_lost)
        self._looking = None
        # A full store takes keys away all the time: the next look rests for as long as this one took.
        self._next_look_ms = 2 * self.clock_ms() - self._look_began_ms
        return num_lost

    @property
    def is_busy(self) -> bool:
        """Whether `turn` has something to do at once."""
        return self.restore_users is not None and (self._looking is not None or self.restore_users.is_busy)

    def turn(self) -> int:
        """A slice of what is done between two polls: lost users come back, histories are kept. How much was done."""
        done = 0
        if self.restore_users is not None and self.is_busy:
            done = self._look(self.restore_users) + self.restore_users.turn(self.watermarks, self.epoch)
        elif self.keep is not None:
            self.keep.index()
        if self.keep is not None:
            self.keep.turn(self.watermarks)
        return done

    def is_held(self) -> bool:
        """Whether an import fills the store and the stream has to wait for it."""
        return self.store.is_held()

    def committable(self) -> dict[int, int]:
        """Offsets to commit: past the watermark, and never behind what was committed before."""
        return {
            partition: watermark + 1
            for partition, watermark in self.watermarks.items()
            if watermark + 1 > self._attribute_from.get(partition, 0)
        }

    def finish(self) -> None:
        """The process ends in step with the store: keep what changed."""
        if self.keep is not None:
            self.keep.finish(self.watermarks)

    def close(self) -> None:
        """Give the connections to the log and to `histories` up."""
        if self.restore_users is not None:
            self.restore_users.close()
        if self.keep is not None:
            self.keep.close()

    def apply(self, records: Sequence[SourceRecord]) -> Applied:
        """Apply records in stream order; those at or below the watermark are skipped.

        Raises: Conflict (resync, then go on), DependencyUnavailable and DeadlineExceeded (back off, resync);
        nothing is lost or applied twice by either.
        """
        records = [record for record in records if record.offset > self.watermarks[record.partition]]
        self._identity.came(records)
        arrivals = [read_arrival(record) for record in records]
        places = [
            (entry.partition, entry.interaction.user_id) if isinstance(entry, Arrival) else (entry.record.partition, "")
            for entry in arrivals
        ]
        total = Applied()
        traced = self.tracing.sampled(records)
        with self.tracing.batch("apply interactions", traced.values(), records=len(records)) as span:
            for part in rounds(places, self.records_per_user):
                with self._batch:
                    total.add(self._apply_together([arrivals[number] for number in part], traced, span))
        return total

    def rehearse(self, record: SourceRecord) -> None:
        """Do with a record what `apply` does, up to where something would be written. Raises: as `apply`."""
        arrival = read_arrival(record)
        if isinstance(arrival, DeadLetter):
            return
        user_id = arrival.interaction.user_id
        history = self.store.load_users([user_id], self.epoch)[user_id]
        # Without what says that a record was applied before: one that was is tried, too.
        history = replace(history, positions={}, recent=[])
        events = self._merged(user_id, history, [arrival]).events
        if events:
            job, _ = encode_job(self.vocabulary, user_id, events, [len(events)], cached=False)
            if job is not None:
                self.encoder.encode([job])

    def reject(self, record: SourceRecord, reason: str) -> Applied:
        """Dead-letter a record that proved to be poison (`services.platform.stream.poison`)."""
        return self._apply_together([DeadLetter(record, reason)])

    def _apply_together(
        self, entries: Sequence[Arrival | DeadLetter], traced: Collection[tuple[int, int]] = (), span: str = ""
    ) -> Applied:
        """traced: where entries lie that came with a trace. span: the traceparent of what their states are made in."""
        result = Applied()
        arrivals = [entry for entry in entries if isinstance(entry, Arrival)]
        dead_letters = [entry for entry in entries if isinstance(entry, DeadLetter)]
        work = self._merge(arrivals)
        own = self._make(Model(self.vocabulary, self.encoder), work, traced, span)
        result.encode_seconds = own.encode_seconds
        beside: dict[str, _Made | None] = {}
        for model in self.others:
            self._name(model.vocabulary)
            beside[model.vocabulary.model_version] = self._make_beside(model, work, traced, span)
        undos = [undo for user_id, user in work.items() for undo in self._undos(user_id, user)]
        attributions: list[Attribution | Undo] = [
            *(one for made in (own, *beside.values()) if made is not None for one in made.attributions),
            *undos,
        ]
        attributions.sort(key=lambda a: (a.partition, a.offset))
        clicks: list[SearchClick | Undo] = [
            *(click for user_id, user in work.items() for click in self._clicks(user_id, user)),
            *undos,
        ]
        clicks.sort(key=lambda c: (c.partition, c.offset))
        if attributions or dead_letters or clicks:
            with self.tracing.stage("publish attributions"):
                self.outbox.publish(attributions, dead_letters, clicks)
        updates = [
            self._update(user_id, user, own.states.get(user_id)) for user_id, user in work.items() if user.merged.news
        ]
        states = [
            _state_beside(update, version, made)
            for update in updates
            for version, made in beside.items()
            # A model that failed leaves the states of histories that changed behind: their position says so.
            if made is not None or update.state_change == "keep"
        ]
        homes = [home_of(update.user_id, self.epoch).partition for update in updates]
        if self.keep is not None:
            for update, home in zip(updates, homes, strict=True):
                self.keep.changing(update.user_id, home, update.positions)
        with self.tracing.stage("store states"):
            self.store.apply(updates, self.epoch, self.watermarks, states)
        for home in homes:
            if home in self._unfinished:
                self._unfinished[home] += 1
        counts = self._count(entries, work)
        self._advance(entries, counts, self._popularity(work))
        if self.keep is not None:
            self.keep.applied(self.watermarks)
        for partition_counts in counts.values():
            result.counts += partition_counts
        result.unknown_types = self._unknown_types(work)
        result.users = len(updates)
        result.recorded_ms = [arrival.recorded_ms for arrival in arrivals]
        return result

    def _merge(self, arrivals: Sequence[Arrival]) -> dict[str, _UserWork]:
        by_user: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_user.setdefault(arrival.interaction.user_id, []).append(arrival)
        histories = self.store.load_users(by_user.keys(), self.epoch)
        lost = [user_id for user_id, history in histories.items() if history.is_lost]
        if lost and self.restore_users is not None:
            self.restore_users(lost, self.watermarks, self.epoch)
            histories = {**histories, **self.store.load_users(lost, self.epoch)}
        self.check_in_step()
        work: dict[str, _UserWork] = {}
        for user_id, mine in by_user.items():
            history = histories[user_id]
            merged = self._merged(user_id, history, mine)
            wanted: dict[int, list[int]] = {}
            work[user_id] = _UserWork(mine, merged, history, wanted)
            for number, prefix in merged.preceding.items():
                if self._is_attributed(mine[number]):
                    wanted.setdefault(prefix.sequence, []).append(prefix.num_events)
            if merged.changed and self.stores_states:
                wanted.setdefault(len(merged.sequences) - 1, []).append(len(merged.events))
        return work

    def _make_beside(
        self, model: Model, work: Mapping[str, _UserWork], traced: Collection[tuple[int, int]], span: str
    ) -> _Made | None:
        """As `_make`; None where it fails: the states are then made when they are asked for."""
        try:
            return self._make(model, work, traced, span)
        except Exception as exc:
            # Whatever it is, the model that answers must not wait for it.
            kind = (model.vocabulary.model_version, type(exc).__name__)
            if kind not in self._logged:
                self._logged.add(kind)
                log.error("other_model_failed", model=model.vocabulary.model_version, exc_info=exc)
            self.beside_failed()
            return None

    def _make(
        self, model: Model, work: Mapping[str, _UserWork], traced: Collection[tuple[int, int]], span: str
    ) -> _Made:
        """Encode all that is wanted with a model, and what comes of it. Raises: as its encoder."""
        made = _Made()
        jobs: list[EncodeJob] = []
        rows_of: dict[tuple[str, int], Mapping[int, int]] = {}
        for user_id, user in work.items():
            for sequence, lengths in user.wanted.items():
                events = user.merged.sequences[sequence]
                job, rows = encode_job(model.vocabulary, user_id, events, lengths, cached=self.stores_states)
                if job is not None:
                    rows_of[user_id, sequence] = rows
                    jobs.append(job)
        if not jobs:
            return made
        started = time.perf_counter()
        with self.tracing.stage("encode"):
            answers = model.encoder.encode(jobs)
        made.encode_seconds = time.perf_counter() - started
        found = {place: (states, rows) for (place, rows), states in zip(rows_of.items(), answers, strict=True)}
        encoded, applied_ms = _Encoded(model.vocabulary, found), self.clock_ms()
        for user_id, user in work.items():
            made.attributions += self._attributions(user_id, user, encoded)
            is_traced = any((arrival.partition, arrival.offset) in traced for arrival in user.arrivals)
            state = _state(user_id, user, encoded, applied_ms, span if is_traced else "")
            if state is not None:
                made.states[user_id] = state
        return made

    def _merged(self, user_id: str, history: UserHistory, arrivals: Sequence[Arrival]) -> Merge:
        words, void = self.vocabulary, self.forgotten.up_to(user_id)
        # The store may know of a forget that another process applied a moment ago.
        if history.forgotten:
            void = furthest(void, history.forgotten)
        return merge(history, arrivals, words.max_history, words.schema, void)

    def check_in_step(self) -> None:
        """After users were loaded: what is published of an emptied or older store's could not be taken back.

        Raises: Conflict when the store is not where this writer left it; DependencyUnavailable.
        """
        found = self.store.progress(self.watermarks.keys(), self.epoch)
        if other := sorted(number for number, at in self.watermarks.items() if found[number].watermark != at):
            raise Conflict(f"the state store is not where it was left: partitions {other}")

    def _is_attributed(self, arrival: Arrival) -> bool:
        return self.attributes and arrival.offset >= self._attribute_from.get(arrival.partition, 0)

    def _attributions(self, user_id: str, user: _UserWork, encoded: _Encoded) -> Iterator[Attribution]:
        if not user.merged.preceding:
            return
        pseudonym = pseudonym_of(user_id, self.pseudonym_key)
        for number, prefix in user.merged.preceding.items():
            arrival, after = user.arrivals[number], encoded.after(user_id, prefix)
            if after is not None and self._is_attributed(arrival):
                last = user.merged.sequences[prefix.sequence][prefix.num_events - 1]
                asked_ms = arrival.interaction.event_time_ms
                yield Attribution(
                    state=attributed_state(encoded.vocabulary, *after, last.event_time_ms, asked_ms),
                    type=arrival.interaction.type,
                    value=arrival.interaction.value,
                    **arrival.fields(pseudonym),
                )

    def _clicks(self, user_id: str, user: _UserWork) -> Iterator[SearchClick]:
        """Search clicks that count. One too late for the history is left out, since it could not be taken back."""
        chosen = [n for n in user.merged.preceding if user.arrivals[n].interaction.type == SEARCH_CLICK]
        if not chosen:
            return
        pseudonym = pseudonym_of(user_id, self.pseudonym_key)
        for number in chosen:
            arrival = user.arrivals[number]
            if self._is_attributed(arrival):
                interaction = arrival.interaction
                yield SearchClick(query=interaction.query, value=interaction.value, **arrival.fields(pseudonym))

    def _undos(self, user_id: str, user: _UserWork) -> Iterator[Undo]:
        """Every event that was taken back: only its id is known, not its type, so attributions and clicks have each."""
        if not user.merged.undone:
            return
        pseudonym = pseudonym_of(user_id, self.pseudonym_key)
        for number, undone in user.merged.undone.items():
            arrival = user.arrivals[number]
            if self._is_attributed(arrival):
                fields = arrival.fields(pseudonym) | {"item_id": undone.item_id}
                yield Undo(undoes=undone.position, **fields)

    def _update(self, user_id: str, user: _UserWork, state: StoredState | None) -> UserUpdate:
        merged = user.merged
        return UserUpdate(
            user_id=user_id,
            model_version=self.vocabulary.model_version,
            expected=user.history.expected,
            positions=merged.positions,
            events=merged.events,
            recent=merged.recent,
            seen_times=merged.seen_times,
            unseen=merged.unseen,
            turned_down=turned_down(self.vocabulary.schema, merged.events),
            forgotten=user.history.forgotten,
            state=state,
            state_change="keep" if not merged.changed else "drop" if state is None else "set",
        )

    def _count(self, entries: Sequence[Arrival | DeadLetter], work: dict[str, _UserWork]) -> dict[int, Counter[str]]:
        counts: dict[int, Counter[str]] = {}
        for user in work.values():
            for arrival, outcome in zip(user.arrivals, user.merged.outcomes, strict=True):
                mine = counts.setdefault(arrival.partition, Counter())
                mine.update(_COUNTED_AS[outcome])
                item_id = arrival.interaction.item_id
                counts_nowhere = outcome in (Outcome.DUPLICATE, Outcome.FORGOTTEN)
                if item_id and not counts_nowhere and item_id not in self.vocabulary.item_index:
                    mine["unknown_items"] += 1
        for entry in entries:
            if isinstance(entry, DeadLetter):
                counts.setdefault(entry.record.partition, Counter())["dead_lettered"] += 1
        return counts

    def _unknown_types(self, work: dict[str, _UserWork]) -> Counter[str]:
        named = self.vocabulary.schema.types
        return Counter(
            arrival.interaction.type
            for user in work.values()
            for arrival, outcome in zip(user.arrivals, user.merged.outcomes, strict=True)
            if outcome in (Outcome.KEPT_OUT, Outcome.KEPT_OUT_UNSEEN, Outcome.APPLIED, Outcome.LATE)
            and arrival.interaction.type not in named
        )

    def _popularity(self, work: dict[str, _UserWork]) -> dict[int, PopularityStep]:
        """By partition what joins and what goes: of each person's events with an item the strongest counts, as far as
        the person's window and recent ids reach. What was taken back goes where the window still held it (the rest
        fades)."""
        made: dict[int, tuple[dict[str, float], dict[str, float]]] = {}
        for user in work.values():
            # What is delivered again is stored already: the person's events before it are those at lower offsets.
            first = {arrival.partition: arrival.offset for arrival in reversed(user.arrivals)}
            items = {arrival.interaction.item_id for arrival in user.arrivals}
            items.update(undone.item_id for undone in user.merged.undone.values())
            held: dict[Position, Interaction | StoredEvent] = {
                Position(event.partition, event.offset): event
                for event in user.history.events
                if event.item_id in items and event.offset < first.get(event.partition, math.inf)
            }
            # Those that the window does not hold: their weights are not known.
            others = {
                (one.item_id, one.outcome == Outcome.APPLIED)
                for one in user.history.recent
                if one.item_id in items
                and one.offset < first.get(one.partition, math.inf)
                and Position(one.partition, one.offset) not in held
            }
            for number, (arrival, outcome) in enumerate(zip(user.arrivals, user.merged.outcomes, strict=True)):
                undone = user.merged.undone.get(number)
                event = arrival.interaction if outcome in _TAKEN else None if undone is None else undone.event
                if event is None:
                    continue
                before = self._strongest(event.item_id, held)
                if undone is None:
                    held[Position(arrival.partition, arrival.offset)] = event
                else:
                    held.pop(undone.position, None)
                after = self._strongest(event.item_id, held)
                if before == after or (event.item_id, self.vocabulary.schema.of(event.type).history) in others:
                    continue
                levels = made.setdefault(arrival.partition, ({}, {}))[after < before]
                change = without(max(before, after), min(before, after))
                if change is not None:
                    levels[event.item_id] = joined(change, levels.get(event.item_id, -math.inf))
        return {
            partition: PopularityStep(half_life_s=self.popularity_half_life_s, joins=joins, goes=goes)
            for partition, (joins, goes) in made.items()
        }

    def _strongest(self, item_id: str, events: Mapping[Position, Interaction | StoredEvent]) -> float:
        """The highest level of these events with the item; -inf where none speaks for it."""
        weighed = (
            (self.vocabulary.schema.weight_for(event.type, event.value), event.event_time_ms)
            for event in events.values()
            if event.item_id == item_id
        )
        levels = (level_of(weight, time_ms, self.popularity_half_life_s) for weight, time_ms in weighed if weight)
        return max(levels, default=-math.inf)

    def _advance(
        self,
        entries: Sequence[Arrival | DeadLetter],
        counts: dict[int, Counter[str]],
        popular: Mapping[int, PopularityStep],
    ) -> None:
        last: dict[int, int] = {}
        for entry in entries:
            position = entry.record if isinstance(entry, DeadLetter) else entry
            last[position.partition] = max(position.offset, last.get(position.partition, -1))
        steps = [
            AdvanceStep(
                partition=partition,
                from_watermark=self.watermarks[partition],
                to_watermark=offset,
                counts=counts[partition],
                anchors=self._identity.text(partition),
                unfinished=self._unfinished[partition],
                popular=popular.get(partition),
            )
            for partition, offset in last.items()
        ]
        self.store.advance(steps, self.epoch)
        self.watermarks.update(last)
        self._unfinished.update(dict.fromkeys(last, 0))


def _state(user_id: str, user: _UserWork, encoded: _Encoded, applied_ms: int, traceparent: str) -> StoredState | None:
    """The new state of a user whose history changed."""
    merged = user.merged
    if merged.changed_by is None:
        return None
    after = encoded.after(user_id, Prefix(len(merged.sequences) - 1, len(merged.events)))
    if after is None:
        return None
    newest = user.arrivals[merged.changed_by]
    return StoredState(
        query_state=user_state(encoded.vocabulary, *after, merged.events),
        partition=newest.partition,
        offset=newest.offset,
        event_time_ms=merged.events[-1].event_time_ms,
        applied_ms=applied_ms,
        traceparent=traceparent,
    )


def _state_beside(update: UserUpdate, model_version: str, made: _Made | None) -> ModelState:
    """What becomes of the state of another model with an update."""
    state = None if made is None else made.states.get(update.user_id)
    return ModelState(
        user_id=update.user_id,
        model_version=model_version,
        positions=update.positions,
        forgotten=update.forgotten,
        state=state,
        change="keep" if update.state_change == "keep" else "drop" if state is None else "set",
        before=update.expected,
    )

"""Apply records of `interactions` to user states, with exactly-once effect.

The order makes a crash harmless. First, attributions, search clicks and dead letters are published; readers deduplicate
by source position. Then each user is written, unless another process changed it since. Then the watermark advances,
unless another process moved it. A redelivered record is counted with its first outcome.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.attributions import Attribution, Undo
from services.contracts.topics.interactions import SEARCH_CLICK
from services.contracts.topics.search_clicks import SearchClick
from services.encoder.domain import UserWork, Vocabulary, encode_job, popularity_steps
from services.encoder.handlers.encode import EncodeBatch, Made
from services.encoder.models import Model
from services.encoder.ports import Outbox, SequenceEncoder
from services.platform.request_context import OFF, Tracing
from services.platform.stream.ports import Reader
from services.platform.stream.records import DeadLetter, SourceRecord, furthest
from services.user_state.forgetting import Forgotten, turned_down
from services.user_state.layout import home_of
from services.user_state.merging import MAX_RECORDS_PER_USER, Arrival, Merge, Outcome, merge, read_arrival, rounds
from services.user_state.ports import Store
from services.user_state.restore_users import RestoreUsers
from services.user_state.stream_progress import StreamProgress
from services.user_state.values import ModelState, StoredState, StoreUsage, UserHistory, UserUpdate, now_ms
from services.user_state.write_histories import WriteHistories

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


@dataclass(slots=True)
class Applied:
    """A batch's stored counts, unknown event types, users written, seconds in the model, and the records' broker
    times.
    """

    counts: Counter[str] = field(default_factory=Counter)
    unknown_types: Counter[str] = field(default_factory=Counter)
    users: int = 0
    encode_seconds: float = 0.0
    recorded_ms: list[int] = field(default_factory=list)

    def add(self, other: "Applied") -> None:
        self.counts += other.counts
        self.unknown_types += other.unknown_types
        self.users += other.users
        self.encode_seconds += other.encode_seconds
        self.recorded_ms += other.recorded_ms


class ApplyRecords:
    """Applies batches of records. lost: restores lost users between batches."""

    def __init__(
        self,
        *,
        store: Store,
        outbox: Outbox,
        encoder: SequenceEncoder,
        vocabulary: Vocabulary,
        pseudonym_key: bytes,
        forgotten: Forgotten | None = None,
        restore_users: RestoreUsers | None = None,
        keep: WriteHistories | None = None,
        stores_states: bool = True,
        caches: bool = True,
        attributes: bool = True,
        records_per_user: int = MAX_RECORDS_PER_USER,
        popularity_half_life_s: float = 7 * 86_400,
        tracing: Tracing = OFF,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        """forgotten: the follower of `forgets` adds to it. restore_users, keep: None if the store cannot lose users.
        stores_states: whether to store states. caches: see `encode_job`. attributes: whether to make attributions.
        records_per_user: most records of a user applied together.
        """
        self.progress = StreamProgress(store, keep, vocabulary.model_version)
        self.encode_batch = EncodeBatch(
            own=Model(vocabulary, encoder),
            pseudonym_key=pseudonym_key,
            cached=stores_states and caches,
            tracing=tracing,
            clock_ms=clock_ms,
        )
        self._store, self._outbox, self._keep, self._restore = store, outbox, keep, restore_users
        self._forgotten = Forgotten() if forgotten is None else forgotten
        self._stores_states, self._attributes, self._records_per_user = stores_states, attributes, records_per_user
        self._half_life_s = popularity_half_life_s

    def resync(self, stream: Reader) -> bool:
        is_new_epoch = self.progress.resync(stream)
        if self._restore is not None:
            self._restore.resynced(self.progress.watermarks.keys(), is_new_epoch=is_new_epoch)
        return is_new_epoch

    def find_lost(self, *, look: bool) -> StoreUsage:
        """Return the store's usage; begin a scan for lost users if needed (`RestoreUsers.find`).

        Raises: DependencyUnavailable.
        """
        usage = self._store.usage()
        if self._restore is not None:
            self._restore.find(usage.removed, self.progress.epoch, look=look)
        return usage

    @property
    def is_restoring(self) -> bool:
        return self._restore is not None and self._restore.is_busy

    def check_model(self) -> None:
        self.encode_batch.own.encoder.check()

    def turn(self) -> int:
        """Restore lost users and write histories, for a slice of time between polls. Return the amount done."""
        done = 0
        if self._restore is not None and self._restore.is_busy:
            done = self._restore.turn(self.progress.watermarks, self.progress.epoch)
        elif self._keep is not None:
            self._keep.topic.index()
        if self._keep is not None:
            self._keep.turn(self.progress.watermarks)
        return done

    def finish(self) -> None:
        if self._keep is not None:
            self._keep.finish(self.progress.watermarks)

    def close(self) -> None:
        if self._restore is not None:
            self._restore.close()
        if self._keep is not None:
            self._keep.close()
        self._outbox.close()

    def apply(self, records: Sequence[SourceRecord]) -> Applied:
        """Apply records in stream order; skip those at or below the watermark.

        Raises: Conflict, DependencyUnavailable, DeadlineExceeded. After a resync no record is lost or applied twice.
        """
        records = [record for record in records if self.progress.is_new(record)]
        self.progress.identity.came(records)
        arrivals = [read_arrival(record) for record in records]
        places = [
            (entry.partition, entry.interaction.user_id) if isinstance(entry, Arrival) else (entry.record.partition, "")
            for entry in arrivals
        ]
        total, tracing = Applied(), self.encode_batch.tracing
        traced = tracing.sampled(records)
        with tracing.batch("apply interactions", traced.values(), records=len(records)) as span:
            for part in rounds(places, self._records_per_user):
                with self.encode_batch.running:
                    total.add(self._apply_together([arrivals[number] for number in part], traced, span))
        return total

    def fill(self, arrivals: Sequence[Arrival]) -> Mapping[int, Counter[str]]:
        """Apply all arrivals of some users during an import, in any order of users, without moving a watermark.

        Return the counts by partition, which the caller passes to `advance`. Raises: what `apply` raises.
        """
        return self._write_users(arrivals)[1]

    def rehearse(self, record: SourceRecord) -> None:
        """Process a record without writing. Raises: as `apply`."""
        arrival = read_arrival(record)
        if isinstance(arrival, DeadLetter):
            return
        user_id = arrival.interaction.user_id
        history = self._store.load_users([user_id], self.progress.epoch)[user_id]
        # Without positions, an applied record is processed too.
        history = replace(history, positions={}, recent=[])
        events = self._merged(user_id, history, [arrival]).events
        if events:
            job, _ = encode_job(self._words, user_id, events, [len(events)], cached=False)
            if job is not None:
                self.encode_batch.own.encoder.encode([job])

    def reject(self, record: SourceRecord, reason: str) -> Applied:
        """Dead-letter a poison record (`services.platform.stream.follower`)."""
        return self._apply_together([DeadLetter(record, reason)])

    def _apply_together(
        self, entries: Sequence[Arrival | DeadLetter], traced: Collection[tuple[int, int]] = (), span: str = ""
    ) -> Applied:
        applied, counts, work = self._write_users(entries, traced, span)
        self._advance(entries, counts, work)
        return applied

    def _write_users(
        self, entries: Sequence[Arrival | DeadLetter], traced: Collection[tuple[int, int]] = (), span: str = ""
    ) -> tuple[Applied, dict[int, Counter[str]], dict[str, UserWork]]:
        """traced: positions of entries with a trace. span: the states' traceparent."""
        arrivals = [entry for entry in entries if isinstance(entry, Arrival)]
        work = self._merge(arrivals, traced)
        own, beside = self.encode_batch(work, span)
        for model_version in beside:
            self.progress.name_model(model_version)
        self._publish(entries, work, [own, *(made for made in beside.values() if made is not None)])
        num_updated = self._write(work, own, beside)
        counts = self._count(entries, work)
        applied = Applied(
            counts=sum(counts.values(), Counter()),
            unknown_types=self._unknown_types(work),
            users=num_updated,
            encode_seconds=own.encode_seconds,
            recorded_ms=[arrival.recorded_ms for arrival in arrivals],
        )
        return applied, counts, work

    @property
    def _words(self) -> Vocabulary:
        return self.encode_batch.own.vocabulary

    def _merge(self, arrivals: Sequence[Arrival], traced: Collection[tuple[int, int]]) -> dict[str, UserWork]:
        by_user: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_user.setdefault(arrival.interaction.user_id, []).append(arrival)
        histories = self._load(by_user.keys())
        self.progress.check_in_step()
        work: dict[str, UserWork] = {}
        for user_id, mine in by_user.items():
            merged = self._merged(user_id, histories[user_id], mine)
            user = work[user_id] = UserWork(mine, merged, histories[user_id])
            user.is_traced = any((arrival.partition, arrival.offset) in traced for arrival in mine)
            if self._attributes:
                user.attributed = {
                    number
                    for number in merged.preceding.keys() | merged.undone.keys()
                    if self.progress.yields_attributions(mine[number].partition, mine[number].offset)
                }
            for number, prefix in merged.preceding.items():
                if number in user.attributed:
                    user.wanted.setdefault(prefix.sequence, []).append(prefix.num_events)
            if merged.changed and self._stores_states:
                user.wanted.setdefault(len(merged.sequences) - 1, []).append(len(merged.events))
        return work

    def _load(self, user_ids: Collection[str]) -> Mapping[str, UserHistory]:
        """The users' histories; lost users are restored first."""
        progress = self.progress
        histories = self._store.load_users(user_ids, progress.epoch)
        lost = [user_id for user_id, history in histories.items() if history.is_lost]
        if lost and self._restore is not None:
            self._restore(lost, progress.watermarks, progress.epoch)
            histories = {**histories, **self._store.load_users(lost, progress.epoch)}
        return histories

    def _merged(self, user_id: str, history: UserHistory, arrivals: Sequence[Arrival]) -> Merge:
        words, void = self._words, self._forgotten.up_to(user_id)
        # The store may have another process's newer forget.
        if history.forgotten:
            void = furthest(void, history.forgotten)
        return merge(history, arrivals, words.max_history, words.schema, void)

    def _publish(
        self, entries: Sequence[Arrival | DeadLetter], work: Mapping[str, UserWork], made: Sequence[Made]
    ) -> None:
        undos = [undo for user_id, user in work.items() for undo in self._undos(user_id, user)]
        attributions: list[Attribution | Undo] = [*(one for of_model in made for one in of_model.attributions), *undos]
        attributions.sort(key=lambda a: (a.partition, a.offset))
        clicks: list[SearchClick | Undo] = [
            *(click for user_id, user in work.items() for click in self._clicks(user_id, user)),
            *undos,
        ]
        clicks.sort(key=lambda c: (c.partition, c.offset))
        dead_letters = [entry for entry in entries if isinstance(entry, DeadLetter)]
        if attributions or dead_letters or clicks:
            with self.encode_batch.tracing.stage("publish attributions"):
                self._outbox.publish(attributions, dead_letters, clicks)

    def _clicks(self, user_id: str, user: UserWork) -> Iterator[SearchClick]:
        """Clicks to publish. A late click is left out, since it could not be undone."""
        chosen = [n for n in user.merged.preceding if user.arrivals[n].interaction.type == SEARCH_CLICK]
        if not chosen:
            return
        pseudonym = pseudonym_of(user_id, self.encode_batch.pseudonym_key)
        for number in chosen:
            if number in user.attributed:
                interaction = user.arrivals[number].interaction
                fields = user.arrivals[number].fields(pseudonym)
                yield SearchClick(query=interaction.query, value=interaction.value, **fields)

    def _undos(self, user_id: str, user: UserWork) -> Iterator[Undo]:
        """An undo per undone event. The event's type is unknown, so attributions and clicks both get the undo."""
        if not user.merged.undone:
            return
        pseudonym = pseudonym_of(user_id, self.encode_batch.pseudonym_key)
        for number, undone in user.merged.undone.items():
            if number in user.attributed:
                fields = user.arrivals[number].fields(pseudonym) | {"item_id": undone.item_id}
                yield Undo(undoes=undone.position, **fields)

    def _write(self, work: Mapping[str, UserWork], own: Made, beside: Mapping[str, Made | None]) -> int:
        """Write users with new records; return their number."""
        progress = self.progress
        updates = [
            self._update(user_id, user, own.states.get(user_id)) for user_id, user in work.items() if user.merged.news
        ]
        states = [
            _state_beside(update, version, made)
            for update in updates
            for version, made in beside.items()
            # If a model failed, its old states stay; their position shows their age.
            if made is not None or update.state_change == "keep"
        ]
        homes = [home_of(update.user_id, progress.epoch).partition for update in updates]
        if self._keep is not None:
            for update, home in zip(updates, homes, strict=True):
                self._keep.changing(update.user_id, home, update.positions)
        with self.encode_batch.tracing.stage("store states"):
            self._store.apply(updates, progress.epoch, progress.watermarks, states)
        progress.wrote(homes)
        return len(updates)

    def _update(self, user_id: str, user: UserWork, state: StoredState | None) -> UserUpdate:
        merged = user.merged
        return UserUpdate(
            user_id=user_id,
            model_version=self._words.model_version,
            expected=user.history.expected,
            positions=merged.positions,
            events=merged.events,
            recent=merged.recent,
            seen_times=merged.seen_times,
            unseen=merged.unseen,
            turned_down=turned_down(self._words.schema, merged.events),
            forgotten=user.history.forgotten,
            state=state,
            state_change="keep" if not merged.changed else "drop" if state is None else "set",
        )

    def _count(self, entries: Sequence[Arrival | DeadLetter], work: Mapping[str, UserWork]) -> dict[int, Counter[str]]:
        counts: dict[int, Counter[str]] = {}
        for user in work.values():
            for arrival, outcome in zip(user.arrivals, user.merged.outcomes, strict=True):
                mine = counts.setdefault(arrival.partition, Counter())
                mine.update(_COUNTED_AS[outcome])
                item_id = arrival.interaction.item_id
                counts_nowhere = outcome in (Outcome.DUPLICATE, Outcome.FORGOTTEN)
                if item_id and not counts_nowhere and item_id not in self._words.item_index:
                    mine["unknown_items"] += 1
        for entry in entries:
            if isinstance(entry, DeadLetter):
                counts.setdefault(entry.record.partition, Counter())["dead_lettered"] += 1
        return counts

    def _unknown_types(self, work: Mapping[str, UserWork]) -> Counter[str]:
        named = self._words.schema.types
        return Counter(
            arrival.interaction.type
            for user in work.values()
            for arrival, outcome in zip(user.arrivals, user.merged.outcomes, strict=True)
            if outcome in (Outcome.KEPT_OUT, Outcome.KEPT_OUT_UNSEEN, Outcome.APPLIED, Outcome.LATE)
            and arrival.interaction.type not in named
        )

    def _advance(
        self,
        entries: Sequence[Arrival | DeadLetter],
        counts: Mapping[int, Counter[str]],
        work: Mapping[str, UserWork],
    ) -> None:
        popular = popularity_steps(work.values(), self._words.schema, self._half_life_s)
        last: dict[int, int] = {}
        for entry in entries:
            position = entry.record if isinstance(entry, DeadLetter) else entry
            last[position.partition] = max(position.offset, last.get(position.partition, -1))
        self.progress.advance(last, counts, popular)
        if self._keep is not None:
            self._keep.applied(self.progress.watermarks)


def _state_beside(update: UserUpdate, model_version: str, made: Made | None) -> ModelState:
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

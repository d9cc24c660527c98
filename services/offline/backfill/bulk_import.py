"""Import past interactions into the stream and the state store before going live (`freshet import`).

It writes them to `interactions` like any event, and stores each user's history, seen items, state and position. Event
ids are made of the data's name and the row number, so another run continues an interrupted import, and does nothing
after a finished one.

Letters: N interactions, U users, X items, L = max_history.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.encoding.history import trim, windows
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.stored_history import RecentId, StoredEvent, hash_event_id
from services.contracts.topics.attributions import Attribution
from services.encoder.domain import EncodedStates, EncodeJob, Vocabulary, attributed_state, encode_job, user_state
from services.encoder.ports import Outbox, SequenceEncoder
from services.offline.backfill.past_interactions import Layout, check, event_id, lay_out
from services.offline.backfill.past_log import PastLog, Progressed, Writer
from services.offline.datasets import Interactions
from services.platform.errors import Conflict, PreconditionFailed
from services.platform.stream.ports import Reader
from services.user_state.forgetting import ForgetTopic, Forgotten, check_same_log, turned_down
from services.user_state.merging import RECENT_IDS, Outcome
from services.user_state.ports import Store
from services.user_state.values import AdvanceStep, StoredState, UserUpdate, now_ms

_CONSUMED = "another process consumes the stream during the import: stop the encoder process, and import again"

# If an import dies, the consumer's pause ends after this long.
PAUSE_SECONDS = 60
# A batch of users has about this many interactions. The model's output for a whole batch is held in memory.
FILL_CHUNK = 8_192


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """Counts and seconds; written, users_filled and attributions do not count the work of an earlier run."""

    interactions: int
    written: int
    users_filled: int
    attributions: int
    unknown_items: int
    write_seconds: float
    fill_seconds: float


@dataclass(frozen=True, slots=True)
class _Rows:
    """Oldest first, all in one partition."""

    user_id: str
    partition: int
    rows: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Pending:
    """A user's rows and encoder jobs.

    kept: the rows that no forget covers. first: index in `kept` of the first row to attribute. history: the rows of
    `kept` in the history. before (len(kept) + 1,): number of history rows before each row of `kept`, and of all.
    state_at: index of a history row -> (job, row of the job's output) of the state after it.
    """

    user: _Rows
    update: UserUpdate
    kept: npt.NDArray[np.int64]
    first: int
    history: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    state_at: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Filled:
    users: int = 0
    attributions: int = 0
    unknown_items: int = 0


class BulkImport:
    """One import; it pauses a running encoder process, which afterwards continues after the imported records.

    settle_seconds: within this time the encoder process notices the pause.
    """

    def __init__(
        self,
        *,
        stream: Reader,
        writer: Writer,
        outbox: Outbox,
        store: Store,
        forgets: ForgetTopic,
        encoder: SequenceEncoder,
        vocabulary: Vocabulary,
        pseudonym_key: bytes,
        attributes: bool = True,
        progress: Progressed = lambda phase, done, total: None,
        settle_seconds: float = 2.0,
    ) -> None:
        """attributes: False for the model's training data, which attributions would count twice in item states."""
        self._attributes = attributes
        self._stream = stream
        self._log = PastLog(
            stream=stream, writer=writer, pause=lambda: store.pause_consumer(PAUSE_SECONDS), progress=progress
        )
        self._outbox = outbox
        self._store = store
        self._forgets = forgets
        self._forgotten = Forgotten()
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._pseudonym_key = pseudonym_key
        self._progress = progress
        self._settle_seconds = settle_seconds

    def run(self, past: Interactions) -> ImportReport:
        """Write the records and fill the state store, or continue an interrupted run of the same data.

        Raises: InvalidRequest naming a row that breaks a limit (nothing is written); PreconditionFailed if the topic
        begins with other records, or another process consumes it meanwhile; DependencyUnavailable.
        """
        check(past)
        self._encoder.check()
        partitions = list(self._stream.partitions())
        if partitions != list(range(len(partitions))):
            raise PreconditionFailed(f"an import needs every partition of the topic, not {partitions}")
        layout = lay_out(past, len(partitions))
        started = time.perf_counter()
        self._store.pause_consumer(PAUSE_SECONDS)
        try:
            time.sleep(self._settle_seconds)
            for record in self._forgets.read():
                if record.forget is not None:
                    self._forgotten.add(record.forget)
            check_same_log(self._forgotten.last(), self._stream.end_offsets())
            written = self._log.write(past, layout)
            filled_from = time.perf_counter()
            filled = self._fill(past, layout, now_ms())
        finally:
            self._store.release()
        return ImportReport(
            interactions=len(past),
            written=written,
            users_filled=filled.users,
            attributions=filled.attributions,
            unknown_items=filled.unknown_items,
            write_seconds=filled_from - started,
            fill_seconds=time.perf_counter() - filled_from,
        )

    def _fill(self, past: Interactions, layout: Layout, recorded_ms: int) -> _Filled:
        """recorded_ms: time when the broker had all records."""
        epoch, _ = self._store.ensure_epoch(len(layout.rows))
        self._store.add_model(self._vocabulary.model_version)
        progress = self._store.begin(range(len(layout.rows)), epoch)
        # An earlier import or the consumer attributed earlier offsets, even if the state store was lost since.
        attribute_from = self._stream.committed() if self._attributes else dict(enumerate(map(len, layout.rows)))
        behind = [p for p, rows in enumerate(layout.rows) if progress[p].watermark < len(rows) - 1]
        order = np.argsort(past.users, kind="stable")
        users, starts = np.unique(past.users[order], return_index=True)
        ends = np.append(starts, len(order))[1:]
        todo = [
            _Rows(past.user_ids[u], int(layout.partition[order[s]]), order[s:e])
            for u, s, e in zip(users, starts, ends, strict=True)
            if layout.partition[order[s]] in behind
        ]
        filled = _Filled()
        watermarks = {partition: found.watermark for partition, found in progress.items()}
        for part in _parts(todo):
            self._fill_users(past, layout, epoch, part, attribute_from, recorded_ms, filled, watermarks)
            self._store.pause_consumer(PAUSE_SECONDS)
            filled.users += len(part)
            self._progress("states", filled.users, len(todo))
        steps = []
        for partition in behind:
            counts = self._count(past, layout.rows[partition], partition, progress[partition].watermark + 1)
            filled.unknown_items += counts["unknown_items"]
            steps.append(
                AdvanceStep(
                    partition=partition,
                    from_watermark=progress[partition].watermark,
                    to_watermark=len(layout.rows[partition]) - 1,
                    counts=counts,
                )
            )
        try:
            self._store.advance(steps, epoch)
        except Conflict as exc:
            raise PreconditionFailed(_CONSUMED) from exc
        self._stream.commit({step.partition: step.to_watermark + 1 for step in steps})
        self._stream.committed()  # Kafka answers this after the commit, so the commit is complete
        return filled

    def _count(self, past: Interactions, rows: npt.NDArray[np.int64], partition: int, first: int) -> dict[str, int]:
        known = np.array([item_id in self._vocabulary.item_index for item_id in past.item_ids], dtype=bool)
        up_to = [self._forgotten.up_to(user_id).get(partition, -1) for user_id in past.user_ids]
        void = np.arange(first, len(rows)) <= np.array(up_to, dtype=np.int64)[past.users[rows[first:]]]
        strange = ~known[past.items[rows[first:]]] & ~void
        kept_out = ~self._in_history(past)[past.types[rows[first:]]] & ~void
        return {
            "applied": len(rows) - first,
            "kept_out": int(np.count_nonzero(kept_out)),
            "unknown_items": int(np.count_nonzero(strange)),
            "forgotten": int(np.count_nonzero(void)),
        }

    def _fill_users(
        self,
        past: Interactions,
        layout: Layout,
        epoch: str,
        users: Sequence[_Rows],
        attribute_from: Mapping[int, int],
        recorded_ms: int,
        filled: _Filled,
        watermarks: Mapping[int, int],
    ) -> None:
        stored = self._store.load_users([user.user_id for user in users], epoch)
        jobs: list[EncodeJob] = []
        pending: list[_Pending] = []
        for user in users:
            last = int(layout.offset[user.rows[-1]])
            applied = stored[user.user_id].positions.get(user.partition, -1)
            if applied >= last:
                continue  # applied by an earlier run or the consumer
            up_to = self._forgotten.up_to(user.user_id).get(user.partition, -1)
            offsets = layout.offset[user.rows]
            kept = user.rows[offsets > up_to]
            first = int(np.searchsorted(layout.offset[kept], max(applied + 1, attribute_from[user.partition])))
            in_history = self._in_history(past)[past.types[kept]]
            history = kept[in_history]
            update = self._user(past, layout, user, kept, history, stored[user.user_id].expected)
            before = np.concatenate(([0], np.cumsum(in_history)))
            work = _Pending(user, update, kept, first, history, before)
            self._plan(past, layout, work, jobs)
            pending.append(work)
        states = self._encoder.encode(jobs) if jobs else ()
        applied_ms = now_ms()
        attributions = [a for work in pending for a in self._attributions(past, layout, work, states, recorded_ms)]
        attributions.sort(key=lambda a: (a.partition, a.offset))
        self._outbox.publish(attributions, ())
        filled.attributions += len(attributions)
        try:
            self._store.apply([self._with_state(work, states, applied_ms) for work in pending], epoch, watermarks)
        except Conflict as exc:
            raise PreconditionFailed(_CONSUMED) from exc

    def _plan(self, past: Interactions, layout: Layout, work: _Pending, jobs: list[EncodeJob]) -> None:
        """Add one job per window, for the state before each interaction to attribute and after the last."""
        if not len(work.history):
            return
        # The state before interaction j is the state after j - 1; the last one is stored.
        first_state = int(work.before[min(work.first, len(work.kept))]) - 1
        for window in windows(len(work.history), self._vocabulary.max_history, first_state=first_state):
            events = [
                self._event(past, layout, work.user, row, 0)
                for row in work.history[window.start : window.stop].tolist()
            ]
            lengths = range(window.first_state - window.start + 1, window.num_events + 1)
            job, rows = encode_job(self._vocabulary, work.user.user_id, events, lengths)
            if job is not None:
                work.state_at.update({window.start + length - 1: (len(jobs), row) for length, row in rows.items()})
                jobs.append(job)

    def _attributions(
        self,
        past: Interactions,
        layout: Layout,
        work: _Pending,
        states: Sequence[EncodedStates],
        recorded_ms: int,
    ) -> Iterator[Attribution]:
        pseudonym = pseudonym_of(work.user.user_id, self._pseudonym_key)
        is_attributed = [self._vocabulary.schema.of(name).is_attributed for name in past.type_names]
        for number in range(work.first, len(work.kept)):
            row, before = int(work.kept[number]), int(work.before[number])
            if before - 1 not in work.state_at or not is_attributed[past.types[row]]:
                continue
            job, at = work.state_at[before - 1]
            times_ms = (int(past.timestamps[one]) * 1000 for one in (work.history[before - 1], row))
            yield Attribution(
                event_id=event_id(past, row),
                item_id=past.item_ids[past.items[row]],
                state=attributed_state(self._vocabulary, states[job], at, *times_ms),
                type=past.type_names[past.types[row]],
                value=float(past.values[row]),
                event_time_ms=int(past.timestamps[row]) * 1000,
                recorded_ms=recorded_ms,
                partition=work.user.partition,
                offset=int(layout.offset[row]),
                user_pseudonym=pseudonym,
            )

    def _with_state(self, work: _Pending, states: Sequence[EncodedStates], applied_ms: int) -> UserUpdate:
        last = len(work.history) - 1
        if last not in work.state_at:
            return work.update
        job, at = work.state_at[last]
        newest = work.update.events[-1]
        state = StoredState(
            query_state=user_state(self._vocabulary, states[job], at, work.update.events),
            partition=newest.partition,
            offset=newest.offset,
            event_time_ms=newest.event_time_ms,
            applied_ms=applied_ms,
        )
        return replace(work.update, state=state, state_change="set")

    def _in_history(self, past: Interactions) -> npt.NDArray[np.bool_]:
        return np.array([self._vocabulary.schema.of(name).history for name in past.type_names], dtype=bool)

    def _event(self, past: Interactions, layout: Layout, user: _Rows, row: int, id_hash: int) -> StoredEvent:
        return StoredEvent(
            int(past.timestamps[row]) * 1000,
            user.partition,
            int(layout.offset[row]),
            id_hash,
            past.item_ids[past.items[row]],
            past.type_names[past.types[row]],
            float(past.values[row]),
        )

    def _recent(self, past: Interactions, layout: Layout, user: _Rows, row: int, id_hash: int) -> RecentId:
        """Return the same recent id as `merge`, for a row that counts."""
        kind = self._vocabulary.schema.of(past.type_names[past.types[row]])
        outcome = Outcome.KEPT_OUT if kind.seen else Outcome.KEPT_OUT_UNSEEN
        item_id = past.item_ids[past.items[row]] if kind.seen or kind.is_attributed else ""
        return RecentId(
            id_hash,
            user.partition,
            int(layout.offset[row]),
            Outcome.APPLIED if kind.history else outcome,
            item_id,
        )

    def _user(
        self,
        past: Interactions,
        layout: Layout,
        user: _Rows,
        kept: npt.NDArray[np.int64],
        history: npt.NDArray[np.int64],
        expected: bytes,
    ) -> UserUpdate:
        """kept: rows that no forget covers; history: those of them in the history."""
        window = trim(history.tolist(), self._vocabulary.max_history)
        seen = [self._vocabulary.schema.of(name).seen for name in past.type_names]
        recent = user.rows[-RECENT_IDS:].tolist()
        hashes = {row: hash_event_id(event_id(past, row)) for row in {*window, *recent}}
        void = set(user.rows[: len(user.rows) - len(kept)].tolist())
        events = [self._event(past, layout, user, row, hashes[row]) for row in window]
        return UserUpdate(
            user_id=user.user_id,
            model_version=self._vocabulary.model_version,
            expected=expected,
            positions={user.partition: int(layout.offset[user.rows[-1]])},
            events=events,
            recent=[
                RecentId(hashes[row], user.partition, int(layout.offset[row]), Outcome.FORGOTTEN)
                if row in void
                else self._recent(past, layout, user, row, hashes[row])
                for row in recent
            ],
            # Rows are oldest first, so the dictionary keeps the newest time of each item.
            seen_times={
                past.item_ids[past.items[row]]: int(past.timestamps[row]) * 1000
                for row in kept.tolist()
                if seen[past.types[row]]
            },
            turned_down=turned_down(self._vocabulary.schema, events),
            state_change="drop",
        )


def _parts(todo: Sequence[_Rows]) -> Iterator[list[_Rows]]:
    part: list[_Rows] = []
    size = 0
    for user in todo:
        if part and size + len(user.rows) > FILL_CHUNK:
            yield part
            part, size = [], 0
        part.append(user)
        size += len(user.rows)
    if part:
        yield part

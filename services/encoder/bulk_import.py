"""Past interactions into the stream and the state store at once, before going live (`freshet import`).

They are written onto `interactions` like any event, so that the topic stays the whole truth, and in the same run each
user's history, seen items, state and position are computed and stored directly, which takes seconds where the consumer
would take minutes. Event ids follow from the data's name and the row, and rows from the data's order: an import that
broke off is continued by running it again, one that is done is found to be done. It takes plain columns and does not
know where they came from. Imported interactions yield no attributions.

Letters: N interactions, U users, X items, L = max_history.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.history import trim
from services.common import events
from services.common.errors import Conflict, InvalidRequest, PreconditionFailed
from services.common.events import Interaction
from services.common.kafka import Record, partition_for
from services.common.state_store import (
    AdvanceStep,
    RecentId,
    StoredEvent,
    StoredState,
    UserUpdate,
    hash_event_id,
    now_ms,
)
from services.common.topics import INTERACTIONS
from services.encoder.domain import RECENT_IDS, EncodeJob, Outcome
from services.encoder.encoding import Vocabulary, encode_job, pack_state
from services.encoder.ports import SequenceEncoder, Store, Stream

_CONSUMED = "something consumes the stream during the import: stop the encoder process, and import again"

# An import that dies gives the stream back after this long.
HOLD_SECONDS = 60
WRITE_CHUNK = 20_000
USER_CHUNK = 256

# (phase, done, total): "write" counts interactions, "states" counts users.
Progressed = Callable[[str, int, int], None]


class Writer(Protocol):
    """Writes records in order per partition and waits until all are acknowledged (the real one: BulkProducer)."""

    def send_many(self, records: Sequence[Record], timeout_s: float = ...) -> list[tuple[int, int]]:
        """The places of the records, in the same order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastInteractions:
    """N interactions, oldest first.

    Shapes: users, items, types (N,) codes into user_ids, item_ids, type_names; timestamps (N,) Unix seconds, never
    decreasing; values (N,). name: what the event ids are made of; another name is another import.
    """

    name: str
    users: npt.NDArray[np.integer]
    items: npt.NDArray[np.integer]
    timestamps: npt.NDArray[np.int64]
    values: npt.NDArray[np.floating]
    types: npt.NDArray[np.integer]
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    type_names: Sequence[str]

    def __len__(self) -> int:
        return len(self.users)

    def event_id(self, row: int) -> str:
        """Says which import and which row; the same for every run."""
        return f"import-{self.name}-{row}"

    def interaction(self, row: int) -> Interaction:
        """One row as it goes onto the stream."""
        return Interaction(
            event_id=self.event_id(row),
            user_id=self.user_ids[self.users[row]],
            item_id=self.item_ids[self.items[row]],
            type=self.type_names[self.types[row]],
            value=float(self.values[row]),
            event_time_ms=int(self.timestamps[row]) * 1000,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """What an import did. written and users_filled are 0 for what an earlier run had done."""

    interactions: int
    written: int
    users_filled: int
    unknown_items: int
    write_seconds: float
    fill_seconds: float


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each row lies: its partition and offset, and each partition's rows in order."""

    partition: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    rows: list[npt.NDArray[np.int64]]


class BulkImport:
    """One import. An encoder process that runs is asked to wait meanwhile, and goes on behind the import afterwards.

    settle_seconds: how long such a process may take to notice.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        writer: Writer,
        store: Store,
        encoder: SequenceEncoder,
        vocabulary: Vocabulary,
        progress: Progressed = lambda phase, done, total: None,
        settle_seconds: float = 2.0,
    ) -> None:
        self._stream = stream
        self._writer = writer
        self._store = store
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._progress = progress
        self._settle_seconds = settle_seconds

    def run(self, past: PastInteractions) -> ImportReport:
        """Write and fill; or go on where an earlier run of the same data broke off.

        Raises: InvalidRequest naming a row that breaks a limit (nothing is written); PreconditionFailed when the
        topic begins with other records, or something consumes it meanwhile; DependencyUnavailable.
        """
        _check(past)
        self._encoder.check()
        partitions = list(self._stream.partitions())
        if partitions != list(range(len(partitions))):
            raise PreconditionFailed(f"an import needs every partition of the topic, not {partitions}")
        layout = _lay_out(past, len(partitions))
        started = time.perf_counter()
        self._store.hold(HOLD_SECONDS)
        try:
            time.sleep(self._settle_seconds)
            present = self._check_topic(past, layout)
            written = self._write(past, layout, present)
            filled_from = time.perf_counter()
            users_filled, unknown = self._fill(past, layout)
        finally:
            self._store.release()
        return ImportReport(
            interactions=len(past),
            written=written,
            users_filled=users_filled,
            unknown_items=unknown,
            write_seconds=filled_from - started,
            fill_seconds=time.perf_counter() - filled_from,
        )

    def _check_topic(self, past: PastInteractions, layout: _Layout) -> dict[int, int]:
        """How many of each partition's rows the topic already holds; what it begins with must be these rows."""
        present = {}
        for partition, end in self._stream.end_offsets().items():
            mine = len(layout.rows[partition])
            present[partition] = min(end, mine)
            if end:
                self._expect(past, layout, partition, 0)
            if present[partition]:
                self._expect(past, layout, partition, present[partition] - 1)
        return present

    def _expect(self, past: PastInteractions, layout: _Layout, partition: int, offset: int) -> None:
        rows = layout.rows[partition]
        wanted = past.event_id(int(rows[offset])) if offset < len(rows) else None
        found = self._event_id_at(partition, offset)
        if wanted is None or found != wanted:
            raise PreconditionFailed(
                f"partition {partition} of {INTERACTIONS!r} holds another event than this import's at offset {offset}: "
                "past interactions are imported before anything else is written (start with an empty topic and an "
                "empty state store)"
            )

    def _event_id_at(self, partition: int, offset: int) -> str | None:
        ends = self._stream.end_offsets()
        self._stream.seek({p: offset if p == partition else end for p, end in ends.items()})
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for record in self._stream.poll(500, 1_000):
                if record.partition == partition:
                    if record.offset != offset:
                        return None
                    try:
                        return events.decode_interaction(record.value, record.headers, record.key).event_id
                    except InvalidRequest:
                        return None
        raise PreconditionFailed(f"partition {partition} of {INTERACTIONS!r} cannot be read at offset {offset}")

    def _write(self, past: PastInteractions, layout: _Layout, present: Mapping[int, int]) -> int:
        """Write the rows that are not there yet, in the data's order. A run that breaks off leaves whole beginnings."""
        done = np.array([present.get(partition, 0) for partition in range(len(layout.rows))], dtype=np.int64)
        missing = np.flatnonzero(layout.offset >= done[layout.partition])
        for start in range(0, len(missing), WRITE_CHUNK):
            rows = missing[start : start + WRITE_CHUNK]
            places = self._writer.send_many(list(self._records(past, rows)), timeout_s=120.0)
            for row, (partition, offset) in zip(rows.tolist(), places, strict=True):
                if partition != layout.partition[row] or offset not in (layout.offset[row], -1):
                    raise PreconditionFailed(
                        f"something else writes to {INTERACTIONS!r} during the import (offset {offset} of partition "
                        f"{partition} was not expected): stop it, and import into an empty topic"
                    )
            self._store.hold(HOLD_SECONDS)
            self._progress("write", len(past) - len(missing) + start + len(rows), len(past))
        return len(missing)

    def _records(self, past: PastInteractions, rows: npt.NDArray[np.int64]) -> Iterator[Record]:
        for row in rows.tolist():
            interaction = past.interaction(row)
            yield Record(INTERACTIONS, interaction.user_id.encode(), events.encode_interaction(interaction))

    def _fill(self, past: PastInteractions, layout: _Layout) -> tuple[int, int]:
        epoch, _ = self._store.ensure_epoch()
        progress = self._store.progress(range(len(layout.rows)), epoch)
        known = np.array([item_id in self._vocabulary.item_index for item_id in past.item_ids], dtype=bool)
        behind = [p for p, rows in enumerate(layout.rows) if progress[p].watermark < len(rows) - 1]
        order = np.argsort(past.users, kind="stable")
        users, starts = np.unique(past.users[order], return_index=True)
        ends = np.append(starts, len(order))[1:]
        todo = [(u, s, e) for u, s, e in zip(users, starts, ends, strict=True) if layout.partition[order[s]] in behind]
        for start in range(0, len(todo), USER_CHUNK):
            part = todo[start : start + USER_CHUNK]
            self._fill_users(past, layout, epoch, [(past.user_ids[u], order[s:e]) for u, s, e in part])
            self._store.hold(HOLD_SECONDS)
            self._progress("states", start + len(part), len(todo))
        steps, unknown = [], 0
        for partition in behind:
            rows = layout.rows[partition][progress[partition].watermark + 1 :]
            strange = int(np.count_nonzero(~known[past.items[rows]]))
            unknown += strange
            steps.append(
                AdvanceStep(
                    partition=partition,
                    from_watermark=progress[partition].watermark,
                    to_watermark=len(layout.rows[partition]) - 1,
                    counts={"applied": len(rows), "unknown_items": strange},
                )
            )
        try:
            self._store.advance(steps, epoch)
        except Conflict as exc:
            raise PreconditionFailed(
                "something consumes the stream during the import: stop the encoder process"
            ) from exc
        self._stream.commit({step.partition: step.to_watermark + 1 for step in steps})
        self._stream.committed()  # answered after the commit is
        return len(todo), unknown

    def _fill_users(
        self, past: PastInteractions, layout: _Layout, epoch: str, users: Sequence[tuple[str, npt.NDArray[np.int64]]]
    ) -> None:
        stored = self._store.load_users([user_id for user_id, _ in users], epoch)
        jobs: list[EncodeJob] = []
        pending: list[tuple[UserUpdate, int | None]] = []
        for user_id, rows in users:
            partition, last = int(layout.partition[rows[0]]), int(layout.offset[rows[-1]])
            if stored[user_id].positions.get(partition, -1) >= last:
                continue  # an earlier run, or the consumer, has been here
            update = self._user(past, layout, user_id, rows, stored[user_id].expected)
            job, _ = encode_job(self._vocabulary, user_id, update.events, [len(update.events)])
            pending.append((update, None if job is None else len(jobs)))
            if job is not None:
                jobs.append(job)
        states = self._encoder.encode(jobs) if jobs else ()
        applied_ms = now_ms()
        updates = []
        for update, number in pending:
            if number is None:
                updates.append(update)
                continue
            newest = update.events[-1]
            state = StoredState(
                query_state=pack_state(states[number], 0),
                model_version=update.model_version,
                partition=newest.partition,
                offset=newest.offset,
                event_time_ms=newest.event_time_ms,
                applied_ms=applied_ms,
            )
            updates.append(_with_state(update, state))
        try:
            self._store.apply(updates, epoch)
        except Conflict as exc:
            raise PreconditionFailed(
                "something consumes the stream during the import: stop the encoder process"
            ) from exc

    def _user(
        self, past: PastInteractions, layout: _Layout, user_id: str, rows: npt.NDArray[np.int64], expected: bytes
    ) -> UserUpdate:
        partition = int(layout.partition[rows[0]])
        window = trim(rows.tolist(), self._vocabulary.max_history)
        recent = rows[-RECENT_IDS:].tolist()
        hashes = {row: hash_event_id(past.event_id(row)) for row in {*window, *recent}}
        times = past.timestamps[rows] * 1000
        return UserUpdate(
            user_id=user_id,
            model_version=self._vocabulary.model_version,
            expected=expected,
            positions={partition: int(layout.offset[rows[-1]])},
            events=[
                StoredEvent(
                    int(past.timestamps[row]) * 1000,
                    partition,
                    int(layout.offset[row]),
                    hashes[row],
                    past.item_ids[past.items[row]],
                )
                for row in window
            ],
            recent=[RecentId(hashes[row], partition, int(layout.offset[row]), Outcome.APPLIED) for row in recent],
            # Rows are oldest first, so the newest time of an item stays.
            seen_times={
                past.item_ids[item]: time_ms
                for item, time_ms in zip(past.items[rows].tolist(), times.tolist(), strict=True)
            },
            state_change="drop",
        )


def _with_state(update: UserUpdate, state: StoredState) -> UserUpdate:
    return replace(update, state=state, state_change="set")


def _lay_out(past: PastInteractions, num_partitions: int) -> _Layout:
    per_user = np.array([partition_for(user_id.encode(), num_partitions) for user_id in past.user_ids], dtype=np.int32)
    partition = per_user[past.users] if len(past) else np.zeros(0, dtype=np.int32)
    offset = np.zeros(len(past), dtype=np.int64)
    rows = []
    for number in range(num_partitions):
        mine = np.flatnonzero(partition == number)
        offset[mine] = np.arange(len(mine))
        rows.append(mine)
    return _Layout(partition, offset, rows)


def _check(past: PastInteractions) -> None:
    """Every limit of an interaction, column by column. Raises: InvalidRequest naming column, row or id number."""
    columns = {"items": past.items, "timestamps": past.timestamps, "values": past.values, "types": past.types}
    for name, column in columns.items():
        if len(column) != len(past):
            raise InvalidRequest.of(name, f"{len(column)} rows", f"{len(past)} rows, as many as users")
    if len(past) > 1 and (bad := np.flatnonzero(np.diff(past.timestamps) < 0)).size:
        raise InvalidRequest.of("timestamps", f"an earlier time in row {int(bad[0]) + 1}", "never decreasing")
    if (bad := np.flatnonzero(~np.isfinite(past.values))).size:
        raise InvalidRequest.of("values", f"{past.values[bad[0]]} in row {int(bad[0])}", "finite numbers")
    events.validate_id("name", past.name)
    if len(past):
        events.validate_id("event_id", past.event_id(len(past) - 1))
    now = now_ms()
    for name, ids in (("user_id", past.user_ids), ("item_id", past.item_ids)):
        for text in ids:
            events.validate_id(name, text)
    for name in past.type_names:
        events.validate(Interaction(user_id="u", item_id="i", type=name), now)
    for row in (0, len(past) - 1) if len(past) else ():
        events.validate(past.interaction(row), now)

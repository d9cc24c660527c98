"""Bring back users of whom the state store lost something: their part of the log is read again.

The store keeps a table of who was applied up to where, so a user whose keys were evicted, deleted or went back is told
from a new one. What is written is what the log says up to the watermark; attributions and clicks went out when the
records were applied, and do not again. Meanwhile nothing else is applied.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import structlog

from services.common.errors import DependencyUnavailable
from services.common.state_store import StoredState, UserHistory, UserUpdate, now_ms
from services.common.stream.ports import Reader
from services.common.stream.record import SourceRecord
from services.encoder.domain import MAX_RECORDS_PER_USER, Arrival, EncodeJob, merge, read_arrival
from services.encoder.encoding import Vocabulary, encode_job, pack_state
from services.encoder.forgetting import Forgotten
from services.encoder.ports import SequenceEncoder, Store

log = structlog.get_logger()

# Users that are read again together: one reading of the log serves them all, and their histories are held in memory.
MAX_TOGETHER = 10_000
_SILENT_POLLS = 50
_POLL_MS = 200


@dataclass(slots=True)
class _Replayed:
    """A user as far as the log was read: the history, every seen item, and the newest arrival."""

    history: UserHistory
    seen: dict[str, int]
    newest: Arrival | None = None


@dataclass(kw_only=True, eq=False)
class RestoreUsers:
    """log: a reader of `interactions` of its own. restored: told how many users came back."""

    log: Reader
    store: Store
    encoder: SequenceEncoder
    vocabulary: Vocabulary
    forgotten: Forgotten
    restored: Callable[[int], None] = lambda users: None
    clock_ms: Callable[[], int] = now_ms

    def __call__(self, user_ids: Collection[str], watermarks: Mapping[int, int], epoch: str) -> None:
        """Write these users as the log has them up to the watermarks.

        Raises: Conflict when somebody else wrote one of them; DependencyUnavailable, DeadlineExceeded.
        """
        users = sorted(user_ids)
        for start in range(0, len(users), MAX_TOGETHER):
            part = users[start : start + MAX_TOGETHER]
            # Before the log is read: whoever writes a user meanwhile makes the writing below fail.
            stored = self.store.load_users(part, epoch)
            replayed = self._replay(part, watermarks)
            updates = self._updates(replayed, {user_id: stored[user_id].expected for user_id in part})
            self.store.rewrite(updates, epoch)
            log.warning("lost_users_restored", users=len(part), of=len(users))
            self.restored(len(part))

    def close(self) -> None:
        """Give the connection up."""
        self.log.close()

    def _replay(self, user_ids: Collection[str], watermarks: Mapping[int, int]) -> dict[str, _Replayed]:
        found = {user_id: _Replayed(UserHistory(), {}) for user_id in user_ids}
        wanted = {user_id.encode() for user_id in user_ids}
        firsts = {partition: first for partition, (first, _) in self.log.bounds(watermarks.keys()).items()}
        missing = {partition: last for partition, last in watermarks.items() if firsts[partition] <= last}
        if not missing:
            return found
        self.log.assign({partition: firsts[partition] for partition in missing})
        pending: dict[str, list[Arrival]] = {}
        silent = 0
        while missing:
            records = self.log.poll(_POLL_MS, 10_000)
            silent = 0 if records else silent + 1
            if silent > _SILENT_POLLS:
                raise DependencyUnavailable(f"Kafka gave {self.log.positions()} of {dict(missing)} only")
            for record in records:
                if record.key in wanted and record.offset <= watermarks[record.partition]:
                    self._take(record, found, pending)
            if silent:
                # Transaction markers have offsets, but are no records.
                at = self.log.positions()
            else:
                at = {record.partition: record.offset + 1 for record in records}
            missing = {partition: last for partition, last in missing.items() if at.get(partition, 0) <= last}
        for user_id, arrivals in pending.items():
            self._merge(found[user_id], user_id, arrivals)
        return found

    def _take(self, record: SourceRecord, found: dict[str, _Replayed], pending: dict[str, list[Arrival]]) -> None:
        arrival = read_arrival(record)
        if isinstance(arrival, Arrival):
            mine = pending.setdefault(arrival.interaction.user_id, [])
            mine.append(arrival)
            if len(mine) == MAX_RECORDS_PER_USER:
                self._merge(found[arrival.interaction.user_id], arrival.interaction.user_id, mine)
                mine.clear()

    def _merge(self, user: _Replayed, user_id: str, arrivals: list[Arrival]) -> None:
        if not arrivals:
            return
        void = self.forgotten.up_to(user_id)
        merged = merge(user.history, arrivals, self.vocabulary.max_history, void)
        user.history = UserHistory(
            events=merged.events, recent=merged.recent, positions=merged.positions, forgotten=dict(void)
        )
        for item_id in merged.unseen:
            user.seen.pop(item_id, None)
        for item_id, time_ms in merged.seen_times.items():
            user.seen[item_id] = max(time_ms, user.seen.get(item_id, 0))
        user.newest = arrivals[-1]

    def _updates(self, replayed: Mapping[str, _Replayed], expected: Mapping[str, bytes]) -> list[UserUpdate]:
        jobs: list[EncodeJob] = []
        job_of: dict[str, tuple[int, int]] = {}
        for user_id, user in replayed.items():
            length = len(user.history.events)
            job, rows = encode_job(self.vocabulary, user_id, user.history.events, [length], cached=True)
            if job is not None and length in rows:
                job_of[user_id] = (len(jobs), rows[length])
                jobs.append(job)
        states = self.encoder.encode(jobs) if jobs else ()
        applied_ms = self.clock_ms()
        updates = []
        for user_id, user in replayed.items():
            state = None
            if user_id in job_of and user.newest is not None:
                job_number, row = job_of[user_id]
                state = StoredState(
                    query_state=pack_state(states[job_number], row, self.vocabulary.model_version),
                    partition=user.newest.partition,
                    offset=user.newest.offset,
                    event_time_ms=user.history.events[-1].event_time_ms,
                    applied_ms=applied_ms,
                )
            updates.append(
                UserUpdate(
                    user_id=user_id,
                    model_version=self.vocabulary.model_version,
                    expected=expected[user_id],
                    positions=user.history.positions,
                    events=user.history.events,
                    recent=user.history.recent,
                    seen_times=user.seen,
                    forgotten=user.history.forgotten,
                    state=state,
                    state_change="keep" if state is None else "set",
                )
            )
        return updates

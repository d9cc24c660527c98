"""The thread that applies the stream. A turn acquires partitions, forgets users, polls, applies and commits. After a
failure, the next turn resynchronises.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from services.encoder.handlers.apply_records import Applied, ApplyRecords
from services.encoder.handlers.forget_users import ForgetUsers
from services.encoder.metrics import EncoderMetrics
from services.platform.errors import FreshetError
from services.platform.stream.follower import Due, Follower, TurnClock
from services.platform.stream.ports import Leases, Reader
from services.platform.stream.records import SourceRecord
from services.user_state.values import now_ms

log = structlog.get_logger()

# Number of store checks per log check; a log check of 8 partitions takes 15 ms. If the topic is recreated between
# two log checks and its records are applied, `log_identity.py` still detects it.
_LOG_CHECK_EVERY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerLimits:
    """The loop's sizes and times. After a full poll, the next poll's size doubles, from min_records to max_records."""

    poll_ms: int = 200
    min_records: int = 512
    max_records: int = 4_096
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0
    commit_every_s: float = 1.0
    check_every_s: float = 1.0
    # A scan takes a microsecond of Redis per user; evictions trigger one at once.
    look_for_lost_every_s: float = 60.0
    lag_every_s: float = 1.0


class Consumer(Follower):
    """Applies the stream; ready after store, topics and model were reached.

    leases: None if the process reads all partitions. If a process was paused beyond its lease, two processes may work
    on one partition. One of them then gets a Conflict.
    """

    def __init__(
        self,
        *,
        stream: Reader,
        handler: ApplyRecords,
        forgets: ForgetUsers,
        metrics: EncoderMetrics,
        limits: ConsumerLimits,
        leases: Leases | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_stall: Callable[[], None] = lambda: None,
        turns: TurnClock | None = None,
    ) -> None:
        super().__init__(
            "interactions-consumer",
            on_ready=on_ready,
            on_stall=on_stall,
            backoff_s=limits.backoff_s,
            max_backoff_s=limits.max_backoff_s,
            lag_every_s=limits.lag_every_s,
            turns=turns,
        )
        self._stream, self._leases = stream, leases
        # The leased partitions; None before the first turn.
        self._partitions: list[int] | None = None
        self._handler, self._forgets, self._metrics, self._limits = handler, forgets, metrics, limits
        metrics.watch_turns(self.turns)
        # False while poll position and store may differ: the next turn then resyncs.
        self._in_step = False
        # True during an import, when only the import writes users.
        self._is_paused = False
        self._poll_records = limits.min_records
        self._committed: dict[int, int] = {}
        self._commit_due, self._check_due = Due(limits.commit_every_s), Due(limits.check_every_s)
        self._look_due = Due(limits.look_for_lost_every_s)
        # Kept per partition, so that a partition with rare records is also checked before they are applied.
        self._next_log_check: dict[int, float] = {}

    def finish(self) -> None:
        """Write histories, commit, release partitions. Unfinished work is read again."""
        try:
            if self._in_step:
                if not self._is_paused:
                    self._handler.finish()
                self._commit()
                self._stream.poll(0, 1)
        except FreshetError as exc:
            log.info("last_commit_failed", reason=str(exc))
        if self._leases is not None:
            self._leases.close()
        for part in (self._stream, self._handler, self._forgets):
            part.close()

    def turn(self) -> int:
        """Resynchronise if needed, poll, apply. Return the number of records and restored users."""
        if self._leases is not None:
            self._assign(self._leases)
        if not self._in_step:
            self._synchronise()
        now = time.monotonic()
        if self._check_due(now):
            self._check_store(now)
        records: Sequence[SourceRecord] = ()
        if not self._is_paused:
            with self._stepping():
                self._metrics.forgets.inc(self._forgets.follow())
        if self._is_paused or not self._handler.progress.watermarks:
            self._stop.wait(self._limits.poll_ms / 1000)
        else:
            wait_ms = 0 if self._handler.is_restoring else self._limits.poll_ms
            records = self._stream.poll(wait_ms, self._poll_records)
        if records:
            self._check_log(time.monotonic(), records)
            self._apply(records)
        full = len(records) >= self._poll_records
        self._poll_records = min(2 * self._poll_records, self._limits.max_records) if full else self._limits.min_records
        if self._commit_due(time.monotonic()):
            if not self._is_paused:
                with self._stepping():
                    self._handler.progress.pass_over(self._stream.positions())
            self._commit()
        done = 0
        if not self._is_paused:
            with self._stepping():
                done = self._handler.turn()
        return len(records) + done

    def _assign(self, leases: Leases) -> None:
        """Release surplus leases, and assign the leased partitions if they changed. `resync` sets the offsets."""
        if self._partitions is None:
            leases.start(self._stream.partitions())
        holding = leases.holding()
        partitions = sorted(holding.terms)
        if holding.surplus:
            partitions, surplus = partitions[: -holding.surplus], partitions[-holding.surplus :]
            leases.release(surplus)
        if partitions != self._partitions:
            self._in_step = False
            self._stream.assign(dict.fromkeys(partitions, 0))
            self._partitions = partitions
            log.info("partitions_assigned", partitions=partitions)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """After an error inside this context, the next turn resyncs poll position and store."""
        self._in_step = False
        yield
        self._in_step = True

    def _synchronise(self) -> None:
        progress = self._handler.progress
        if not self._is_ready:
            self._handler.check_model()
        lost_before = progress.tails_lost
        if self._handler.resync(self._stream):
            log.info("stream_epoch", watermarks=progress.watermarks)
            if self._is_ready:
                self._metrics.rewinds.inc()
        self._metrics.tails_lost.inc(progress.tails_lost - lost_before)
        self._is_paused = progress.is_paused()
        if not self._is_paused:
            # Known logs are not compared, because they may have lost records that a forget names.
            ends = progress.unknown_logs(self._stream.end_offsets())
            self._metrics.forgets.inc(self._forgets.resync(progress.epoch, ends, progress.watermarks.keys()))
        self._in_step = True
        self.ready()

    def _apply(self, records: Sequence[SourceRecord]) -> None:
        started = time.perf_counter()
        with self._stepping():
            applied = self._apply_alone(records) if self.tries_alone else self._apply_together(records)
        done_ms = now_ms()
        freshness = [max(0, done_ms - recorded_ms) / 1000 for recorded_ms in applied.recorded_ms]
        self._metrics.batch(len(records), time.perf_counter() - started, applied, freshness)

    def _apply_together(self, records: Sequence[SourceRecord]) -> Applied:
        applied = self._handler.apply(records)
        self.poison.applied(records)
        return applied

    def _apply_alone(self, records: Sequence[SourceRecord]) -> Applied:
        total = Applied()
        self.one_by_one(
            records,
            key=lambda record: (record.partition, record.offset),
            apply=lambda record: total.add(self._handler.apply([record])),
            set_aside=lambda record, reason: total.add(self._handler.reject(record, reason)),
            rehearse=self._handler.rehearse,
        )
        return total

    def _check_store(self, now: float) -> None:
        """Detect an emptied store, lost users, and an import."""
        was_paused, progress = self._is_paused, self._handler.progress
        with self._stepping():
            self._is_paused = progress.is_paused()
            if was_paused and not self._is_paused:
                self._synchronise()
            if not self._is_paused:
                progress.check_epoch()
                self._forgets.check()
                usage = self._handler.find_lost(look=self._look_due(now))
                self._metrics.store_memory.set(usage.memory_share)
        if self._is_paused != was_paused:
            log.info("stream_held" if self._is_paused else "stream_released", watermarks=progress.watermarks)

    def _check_log(self, now: float, records: Sequence[SourceRecord]) -> None:
        """Check, before records are applied, that the topic was not recreated."""
        partitions = {record.partition for record in records}
        if all(now < self._next_log_check.get(partition, 0.0) for partition in partitions):
            return
        due = now + _LOG_CHECK_EVERY * self._limits.check_every_s
        self._next_log_check.update(dict.fromkeys(partitions, due))
        with self._stepping():
            self._handler.progress.identity.check(self._stream, partitions)

    def _commit(self) -> None:
        offsets = self._handler.progress.committable()
        if offsets != self._committed:
            self._stream.commit(offsets)
            self._committed = offsets

    def lost(self, exc: Exception) -> None:
        """Start the next turn with a resync."""
        self._in_step = False
        self._metrics.failures.labels(type(exc).__name__).inc()

    def report_lag(self, *, asks: bool) -> None:
        ends = self._stream.end_offsets() if asks else self._stream.known_end_offsets()
        self._metrics.progress(self._handler.progress.watermarks, ends)

"""The thread that keeps the stream applied: forget, poll, apply, commit; back off and resynchronise when something is
down.

It runs apart from the event loop, so that the gRPC side answers while a batch is merged. Which record does what is
`handlers/apply_records.py`'s; this module only knows when to try, when to wait, and when a record that keeps failing
for a bug of ours has to be set aside so that the stream goes on.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from services.common.errors import FreshetError
from services.common.state_store import now_ms
from services.common.stream.ports import Reader
from services.common.stream.record import SourceRecord
from services.common.turn_clock import TurnClock
from services.encoder.handlers.apply_records import Applied, ApplyRecords
from services.encoder.handlers.forget_users import ForgetUsers
from services.encoder.metrics import EncoderMetrics
from services.encoder.ports import Outbox, SequenceEncoder

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerLimits:
    """Sizes and times of the loop. Polls grow from min_ to max_records while they come back full (catching up)."""

    poll_ms: int = 200
    min_records: int = 512
    max_records: int = 4_096
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0
    commit_every_s: float = 1.0
    check_every_s: float = 1.0
    lag_every_s: float = 1.0
    # Attempts at a batch that fails for an unexpected reason before its records are tried one by one.
    attempts: int = 3


class Consumer:
    """Applies the stream until stopped.

    `on_ready` is called when store, topics and model were all reached for the first time, and whenever the stream
    moves again after `on_stall`, which is called when two turns in a row failed: stored states then grow stale.
    `turns` says when turns ended.
    """

    def __init__(
        self,
        *,
        stream: Reader,
        outbox: Outbox,
        encoder: SequenceEncoder,
        handler: ApplyRecords,
        forgets: ForgetUsers,
        metrics: EncoderMetrics,
        limits: ConsumerLimits,
        on_ready: Callable[[], None] = lambda: None,
        on_stall: Callable[[], None] = lambda: None,
        turns: TurnClock | None = None,
    ) -> None:
        self._stream = stream
        self._outbox = outbox
        self._encoder = encoder
        self._handler = handler
        self._forgets = forgets
        self._metrics = metrics
        self._limits = limits
        self._on_ready = on_ready
        self._on_stall = on_stall
        self._stalled = False
        self.turns = turns or TurnClock()
        metrics.watch_turns(self.turns)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="interactions-consumer", daemon=True)
        self._ready = False
        self._in_step = False
        self._held = False
        self._poll_records = limits.min_records
        self._bugs = 0
        self._backoff_s = limits.backoff_s
        self._complaint = ""
        self._committed: dict[int, int] = {}
        self._next_commit = self._next_check = self._next_lag = 0.0

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the batch at hand, commit, and end. Whatever is unfinished is simply read again next time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except FreshetError as exc:
                self._fail(exc)
            except Exception as exc:
                self._bugs += 1
                log.error("stream_bug", attempt=self._bugs, exc_info=exc)
                self._fail(exc)
        try:
            if self._in_step:
                self._commit()
                self._stream.poll(0, 1)
        except FreshetError as exc:
            log.info("last_commit_failed", reason=str(exc))
        self._stream.close()
        self._forgets.close()
        self._outbox.close()

    def step(self) -> int:
        """One turn: get in step with the store if need be, poll, apply. Returns the number of records.

        Raises: what handler and ports raise; the next turn then starts with a resync.
        """
        if not self._in_step:
            self._synchronise()
        self._check_store(time.monotonic())
        records: Sequence[SourceRecord] = ()
        if self._held:
            self._stop.wait(self._limits.poll_ms / 1000)
        else:
            self._follow_forgets()
            records = self._stream.poll(self._limits.poll_ms, self._poll_records)
        if records:
            self._apply(records)
        full = len(records) >= self._poll_records
        self._poll_records = min(2 * self._poll_records, self._limits.max_records) if full else self._limits.min_records
        self._keep_house(time.monotonic())
        if self._complaint:
            log.info("stream_recovered", after=self._complaint)
        if self._stalled:
            self._stalled = False
            self._on_ready()
        self._complaint = ""
        self._bugs = 0
        self._backoff_s = self._limits.backoff_s
        self.turns.ended(well=True)
        return len(records)

    def _synchronise(self) -> None:
        if not self._ready:
            self._encoder.check()
        if self._handler.resync(self._stream):
            log.info("stream_epoch", watermarks=self._handler.watermarks)
            if self._ready:
                self._metrics.rewind()
        # While an import holds the stream, users are its to write; its end synchronises again.
        self._held = self._handler.is_held()
        if not self._held:
            applied = self._forgets.resync(self._handler.epoch, self._stream.end_offsets())
            self._metrics.forgets(applied)
        self._in_step = True
        if not self._ready:
            self._ready = True
            self._on_ready()

    def _follow_forgets(self) -> None:
        self._in_step = False
        self._metrics.forgets(self._forgets.follow())
        self._in_step = True

    def _apply(self, records: Sequence[SourceRecord]) -> None:
        started = time.perf_counter()
        # From here on until it is done, an error leaves poll position and store out of step.
        self._in_step = False
        applied = self._one_by_one(records) if self._bugs >= self._limits.attempts else self._handler.apply(records)
        self._in_step = True
        done_ms = now_ms()
        self._metrics.batch(
            records=len(records),
            users=applied.users,
            seconds=time.perf_counter() - started,
            encode_seconds=applied.encode_seconds,
            counts=applied.counts,
            freshness_seconds=[max(0, done_ms - recorded_ms) / 1000 for recorded_ms in applied.recorded_ms],
        )

    def _one_by_one(self, records: Sequence[SourceRecord]) -> Applied:
        total = Applied()
        for record in records:
            try:
                total.add(self._handler.apply([record]))
            except FreshetError:
                raise
            except Exception as exc:
                log.error("record_set_aside", partition=record.partition, offset=record.offset, exc_info=exc)
                total.add(self._handler.reject(record, f"internal error: {type(exc).__name__}"))
        return total

    def _check_store(self, now: float) -> None:
        """Notice an emptied store, and an import: nothing is polled while one holds the stream."""
        if now < self._next_check:
            return
        self._next_check = now + self._limits.check_every_s
        held_before, self._in_step = self._held, False
        self._held = self._handler.is_held()
        if held_before and not self._held:
            self._synchronise()
        if not self._held:
            self._handler.check_epoch()
        self._in_step = True
        if self._held != held_before:
            log.info("stream_held" if self._held else "stream_released", watermarks=self._handler.watermarks)

    def _keep_house(self, now: float) -> None:
        if now >= self._next_commit:
            self._next_commit = now + self._limits.commit_every_s
            self._commit()
        if now >= self._next_lag:
            self._next_lag = now + self._limits.lag_every_s
            self._metrics.progress(self._handler.watermarks, self._stream.known_end_offsets())

    def _commit(self) -> None:
        offsets = self._handler.committable()
        if offsets != self._committed:
            self._stream.commit(offsets)
            self._committed = offsets

    def _fail(self, exc: Exception) -> None:
        self._in_step = False
        self._metrics.failure(type(exc).__name__)
        complaint = type(exc).__name__
        if self._complaint and self._ready and not self._stalled:
            self._stalled = True
            self._on_stall()
        if complaint != self._complaint:
            self._complaint = complaint
            log.warning("stream_waits", reason=str(exc), error=complaint)
        self._report_lag_of_stall(time.monotonic())
        self.turns.ended(well=False)
        self._stop.wait(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, self._limits.max_backoff_s)

    def _report_lag_of_stall(self, now: float) -> None:
        """The lag grows while turns fail, and polls don't tell the ends then: ask for them, where Kafka answers."""
        if now < self._next_lag or not self._ready or self._stop.is_set():
            return
        self._next_lag = now + self._limits.lag_every_s
        # It is a figure only; why the turn failed was said.
        with contextlib.suppress(Exception):
            self._metrics.progress(self._handler.watermarks, self._stream.end_offsets())

"""Encode batches of the stream, and histories of requests.

For a batch, each model computes all wanted states in one call; attributions and stored states are made from them. A
request's history is encoded with the stream's window rule, vocabulary and model.

The stream waits for the process's own model. If another version set's model fails, only that model's states and
attributions are missing. Concurrent requests share one call.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from services.algorithms.encoding.history import trim
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.attributions import Attribution
from services.contracts.wire import PackedQueryState
from services.encoder.domain import (
    EncodedStates,
    EncodeJob,
    UserWork,
    Vocabulary,
    attributed_state,
    encode_job,
    user_state,
)
from services.encoder.models import Model
from services.encoder.ports import SequenceEncoder
from services.platform.errors import InvalidRequest
from services.platform.request_context import OFF, Tracing
from services.platform.threads import Batcher
from services.platform.validation import validate_id
from services.user_state.layout import home_of
from services.user_state.merging import Prefix
from services.user_state.values import StoredState, UserHistory, now_ms

log = structlog.get_logger()


# A model's answer: by user and prefix, a job's states and the row of the state after the prefix.
_Encoded = Mapping[tuple[str, Prefix], tuple[EncodedStates, int]]


@dataclass(slots=True)
class Made:
    """A model's result for a batch. states: those of users whose history changed and has an item known to the model.
    encode_seconds: 0 without work.
    """

    attributions: list[Attribution] = field(default_factory=list)
    states: dict[str, StoredState] = field(default_factory=dict)
    encode_seconds: float = 0.0


@dataclass(kw_only=True, eq=False)
class EncodeBatch:
    """Encodes batches. others: models of other version sets. cached: see `encode_job`. failed: called when another
    model fails. running: locked while a batch uses the models.
    """

    own: Model
    pseudonym_key: bytes
    cached: bool = True
    tracing: Tracing = OFF
    clock_ms: Callable[[], int] = now_ms
    failed: Callable[[], None] = lambda: None
    others: tuple[Model, ...] = field(default=(), init=False)
    running: threading.Lock = field(default_factory=threading.Lock, init=False)
    # Logged failures, as (model version, error class).
    _logged: set[tuple[str, str]] = field(default_factory=set, init=False)

    def set_others(self, others: tuple[Model, ...]) -> None:
        """Replace the other models. Returns after the present batch, which still uses the old ones. Thread-safe."""
        with self.running:
            self.others = others

    def __call__(self, work: Mapping[str, UserWork], span: str) -> tuple[Made, dict[str, Made | None]]:
        """Return the own model's result, and the other models' results by version (None after a failure). span: the
        traceparent to store with states. Raises: errors of the own encoder.
        """
        own = self._make(self.own, work, span)
        return own, {model.vocabulary.model_version: self._beside(model, work, span) for model in self.others}

    def _beside(self, model: Model, work: Mapping[str, UserWork], span: str) -> Made | None:
        try:
            return self._make(model, work, span)
        except Exception as exc:
            # Every error is caught, because the own model must not wait for another one.
            kind = (model.vocabulary.model_version, type(exc).__name__)
            if kind not in self._logged:
                self._logged.add(kind)
                log.error("other_model_failed", model=model.vocabulary.model_version, exc_info=exc)
            self.failed()
            return None

    def _make(self, model: Model, work: Mapping[str, UserWork], span: str) -> Made:
        made = Made()
        jobs: list[EncodeJob] = []
        rows_of: dict[tuple[str, int], Mapping[int, int]] = {}
        for user_id, user in work.items():
            for sequence, lengths in user.wanted.items():
                events = user.merged.sequences[sequence]
                job, rows = encode_job(model.vocabulary, user_id, events, lengths, cached=self.cached)
                if job is not None:
                    rows_of[user_id, sequence] = rows
                    jobs.append(job)
        if not jobs:
            return made
        started = time.perf_counter()
        with self.tracing.stage("encode"):
            answers = model.encoder.encode(jobs)
        made.encode_seconds = time.perf_counter() - started
        encoded = {
            (user_id, Prefix(sequence, length)): (states, row)
            for ((user_id, sequence), rows), states in zip(rows_of.items(), answers, strict=True)
            for length, row in rows.items()
        }
        applied_ms = self.clock_ms()
        for user_id, user in work.items():
            made.attributions += self._attributions(user_id, user, model.vocabulary, encoded)
            state = _state(user_id, user, model.vocabulary, encoded, applied_ms, span if user.is_traced else "")
            if state is not None:
                made.states[user_id] = state
        return made

    def _attributions(
        self, user_id: str, user: UserWork, vocabulary: Vocabulary, encoded: _Encoded
    ) -> Iterator[Attribution]:
        if not user.attributed:
            return
        pseudonym = pseudonym_of(user_id, self.pseudonym_key)
        for number, prefix in user.merged.preceding.items():
            arrival, after = user.arrivals[number], encoded.get((user_id, prefix))
            if after is not None and number in user.attributed:
                last = user.merged.sequences[prefix.sequence][prefix.num_events - 1]
                asked_ms = arrival.interaction.event_time_ms
                yield Attribution(
                    state=attributed_state(vocabulary, *after, last.event_time_ms, asked_ms),
                    type=arrival.interaction.type,
                    value=arrival.interaction.value,
                    **arrival.fields(pseudonym),
                )


def _state(
    user_id: str, user: UserWork, vocabulary: Vocabulary, encoded: _Encoded, applied_ms: int, traceparent: str
) -> StoredState | None:
    merged = user.merged
    if merged.changed_by is None:
        return None
    after = encoded.get((user_id, Prefix(len(merged.sequences) - 1, len(merged.events))))
    if after is None:
        return None
    newest = user.arrivals[merged.changed_by]
    return StoredState(
        query_state=user_state(vocabulary, *after, merged.events),
        partition=newest.partition,
        offset=newest.offset,
        event_time_ms=merged.events[-1].event_time_ms,
        applied_ms=applied_ms,
        traceparent=traceparent,
    )


def states_of(
    model: Model,
    histories: Mapping[str, UserHistory],
    epoch: str,
    clock_ms: Callable[[], int] = now_ms,
    *,
    cached: bool = True,
) -> dict[str, StoredState]:
    """Return each user's state after the whole history, if the model knows an item in it. cached: see `encode_job`.
    Raises: errors of the model's encoder.
    """
    jobs: list[EncodeJob] = []
    row_of: dict[str, int] = {}
    for user_id, history in histories.items():
        length = len(history.events)
        job, rows = encode_job(model.vocabulary, user_id, history.events, [length], cached=cached)
        if job is not None and length in rows:
            row_of[user_id] = rows[length]
            jobs.append(job)
    answers = model.encoder.encode(jobs) if jobs else ()
    found = {}
    for (user_id, row), states in zip(row_of.items(), answers, strict=True):
        history = histories[user_id]
        home = home_of(user_id, epoch).partition
        at = max(history.positions.items(), key=lambda position: (position[0] == home, position[1]))
        found[user_id] = StoredState(
            query_state=user_state(model.vocabulary, states, row, history.events),
            partition=at[0],
            offset=at[1],
            event_time_ms=history.events[-1].event_time_ms,
            applied_ms=clock_ms(),
        )
    return found


MAX_EVENTS = 10_000


@dataclass(frozen=True, slots=True)
class Encoded:
    """The state of a history; None if the model reads no item of it. queue_seconds, encode_seconds: time in the queue
    and in the model.
    """

    state: PackedQueryState | None
    unknown_items: int
    queue_seconds: float
    encode_seconds: float


class EncodeHistory:
    """Encodes histories on request. Close it to end its worker thread."""

    def __init__(self, *, encoder: SequenceEncoder, vocabulary: Vocabulary) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._batcher: Batcher[EncodeJob, tuple[EncodedStates, float]] = Batcher(
            self._encode, max_batch=64, max_queue=256, name="encode-on-demand"
        )

    async def encode(self, user_id: str, history: Sequence[StoredEvent]) -> Encoded:
        """The state after `history` (oldest event first); only its newest window counts.

        Raises: InvalidRequest with field, value and range; Overloaded; the model adapter's errors.
        """
        if user_id:
            validate_id("user_id", user_id)
        if len(history) > MAX_EVENTS:
            raise InvalidRequest.of("history", f"{len(history)} events", f"at most {MAX_EVENTS} events")
        item_index = self._vocabulary.item_index
        unknown = 0
        for number, event in enumerate(history):
            if event.item_id not in item_index:
                validate_id(f"history[{number}].item_id", event.item_id)
                unknown += 1
            if not 0 <= event.event_time_ms < 2**53:
                raise InvalidRequest.of(
                    f"history[{number}].event_time", f"{event.event_time_ms} ms", "0 or later, within 285,000 years"
                )
            if not math.isfinite(event.value):
                raise InvalidRequest.of(f"history[{number}].value", event.value, "a finite number")
        in_history = {kind: self._vocabulary.schema.of(kind).history for kind in {event.type for event in history}}
        window = trim([event for event in history if in_history[event.type]], self._vocabulary.max_history)
        job, _ = encode_job(self._vocabulary, user_id, window, [len(window)])
        if job is None:
            return Encoded(None, unknown, 0.0, 0.0)
        (states, seconds), queued = await self._batcher.submit(job)
        return Encoded(user_state(self._vocabulary, states, 0, window), unknown, queued, seconds)

    async def close(self) -> None:
        await self._batcher.close()

    def _encode(self, jobs: list[EncodeJob]) -> list[tuple[EncodedStates, float]]:
        started = time.perf_counter()
        states = self._encoder.encode(jobs)
        seconds = time.perf_counter() - started
        return [(state, seconds) for state in states]

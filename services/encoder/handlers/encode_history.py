"""Encode a history from a request, with the stream's window rule, vocabulary and model. Concurrent requests share one
call.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.encoding.history import trim
from services.contracts.query_state import PackedQueryState
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.interactions import DEFAULT_TYPE
from services.encoder.domain import EncodedStates, EncodeJob, Vocabulary, encode_job, user_state
from services.encoder.ports import SequenceEncoder
from services.platform.batching import Batcher
from services.platform.errors import InvalidRequest
from services.platform.validation import validate_id

MAX_EVENTS = 10_000


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One event of a request's history. event_time_ms: Unix milliseconds, at least 0. type: "" for the default."""

    item_id: str
    event_time_ms: int
    type: str = ""
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """The state of a history; None if the model reads no item of it. queue_seconds, encode_seconds: in queue and
    model.
    """

    state: PackedQueryState | None
    unknown_items: int
    queue_seconds: float
    encode_seconds: float


class EncodeHistory:
    """Encodes histories on request. Close it to end its worker thread."""

    def __init__(
        self, *, encoder: SequenceEncoder, vocabulary: Vocabulary, max_batch: int = 64, max_queue: int = 256
    ) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._batcher: Batcher[EncodeJob, tuple[EncodedStates, float]] = Batcher(
            self._encode, max_batch=max_batch, max_queue=max_queue, name="encode-on-demand"
        )

    async def encode(self, user_id: str, history: Sequence[RequestEvent]) -> Encoded:
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
        events = [StoredEvent(e.event_time_ms, 0, 0, 0, e.item_id, e.type or DEFAULT_TYPE, e.value) for e in history]
        in_history = {kind: self._vocabulary.schema.of(kind).history for kind in {event.type for event in events}}
        window = trim([event for event in events if in_history[event.type]], self._vocabulary.max_history)
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

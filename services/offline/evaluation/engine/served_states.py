"""States of a data set's histories, computed by the encoder process's code in half precision."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import ENCODER_ONNX, Bundle
from services.algorithms.encoding.history import trim
from services.algorithms.scoring.packed_state import after_absence, unpack_query_state
from services.algorithms.scoring.states import QueryStates
from services.contracts.stored_history import StoredEvent
from services.contracts.wire import PackedQueryState, unpacked
from services.encoder.adapters.in_process import InProcessEncoder
from services.encoder.bootstrap import vocabulary_of
from services.encoder.domain import encode_job, user_state
from services.offline.datasets import Interactions

_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Person:
    """A user's events, oldest first. as_of: the request's time in Unix seconds, or None for the last event's time."""

    user_id: str
    events: Sequence[StoredEvent]
    as_of: int | None = None


class ServedStates:
    """Computes users' states."""

    def __init__(self, bundle: Bundle) -> None:
        self._shape = (bundle.num_query_components, bundle.manifest.head.component_width)
        self._words = vocabulary_of(bundle)
        self._encoder = InProcessEncoder(bundle.file(ENCODER_ONNX), None, max_history=bundle.max_history, cache_bytes=0)

    def __call__(self, people: Sequence[Person]) -> tuple[QueryStates, npt.NDArray[np.int64]]:
        """Return states (n,), and the rows (n,) of the users that have one."""
        packed: list[PackedQueryState] = []
        rows: list[int] = []
        for start in range(0, len(people), _AT_ONCE):
            windows, jobs, known, moments = [], [], [], []
            for number, one in enumerate(people[start : start + _AT_ONCE], start):
                kept = [event for event in one.events if self._words.schema.of(event.type).history]
                window = list(trim(kept, self._words.max_history))
                job, _ = encode_job(self._words, one.user_id, window, [len(window)])
                if job is not None:
                    windows.append(window)
                    jobs.append(job)
                    known.append(number)
                    last_ms = window[-1].event_time_ms
                    moments.append((last_ms, last_ms if one.as_of is None else one.as_of * 1000))
            found = self._encoder.encode(jobs) if jobs else []
            packed += [
                after_absence(user_state(self._words, one, 0, window), self._words.absence, *moment)[0]
                for one, window, moment in zip(found, windows, moments, strict=True)
            ]
            rows += known
        made = [unpacked(one, unpack_query_state) for one in packed]
        empty = QueryStates(components=np.empty((0, *self._shape), dtype=np.float32))
        return QueryStates.joined(made) if made else empty, np.array(rows, dtype=np.int64)


def stored_events(data: Interactions, rows: npt.NDArray[np.int64]) -> list[StoredEvent]:
    """Return rows as events of a history."""
    return [
        StoredEvent(
            int(data.timestamps[row]) * 1000,
            0,
            row,
            row,
            data.item_ids[data.items[row]],
            data.type_names[data.types[row]],
            float(data.values[row]),
        )
        for row in rows.tolist()
    ]

"""A query state as bytes, as sent and stored in Redis: half precision, little-endian, row-major.

A state has about a kilobyte at 8x64. "Exact" answers refer to the stored state. Letters: P_q query components, P
pairs, d component width.
"""

from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from services.algorithms.encoding.absence import HALF, AbsenceRows
from services.algorithms.scoring.states import QueryStates


class Packed(Protocol):
    """A dataclass like the state of `services.contracts.wire`, which this package may not import."""

    @property
    def components(self) -> bytes: ...
    @property
    def gate(self) -> bytes: ...
    @property
    def num_components(self) -> int: ...
    @property
    def component_width(self) -> int: ...


S = TypeVar("S", bound=Packed)


def unpack_query_state(components: bytes, gate: bytes, *, num_components: int, component_width: int) -> QueryStates:
    """One state: components (1, P_q, d), gate (1, P) or None if `gate` is empty, both float32.

    Raises: ValueError with the field for another size, NaN or infinity.
    """
    if num_components < 1:
        raise ValueError(f"num_components={num_components} allowed: at least 1")
    if component_width < 1:
        raise ValueError(f"component_width={component_width} allowed: at least 1")
    wanted = num_components * component_width * HALF.itemsize
    if len(components) != wanted:
        raise ValueError(
            f"components holds {len(components)} bytes; {num_components} x {component_width} need {wanted}"
        )
    if len(gate) % HALF.itemsize:
        raise ValueError(f"gate holds {len(gate)} bytes; half-precision values need an even number")
    values = np.frombuffer(components, HALF).astype(np.float32).reshape(1, num_components, component_width)
    return QueryStates(
        components=values, gate=np.frombuffer(gate, HALF).astype(np.float32).reshape(1, -1) if gate else None
    )


def pack_query_state(queries: QueryStates, query: int = 0) -> tuple[bytes, bytes]:
    """One state's components and gate (empty without one) as half-precision bytes."""
    gate = b"" if queries.gate is None else queries.gate[query].astype(HALF).tobytes()
    return queries.components[query].astype(HALF).tobytes(), gate


def after_absence(state: S, rows: AbsenceRows | None, last_event_ms: int, at_ms: int) -> tuple[S, int]:
    """The state for a request at `at_ms`, given the last event's time (both Unix milliseconds), and the bucket.

    It is unchanged within a session, before the event, and for a model without rows. Attribution calls this for the
    state that a request would have had. Raises: ValueError if a size disagrees; values are not checked.
    """
    bucket = 0 if rows is None else rows.bucket_of((at_ms - last_event_ms) // 1000)
    if rows is None or not bucket:
        return state, 0
    shape = (1, state.num_components, state.component_width)
    gate = np.frombuffer(state.gate, HALF)[None] if state.gate else None
    moved, moved_gate = rows.moved(np.frombuffer(state.components, HALF).reshape(shape), gate, bucket)
    packed_gate = b"" if moved_gate is None else moved_gate.tobytes()
    asked: S = replace(cast(Any, state), components=moved.tobytes(), gate=packed_gate)
    return asked, bucket

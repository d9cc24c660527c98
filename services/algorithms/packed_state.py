"""A query state as bytes: half precision, little-endian, row-major, as the wire and Redis hold it.

Half precision halves the state (about a kilobyte at 8x64) and is part of what a score is: *exact* speaks of the state
as stored. Letters: P_q query components, P pairs, d component width.
"""

import numpy as np

from services.algorithms.states import QueryStates

_HALF = np.dtype("<f2")


def unpack_query_state(components: bytes, gate: bytes, *, num_components: int, component_width: int) -> QueryStates:
    """Read one state: components (1, P_q, d), gate (1, P) or None when `gate` is empty, both float32.

    Raises: ValueError naming the field when a size disagrees or a value is NaN or infinite.
    """
    if num_components < 1:
        raise ValueError(f"num_components={num_components} allowed: at least 1")
    if component_width < 1:
        raise ValueError(f"component_width={component_width} allowed: at least 1")
    wanted = num_components * component_width * _HALF.itemsize
    if len(components) != wanted:
        raise ValueError(
            f"components holds {len(components)} bytes; {num_components} x {component_width} need {wanted}"
        )
    if len(gate) % _HALF.itemsize:
        raise ValueError(f"gate holds {len(gate)} bytes; half-precision values need an even number")
    values = np.frombuffer(components, _HALF).astype(np.float32).reshape(1, num_components, component_width)
    return QueryStates(
        components=values, gate=np.frombuffer(gate, _HALF).astype(np.float32).reshape(1, -1) if gate else None
    )


def pack_query_state(queries: QueryStates, query: int = 0) -> tuple[bytes, bytes]:
    """One state's components and gate (empty without one) as half-precision bytes."""
    gate = b"" if queries.gate is None else queries.gate[query].astype(_HALF).tobytes()
    return queries.components[query].astype(_HALF).tobytes(), gate

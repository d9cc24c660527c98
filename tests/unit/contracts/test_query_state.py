"""The packed query state on the wire and back, and what is said of bytes that do not fit."""

import numpy as np
import pytest
from freshet.v1 import common_pb2

from services.algorithms.scoring.packed_state import pack_query_state, unpack_query_state
from services.algorithms.scoring.states import QueryStates
from services.contracts.wire import PackedQueryState, query_state_message, query_state_of, unpacked
from services.platform.errors import InvalidRequest


def packed(num_pairs: int) -> PackedQueryState:
    rng = np.random.default_rng(num_pairs)
    gate = rng.normal(size=(1, num_pairs)).astype(np.float32) if num_pairs else None
    components, gate_bytes = pack_query_state(
        QueryStates(components=rng.normal(size=(1, 2, 4)).astype(np.float32), gate=gate)
    )
    return PackedQueryState(
        model_version="m", components=components, gate=gate_bytes, num_components=2, component_width=4
    )


@pytest.mark.parametrize("num_pairs", [0, 6])
def test_a_state_comes_back_from_its_message_byte_for_byte(num_pairs: int) -> None:
    state = packed(num_pairs)
    assert query_state_of(common_pb2.QueryState.FromString(query_state_message(state).SerializeToString())) == state


def test_bytes_that_do_not_fit_are_an_invalid_request() -> None:
    message = query_state_message(packed(6))
    message.component_width = 5
    with pytest.raises(InvalidRequest, match="query_state: components holds 16 bytes; 2 x 5 need 20"):
        unpacked(message, unpack_query_state)

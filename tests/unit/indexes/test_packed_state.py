"""Query states as bytes."""

import numpy as np
import pytest
from retrieval_scene import half, make_queries

from services.algorithms.packed_state import pack_query_state, unpack_query_state
from services.algorithms.states import QueryStates


@pytest.mark.parametrize("shape", [(1, 1, 16), (4, 2, 8)])
def test_packing_keeps_what_half_precision_keeps(shape: tuple[int, int, int]) -> None:
    queries = make_queries(np.random.default_rng(0), 3, *shape)
    components, gate = pack_query_state(queries, 1)
    found = unpack_query_state(components, gate, num_components=shape[0], component_width=shape[2])
    wanted = half(queries)
    assert (found.components[0] == wanted.components[1]).all()
    if wanted.gate is None:
        assert found.gate is None
    else:
        assert found.gate is not None
        assert (found.gate[0] == wanted.gate[1]).all()


def test_components_of_another_size_are_refused() -> None:
    components, _ = pack_query_state(QueryStates(components=np.zeros((1, 2, 4), np.float32)))
    with pytest.raises(ValueError, match="components holds 16 bytes; 2 x 5 need 20"):
        unpack_query_state(components, b"", num_components=2, component_width=5)

"""Query states as bytes."""

import numpy as np
import pytest
from retrieval_scene import half, make_queries

from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.scoring.packed_state import after_absence, pack_query_state, unpack_query_state
from services.algorithms.scoring.states import QueryStates
from services.contracts.wire import PackedQueryState


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


@pytest.mark.parametrize("shape", [(1, 1, 16), (4, 2, 8)])
def test_after_an_absence_a_packed_state_has_its_buckets_row(shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(1)
    queries, pairs = half(make_queries(random, 1, *shape)), shape[0] * shape[1]
    components = random.normal(size=(18, shape[0], shape[2])).astype(np.float32)
    gate = None if queries.gate is None else random.normal(size=(18, pairs)).astype(np.float32)
    for part in (components, gate):
        if part is not None:
            part[0] = 0
    rows = AbsenceRows(floor_seconds=1024, components=components, gate=gate)
    packed = pack_query_state(queries)
    size = {"num_components": shape[0], "component_width": shape[2]}
    state = PackedQueryState(model_version="m", components=packed[0], gate=packed[1], **size)
    for seconds, bucket in ((-5, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2), (1 << 40, 17)):
        found, in_bucket = after_absence(state, rows, 7_000, 7_000 + 1_000 * seconds)
        wanted = pack_query_state(rows.apply(queries, bucket))
        assert (in_bucket, found.components, found.gate, found.model_version) == (bucket, *wanted, "m")
        assert (found is state) == (bucket == 0)
    assert after_absence(state, None, 0, 10**15) == (state, 0)

"""The mutation benchmark: its stream of changes, and rows in which every index finds what it should."""

from importlib.util import find_spec

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.offline.evaluation.catalogues.scene import Shape
from services.offline.evaluation.mutation.indexes import Faiss, Hnsw, Mutable
from services.offline.evaluation.mutation.rows import World, measure
from services.offline.evaluation.mutation.stream import make_stream


def test_batches_of_a_stream_lead_to_what_it_says_is_held() -> None:
    stream = make_stream(50, 80, 2_000, seed=3)
    held = {item: item for item in range(50)}
    for start in range(0, 2_000, 7):
        items, states, removed = stream.batch(start, min(start + 7, 2_000))
        assert not set(items) & set(removed)
        held.update(zip(items, states, strict=True))
        for item in removed:
            held.pop(item, None)
        assert held == dict(zip(*(column.tolist() for column in stream.held(min(start + 7, 2_000))), strict=True))
    assert 25 <= len(held) <= 120
    assert len(stream.held(0)[0]) == 50


def make_world(p_q: int, p_x: int) -> World:
    rng = np.random.default_rng(1)
    shape = Shape(
        name="small", num_items=300, num_query_components=p_q, num_item_components=p_x, component_width=8, gated=p_q > 1
    )
    return World(
        shape=shape,
        num_items=300,
        pool=make_items(rng, 330, p_q, p_x, 8),
        queries=make_queries(rng, 64, p_q, p_x, 8),
        pair_gate=make_pair_gate(rng, p_q * p_x, 4) if p_q > 1 else None,
    )


needs_hnswlib = pytest.mark.skipif(find_spec("hnswlib") is None, reason="hnswlib is built from Python's headers")


@pytest.mark.parametrize("kind", ["mutable", "mutable mol", "faiss flat", pytest.param("hnswlib", marks=needs_hnswlib)])
def test_every_index_finds_what_is_held_while_it_changes(kind: str) -> None:
    world = make_world(2, 2) if kind == "mutable mol" else make_world(1, 1)

    def start(*held: np.ndarray):
        if kind.startswith("mutable"):
            return Mutable("brute_force", world.pool, world.queries, world.pair_gate, held)
        if kind.startswith("faiss"):
            return Faiss("flat", world.pool, world.queries, held, threads=1)
        return Hnsw(world.pool, world.queries, held, threads=1, ef=300)

    quiet, busy = measure(world, kind, start, rates=(0, 500), seconds=0.3, seed=2)
    assert (quiet["changes_per_second"], busy["changes_per_second"]) == (0, 500)
    assert quiet["applied_per_second"] == 0 < busy["applied_per_second"]
    for row in (quiet, busy):
        assert row["searches"] > 0 < row["quiet_searches"]
        assert row["milliseconds"] <= row["p99_milliseconds"]
        assert row.get("exact", 1.0) == 1.0
        for recall in ("recall_100", "recall_100_at_end", "recall_100_fresh"):
            assert row[recall] == 1.0 if kind != "hnswlib" else row[recall] > 0.95

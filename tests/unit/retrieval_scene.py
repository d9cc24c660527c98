"""Catalogues and queries for the retrieval tests: random ones, and a small bundle on disk with real checksums."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from services.algorithms.bundles.model_bundle import Bundle, EncoderShape, HeadShape
from services.algorithms.bundles.model_manifest import NeighbourShape
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.algorithms.scoring.packed_state import pack_query_state
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.bundles.model import BundleContent, write_bundle

CATEGORIES = ("Action", "Comedy", "Drama", "Western")


def unit(array: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(array, axis=-1, keepdims=True)
    return (array / np.where(norms > 0, norms, 1)).astype(np.float32)


def make_items(rng: np.random.Generator, count: int, p_q: int, p_x: int, d: int, *, spread: float = 1.0) -> ItemStates:
    """Components around a common centre per item: `spread` 0 makes an item's components equal."""
    centre = rng.normal(size=(count, 1, d))
    components = unit(centre + spread * rng.normal(size=(count, p_x, d)))
    pairs = p_q * p_x
    gate = None if pairs == 1 else rng.normal(size=(count, pairs)).astype(np.float32)
    return ItemStates(components=components, gate=gate)


def make_queries(rng: np.random.Generator, count: int, p_q: int, p_x: int, d: int) -> QueryStates:
    pairs = p_q * p_x
    gate = None if pairs == 1 else rng.normal(size=(count, pairs)).astype(np.float32)
    return QueryStates(components=unit(rng.normal(size=(count, p_q, d))), gate=gate)


def make_pair_gate(rng: np.random.Generator, pairs: int, hidden: int, *, scale: float = 0.5) -> PairGate:
    def draw(*shape: int) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    return PairGate(
        hidden_weight=draw(hidden, pairs),
        hidden_bias=draw(hidden),
        out_weight=draw(pairs, hidden),
        out_bias=draw(pairs),
    )


def make_bundle(
    path: Path,
    *,
    seed: int = 0,
    count: int = 60,
    p_q: int = 4,
    p_x: int = 2,
    d: int = 8,
    hidden: int = 16,
    categories: Sequence[Sequence[str]] | None = None,
    attributes: pa.Table | None = None,
) -> Bundle:
    """A bundle of `count` items "item-0".."item-<count-1>", item i in category i % 4 where `categories` says nothing; a
    dot product for 1 x 1."""
    rng = np.random.default_rng(seed)
    pairs = p_q * p_x
    items = make_items(rng, count, p_q, p_x, d)
    return write_bundle(
        path,
        BundleContent(
            encoder=EncoderShape(
                kind="hstu", num_blocks=1, num_heads=1, width=8, d_qk=8, d_v=8, max_history=20, num_time_buckets=8
            ),
            head=HeadShape(
                kind="mol" if pairs > 1 else "dot",
                num_query_components=p_q,
                num_item_components=p_x,
                component_width=d,
                tau=0.05,
                gate_hidden=hidden if pairs > 1 else 0,
            ),
            weights={"encoder.bias": rng.normal(size=8).astype(np.float32)},
            item_states=items,
            pair_gate=make_pair_gate(rng, pairs, hidden) if pairs > 1 else None,
            item_ids=[f"item-{row}" for row in range(count)],
            titles=[f"Title {row}" for row in range(count)],
            categories=categories or [(CATEGORIES[row % 4],) for row in range(count)],
            counts=np.arange(count, dtype=np.int64),
            attributes=attributes,
        ),
    )


def make_neighbours(rng: np.random.Generator, count: int, num_neighbours: int = 6) -> ItemNeighbours:
    """Random ones; some weights are 0."""
    weights = rng.random((count, num_neighbours)).astype(np.float32)
    return ItemNeighbours(
        shape=NeighbourShape(num_neighbours=num_neighbours, decay=0.7, model_share=0.5),
        items=rng.integers(0, count, (count, num_neighbours)).astype(np.int32),
        weights=np.where(weights < 0.2, 0, weights),
    )


def half(queries: QueryStates) -> QueryStates:
    """The state as it arrives over the wire, in half precision."""
    gate = None if queries.gate is None else queries.gate.astype(np.float16).astype(np.float32)
    return QueryStates(components=queries.components.astype(np.float16).astype(np.float32), gate=gate)


def state_fields(queries: QueryStates, model_version: str, query: int = 0) -> dict[str, Any]:
    """The fields of a QueryState message."""
    components, gate = pack_query_state(queries, query)
    return {
        "model_version": model_version,
        "components": components,
        "gate": gate,
        "num_components": queries.components.shape[1],
        "component_width": queries.components.shape[2],
    }

"""Candidates and reranker as processes on a real broker: what a delta changes, what a restart and an outage leave."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, common_pb2, reranker_pb2, reranker_pb2_grpc

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.contracts.topics import ensure_topics
from services.contracts.topics.index_deltas import INDEX_DELTAS, IndexDelta, ItemDelta, encode
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.platform.stream.kafka import BulkProducer, Record
from services.stack import Stack

DEADLINE_S = 30
KINDS = common_pb2.Certificate


class Live:
    """Both processes, a writer of deltas in the refresher's place, and one query."""

    def __init__(self, stack: Stack, bundle: Bundle) -> None:
        self.stack, self.bundle = stack, bundle
        self.producer = BulkProducer(stack.kafka_bootstrap, client_id="test")
        head = bundle.manifest.head
        rng = np.random.default_rng(3)
        components = rng.normal(size=(head.num_query_components, head.component_width))
        self.components = (components / np.linalg.norm(components, axis=1, keepdims=True)).astype("<f2")
        self.state = common_pb2.QueryState(
            model_version=bundle.model_version,
            components=self.components.tobytes(),
            gate=np.zeros(head.num_pairs, dtype="<f2").tobytes(),
            num_components=head.num_query_components,
            component_width=head.component_width,
        )
        self._batch = 0

    def put(self, item_id: str, title: str, *, withdrawn: bool = False) -> None:
        item = CatalogueItem(item_id=item_id, title=title, withdrawn=withdrawn)
        self.producer.send_many([Record(ITEMS, item_id.encode(), encode_item(item))])

    def refresh(self, item_id: str) -> int:
        """A state near to the query; returns the offset of its batch's last record."""
        self._batch += 1
        head = self.bundle.manifest.head
        near = self.components.astype(np.float64).sum(axis=0)
        delta = IndexDelta(
            model_version=self.bundle.model_version,
            partition=0,
            offset=self._batch,
            batch=self._batch,
            last_of_batch=True,
            newest_recorded_ms=round(time.time() * 1000),
            change=ItemDelta(
                item_id=item_id,
                components=np.tile(near / np.linalg.norm(near), (head.num_item_components, 1)).astype(np.float32),
                gate=np.zeros(head.num_pairs, dtype=np.float32),
                model_share=0.0,
                num_interactions=3,
            ),
        )
        ((_, offset),) = self.producer.send_many([Record(INDEX_DELTAS, delta.key, encode(delta))])
        return offset

    def search(self, *, waits: bool = False) -> Any:
        """waits: until the process listens."""
        with grpc.insecure_channel(self.stack.address("candidates")) as channel:
            stub = candidates_pb2_grpc.CandidatesServiceStub(channel)
            return stub.Search(
                candidates_pb2.SearchRequest(query_state=self.state, k=20, stage=candidates_pb2.STAGE_FIRST),
                timeout=30,
                wait_for_ready=waits,
            )

    def rerank(self, pool: Any) -> Any:
        with grpc.insecure_channel(self.stack.address("reranker")) as channel:
            stub = reranker_pb2_grpc.RerankerServiceStub(channel)
            return stub.Rerank(
                reranker_pb2.RerankRequest(
                    query_state=self.state,
                    candidate_item_ids=pool.item_ids,
                    bound=pool.bound,
                    k=5,
                    index_version=pool.index_version,
                    deltas_offset=pool.index_freshness.deltas_offset,
                ),
                timeout=10,
            )

    def info(self) -> Any:
        with grpc.insecure_channel(self.stack.address("reranker")) as channel:
            stub = reranker_pb2_grpc.RerankerServiceStub(channel)
            return stub.GetRerankerInfo(reranker_pb2.GetRerankerInfoRequest(), timeout=10)

    def wait_for(self, offset: int) -> Any:
        """A search of that position or a later one, once both processes hold it."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            pool = self.search()
            held = min(pool.index_freshness.deltas_offset, self.info().index_freshness.deltas_offset)
            if held >= offset:
                return pool
            assert time.monotonic() < deadline, f"position {offset} is not served; at {held}"
            time.sleep(0.02)


@pytest.fixture
def live(_session_stack: Stack, small_bundle: Path) -> Iterator[Live]:
    stack = _session_stack
    stack.use_bundle(small_bundle)
    stack.up(["kafka"])
    ensure_topics(stack.kafka_bootstrap)
    stack.up(["candidates", "reranker"])
    live = Live(stack, load_bundle(small_bundle))
    yield live
    live.producer.close(1.0)


def test_a_new_item_is_retrieved_and_proven_by_both_and_a_withdrawn_one_is_not(live: Live) -> None:
    live.put("brand-new", "Brand New")
    pool = live.wait_for(live.refresh("brand-new"))
    assert "brand-new" in pool.item_ids
    assert 0 <= pool.index_freshness.lag_seconds < DEADLINE_S
    answer = live.rerank(pool)
    assert answer.index_version == pool.index_version
    assert answer.certificate.kind in (KINDS.KIND_EXACT, KINDS.KIND_BOUNDED)
    assert "brand-new" in [item.item_id for item in answer.items]
    live.put("brand-new", "Brand New", withdrawn=True)
    live.put("second", "Second")
    later = live.wait_for(live.refresh("second"))
    deadline = time.monotonic() + DEADLINE_S
    while "brand-new" in later.item_ids:
        assert time.monotonic() < deadline
        later = live.search()
    assert "second" in later.item_ids


def test_a_restarted_process_has_caught_up_before_it_says_that_it_is_ready(live: Live) -> None:
    live.put("kept", "StoredCheckpoint")
    offset = live.refresh("kept")
    live.wait_for(offset)
    for part in ("candidates", "reranker"):
        live.stack.stop(part)
        live.stack.start(part)
    assert live.search().index_freshness.deltas_offset >= offset
    assert live.info().index_freshness.deltas_offset >= offset
    assert "kept" in live.search().item_ids


def test_without_kafka_what_is_known_is_served_but_a_restart_answers_only_when_it_is_back(live: Live) -> None:
    live.put("survivor", "Survivor")
    offset = live.refresh("survivor")
    live.wait_for(offset)
    live.stack.kill("kafka")
    assert "survivor" in live.search().item_ids
    live.stack.stop("candidates")
    live.stack.start("candidates", wait=False)
    with pytest.raises(grpc.RpcError) as refused:
        live.search(waits=True)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "what is withdrawn is not known" in (refused.value.details() or "")
    live.stack.start("kafka")
    live.stack.wait_healthy("candidates", timeout_s=60)
    assert "survivor" in live.wait_for(offset).item_ids

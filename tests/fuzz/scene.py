"""What several targets serve: a small bundle with item neighbours, its catalogue's processes, and a user's state."""

from pathlib import Path

import numpy as np
from freshet.v1 import common_pb2
from prometheus_client import CollectorRegistry
from retrieval_scene import half, make_bundle, make_neighbours, make_queries, state_fields

from services.algorithms.bundles.model_bundle import Bundle
from services.candidates import bootstrap as candidates
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import CandidatesServicer
from services.offline.bundles.model import BundleContent, write_bundle
from services.reranker import bootstrap as reranker
from services.reranker.config import RerankerSettings
from services.reranker.handlers import RerankerMetrics
from services.reranker.server import RerankerServicer

ITEM_IDS = [f"item-{row}" for row in range(60)]


def write_small_bundle(folder: Path) -> Bundle:
    """60 items of 4 x 2 components of width 8, with 6 neighbours each."""
    plain = make_bundle(folder.with_name(f"{folder.name}-plain"))
    return write_bundle(
        folder,
        BundleContent(
            encoder=plain.encoder,
            head=plain.manifest.head,
            weights=plain.weights(),
            item_states=plain.item_states,
            pair_gate=plain.pair_gate,
            item_ids=plain.item_ids,
            titles=plain.titles,
            categories=plain.categories,
            counts=plain.counts,
            neighbours=make_neighbours(np.random.default_rng(3), plain.num_items),
        ),
    )


def query_state(model_version: str, *, p_q: int = 4, p_x: int = 2, d: int = 8) -> common_pb2.QueryState:
    """A state that fits the small bundle."""
    queries = half(make_queries(np.random.default_rng(5), 1, p_q, p_x, d))
    return common_pb2.QueryState(**state_fields(queries, model_version))


class Served:
    """Candidates and the reranker over one bundle, without a server."""

    def __init__(self, bundle: Path, **votes: float) -> None:
        """votes: candidates' settings of the memory; without, item neighbours vote alone."""
        self.registry = CollectorRegistry()
        settings = CandidatesSettings(
            port=0, metrics_port=0, bundle=bundle, algorithms="exact top_k_avg(15)", audit_share=0.0, **votes
        )
        self.candidates_metrics = CandidatesMetrics(self.registry)
        self.live = candidates.make_live(settings, candidates.load_catalogue(settings), self.candidates_metrics)
        own = RerankerSettings(port=0, metrics_port=0, bundle=bundle)
        self.reranker_metrics = RerankerMetrics(self.registry)
        self.catalogue = reranker.load_catalogue(own)[0]
        self.rerank = reranker.Rerank(catalogue=self.catalogue, metrics=self.reranker_metrics)
        self.candidates, self.reranker = CandidatesServicer(self.live.search), RerankerServicer(self.rerank)

    async def close(self) -> None:
        """Finish what is queued."""
        await self.live.search.close()
        await self.rerank.close()

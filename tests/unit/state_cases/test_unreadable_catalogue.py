"""A restart while the items topic cannot be read: what was withdrawn is answered again, and nothing says so.

The follower, its listener and the handlers are the real ones; the two topics are lists that can be unreadable.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.gateway import MemoryCandidates
from fakes.stream import MemoryTopics
from gateway.gateway_scene import Scene
from prometheus_client import CollectorRegistry
from retrieval_scene import half, make_bundle, make_queries

from services.algorithms.rules.filters import ItemFilter
from services.candidates import bootstrap as candidates
from services.candidates.config import CandidatesSettings
from services.candidates.domain import SearchQuery, Stage
from services.candidates.metrics import CandidatesMetrics
from services.catalogue.changes import CatalogueChanges
from services.catalogue.follower import CatalogueFollower
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.gateway.domain import Degradation, RecommendQuery
from services.platform.errors import DependencyUnavailable, FreshetError
from services.reranker import bootstrap as reranker
from services.reranker.config import RerankerSettings
from services.reranker.domain import RerankQuery
from services.reranker.handlers import RerankerMetrics

WITHDRAWN = "item-3"


class Topics(MemoryTopics):
    """Both topics; `down`: the broker cannot give them."""

    def __init__(self) -> None:
        super().__init__({INDEX_DELTAS: 1, ITEMS: 1})

    def withdraw(self, item_id: str) -> None:
        value = encode_item(CatalogueItem(item_id=item_id, withdrawn=True))
        self.write(ITEMS, item_id.encode(), value)


def is_ready_after_a_moment(source: Topics, listener: Any, model_version: str) -> bool:
    """Follow the topics for a few turns; whether the process would say SERVING then."""
    ready: list[bool] = []
    follower = CatalogueFollower(
        source,
        listener,
        model_version=model_version,
        on_ready=lambda: ready.append(True),
        poll_s=0.0,
        backoff_s=0.005,
    )
    for _ in range(5):
        try:
            follower.step()
        except FreshetError as exc:
            follower.fail(exc)
    return bool(ready)


class Life:
    """One life of a process that serves a bundle: what it answers once it is ready; None: it is not ready."""

    def __init__(self, path: Path) -> None:
        self.path, self.registry = path, CollectorRegistry()
        queries = make_queries(np.random.default_rng(2), 1, 4, 2, 8)
        self.queries = half(queries)

    async def candidates(self, source: Topics) -> set[str] | None:
        settings = CandidatesSettings(port=0, metrics_port=0, bundle=self.path, algorithms="brute_force", audit_share=0)
        metrics = CandidatesMetrics(self.registry)
        live = candidates.make_live(settings, candidates.load_catalogue(settings), metrics)
        model = live.catalogue.base.model_version
        listener = CatalogueChanges(live.catalogue, metrics.catalogue)
        ready = is_ready_after_a_moment(source, listener, model)
        query = SearchQuery(query=self.queries, model_version=model, k=60, stage=Stage.FULL, filter=ItemFilter())
        answer = await live.search(query)
        await live.search.close()
        return set(answer.item_ids) if ready else None

    async def reranker(self, source: Topics) -> set[str] | None:
        settings = RerankerSettings(port=0, metrics_port=0, bundle=self.path)
        metrics, catalogue = RerankerMetrics(self.registry), reranker.load_catalogue(settings)[0]
        rerank, model = reranker.Rerank(catalogue=catalogue, metrics=metrics), catalogue.base.model_version
        listener = CatalogueChanges(catalogue, metrics.catalogue)
        ready = is_ready_after_a_moment(source, listener, model)
        pool = [f"item-{number}" for number in range(8)]
        query = RerankQuery(
            query=self.queries, model_version=model, candidate_item_ids=pool, bound=None, k=8, filter=ItemFilter()
        )
        ranked, _ = await rerank(query)
        await rerank.close()
        return set(ranked.item_ids) if ready else None


@pytest.fixture
def new_life(tmp_path: Path) -> Callable[[], Life]:
    make_bundle(tmp_path / "bundle")
    return lambda: Life(tmp_path / "bundle")


@pytest.mark.parametrize("process", ["candidates", "reranker"])
async def test_a_restarted_process_that_says_ready_serves_nothing_withdrawn(
    process: str, new_life: Callable[[], Life]
) -> None:
    source = Topics()
    source.withdraw(WITHDRAWN)
    first = await getattr(new_life(), process)(source)
    assert first is not None
    assert WITHDRAWN not in first
    source.down = True
    assert WITHDRAWN not in (await getattr(new_life(), process)(source) or ())


async def popular_after_start(source: Topics) -> tuple[list[str], Sequence[Degradation]]:
    """What a gateway answers that has just started, while candidates are away."""
    scene = Scene(candidates=MemoryCandidates(failure=DependencyUnavailable("candidates: starting")))
    scene.popular.knows_withdrawn = False
    if is_ready_after_a_moment(source, scene.popular, "m1"):
        scene.popular.caught_up()
    answer = await scene.recommend(RecommendQuery(user_id="ann"))
    return [item.item_id for item in answer.items], answer.degradations


async def test_popular_items_after_a_restart_hold_nothing_withdrawn_or_say_so() -> None:
    source = Topics()
    source.withdraw("b")
    before, _ = await popular_after_start(source)
    assert "b" not in before
    source.down = True
    items, marks = await popular_after_start(source)
    assert Degradation.PARTIAL_CATALOGUE in marks or "b" not in items

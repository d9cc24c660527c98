"""Rerank: score a pool in full, prove what can be proven about it, then apply rules and diversity.

The event loop only checks and queues; one worker thread scores. Pools are small, so every score is float64 over the
stored states: what the design calls exact.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from services.algorithms.catalogue import Catalogue
from services.algorithms.diversity import select
from services.algorithms.indexes.protocol import certificate
from services.algorithms.indexes.ranking import order_by_score_then_id
from services.common.batching import Batcher
from services.common.errors import InvalidRequest, PreconditionFailed
from services.reranker.domain import Ranked, RerankAnswer, RerankQuery
from services.reranker.metrics import RerankerMetrics

MAX_K = 1_000
MAX_POOL = 10_000


class Rerank:
    """Ranks pools of one catalogue's items."""

    def __init__(self, *, catalogue: Catalogue, metrics: RerankerMetrics, max_batch: int, max_queue: int) -> None:
        self._catalogue, self._metrics = catalogue, metrics
        self._batcher: Batcher[RerankQuery, Ranked] = Batcher(
            self.rank_all, max_batch=max_batch, max_queue=max_queue, name="reranker", on_batch=metrics.batch
        )

    async def __call__(self, request: RerankQuery) -> RerankAnswer:
        """Rank one pool.

        Raises: InvalidRequest naming the field, PreconditionFailed for a state of another model, Overloaded.
        """
        self._check(request)
        ranked, queue_s = await self._batcher.submit(request)
        self._metrics.queue.observe(queue_s)
        self._metrics.ranked(ranked.certificate, ranked.dropped_items)
        return RerankAnswer(ranked=ranked, model_version=self._catalogue.model_version, queue_s=queue_s)

    async def close(self) -> None:
        """Finish what is queued."""
        await self._batcher.close()

    def rank_all(self, requests: Sequence[RerankQuery]) -> list[Ranked]:
        """Rank checked pools (worker thread)."""
        return [self._rank(request) for request in requests]

    def _check(self, request: RerankQuery) -> None:
        if not 1 <= request.k <= MAX_K:
            raise InvalidRequest.of("k", request.k, f"1-{MAX_K}")
        if len(request.candidate_item_ids) > MAX_POOL:
            raise InvalidRequest.of("len(candidate_item_ids)", len(request.candidate_item_ids), f"0-{MAX_POOL}")
        if request.bound is not None and (math.isnan(request.bound) or request.bound == math.inf):
            raise InvalidRequest.of("bound", request.bound, "a number, -inf (nothing left out), or absent (no proof)")
        if not 0 <= request.diversity <= 1:
            raise InvalidRequest.of("diversity", request.diversity, "0-1")
        if request.model_version != self._catalogue.model_version:
            raise PreconditionFailed(
                f"query_state.model_version={request.model_version!r} but the reranker holds model "
                f"{self._catalogue.model_version!r}; encode the history again with that model"
            )
        try:
            self._catalogue.check(request.query)
        except ValueError as exc:
            raise InvalidRequest(f"query_state: {exc}") from exc

    def _rank(self, request: RerankQuery) -> Ranked:
        started = time.perf_counter()
        catalogue, scorer = self._catalogue, self._catalogue.scorer
        rows = catalogue.rules.rows(dict.fromkeys(request.candidate_item_ids))
        rows = rows[catalogue.rules.mask_pool(request.filter, rows)]
        verified = time.perf_counter()
        error = float(scorer.error_bounds_float64(request.query)[0])
        scores = scorer.scores_float64(request.query, 0, rows)
        order, scores = order_by_score_then_id(scores, catalogue.tie_ranks[rows], tolerance=2 * error)
        rows = rows[order]
        kth = float(scores[request.k - 1]) - 2 * error if len(rows) >= request.k else None
        proof = certificate(bound=request.bound, kth_score=kth)
        scored = time.perf_counter()
        codes = catalogue.rules.category_codes
        chosen = select(
            scores,
            request.k,
            components=scorer.components_of(rows) if request.diversity else None,
            diversity=request.diversity,
            categories=[codes[row] for row in rows.tolist()] if request.max_per_category else None,
            max_per_category=request.max_per_category,
        )
        ended = time.perf_counter()
        self._metrics.verify.observe(verified - started)
        self._metrics.score.observe(scored - verified)
        self._metrics.choose.observe(ended - scored)
        return Ranked(
            item_ids=[catalogue.item_ids[row] for row in rows[chosen].tolist()],
            scores=np.asarray(scores[chosen]).tolist(),
            certificate=proof,
            dropped_items=len(request.candidate_item_ids) - len(rows),
            rerank_s=ended - started,
        )

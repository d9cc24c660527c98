"""Rerank: score a pool in full, certify the result, then apply rules and diversity. Also explains scores.

The event loop validates and queues pools. One worker thread scores them in float64 from the stored states, with the
version that made the pool if that version is still available.
"""

import asyncio
import math
import time
from collections.abc import Sequence

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from services.algorithms.indexes.mutable.lookup import FoundItems, find_items
from services.algorithms.indexes.protocol import ESTIMATE, Certificate, Scores, certificate
from services.algorithms.indexes.rescoring import order_by_score_then_id
from services.algorithms.items.live_catalogue import NO_CHANGE, LiveCatalogue, Served
from services.algorithms.rules.diversity import select
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import MAX_RULES, Mask, Rule, added
from services.algorithms.scoring.explanation import score_parts
from services.algorithms.scoring.states import QueryStates
from services.algorithms.scoring.voted_answers import id_ranks
from services.catalogue.changes import CatalogueMetrics
from services.contracts.wire import ExplainedPair, ExplainedScore
from services.platform.errors import InvalidRequest, NotFound, PreconditionFailed
from services.platform.metrics import BATCH_BUCKETS, Figures
from services.platform.threads import Batcher
from services.platform.validation import validate_id
from services.reranker.domain import ExplainQuery, Ranked, RerankQuery


class RerankerMetrics:
    """Histograms with few labels."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        figures = Figures(registry)
        stages = figures.histogram(
            "freshet_reranker_stage_seconds",
            "Seconds of a Rerank per stage: waiting, verifying the filter, scoring, choosing.",
            "stage",
        )
        self.queue, self.verify, self.score, self.choose = (
            stages.labels(stage) for stage in ("queue", "verify", "score", "choose")
        )
        self.catalogue = CatalogueMetrics("reranker", registry)
        self.batch_pools = figures.histogram("freshet_reranker_batch_pools", "Pools per batch.", buckets=BATCH_BUCKETS)
        self._dropped = figures.counter(
            "freshet_reranker_dropped_items", "Candidates dropped: unknown, repeated, or against the filter."
        )
        certificates = figures.counter("freshet_reranker_certificates", "Answers by kind of certificate.", "kind")
        self._certificates = {kind: certificates.labels(kind) for kind in ("exact", "bounded", "estimate")}

    def ranked(self, certificate: Certificate, dropped_items: int) -> None:
        self._certificates[certificate.kind].inc()
        if dropped_items:
            self._dropped.inc(dropped_items)


# Each rule with its rows.
Ruled = Sequence[tuple[Rule, Mask]]
MAX_K = 1_000
MAX_POOL = 10_000
# Most pools per turn of the worker thread, and most pools that wait.
MAX_BATCH, MAX_QUEUE = 32, 256
# How long a pool waits for its version: both processes apply the same log, some milliseconds apart.
_VERSION_WAIT_S = 0.01
_VERSION_CHECK_S = 0.002


class Rerank:
    """Ranks pools of one live catalogue's items, and explains scores."""

    def __init__(self, *, catalogue: LiveCatalogue, metrics: RerankerMetrics) -> None:
        self.catalogue, self._metrics = catalogue, metrics
        self._batcher: Batcher[RerankQuery, Ranked] = Batcher(
            self.rank_all,
            max_batch=MAX_BATCH,
            max_queue=MAX_QUEUE,
            name="reranker",
            on_batch=metrics.batch_pools.observe,
        )

    async def __call__(self, request: RerankQuery) -> tuple[Ranked, float]:
        """Rank a pool; return the answer and the seconds in the queue.

        Raises: InvalidRequest, PreconditionFailed for a state of another model, Overloaded.
        """
        self._check(request)
        await self._wait_for(request)
        ranked, queue_s = await self._batcher.submit(request)
        self._metrics.queue.observe(queue_s)
        self._metrics.ranked(ranked.certificate, ranked.dropped_items)
        return ranked, queue_s

    async def close(self) -> None:
        await self._batcher.close()

    def rank_all(self, requests: Sequence[RerankQuery]) -> list[Ranked]:
        """Rank validated pools (worker thread)."""
        return [self._rank(request) for request in requests]

    def explain(self, asked: ExplainQuery) -> ExplainedScore:
        """Explain an item's score. Raises: what a rerank raises; NotFound for an item without a state."""
        validate_id("item_id", asked.item_id)
        self._check_rules(asked.rules)
        self._check_query(asked.query, asked.model_version)
        item = self.catalogue.explain(asked.item_id)
        if item is None:
            why = self.catalogue.absence_of(asked.item_id)
            raise NotFound(f"item_id={asked.item_id!r} {why} ({self.catalogue.served.name})")
        parts = score_parts(
            asked.query,
            item.state,
            self.catalogue.base.pair_gate,
            base=item.base,
            model_share=item.model_share,
        )
        score, from_model = float(parts.contributions.sum()), float(parts.from_model.sum())
        return ExplainedScore(
            score=score,
            from_model=from_model,
            from_interactions=score - from_model,
            model_share=item.model_share,
            num_interactions=item.num_interactions,
            pairs=[
                ExplainedPair(
                    query_component=pair // parts.num_item_components,
                    item_component=pair % parts.num_item_components,
                    weight=float(parts.weights[pair]),
                    cosine=float(parts.cosines[pair]),
                    contribution=float(parts.contributions[pair]),
                    from_model=float(parts.from_model[pair]),
                )
                for pair in parts.largest(asked.max_pairs)
            ],
            title=item.title,
            index_version=item.served.name,
            rules=[
                place
                for place, rule in enumerate(asked.rules)
                if self.catalogue.passing(rule.which, [asked.item_id]).all()
            ],
        )

    def _check(self, request: RerankQuery) -> None:
        if not 1 <= request.k <= MAX_K:
            raise InvalidRequest.of("k", request.k, f"1-{MAX_K}")
        if len(request.candidate_item_ids) > MAX_POOL:
            raise InvalidRequest.of("len(candidate_item_ids)", len(request.candidate_item_ids), f"0-{MAX_POOL}")
        if request.bound is not None and (math.isnan(request.bound) or request.bound == math.inf):
            raise InvalidRequest.of("bound", request.bound, "a number, -inf (nothing left out), or absent (no proof)")
        if not 0 <= request.diversity <= 1:
            raise InvalidRequest.of("diversity", request.diversity, "0-1")
        for name, values in (("votes", request.votes), ("discounts", request.discounts)):
            if values and len(values) != len(request.candidate_item_ids):
                allowed = f"none, or one per candidate: {len(request.candidate_item_ids)}"
                raise InvalidRequest.of(f"len({name})", len(values), allowed)
        if request.votes and not all(map(math.isfinite, request.votes)):
            raise InvalidRequest.of("votes", "NaN or infinite values", "finite numbers")
        if request.votes and not 0 <= request.model_share <= 1:
            raise InvalidRequest.of("model_share", request.model_share, "0-1")
        if not all(0 <= discount < math.inf for discount in request.discounts):
            raise InvalidRequest.of("discounts", "NaN, negative or infinite values", "finite numbers from 0")
        try:
            request.filter.check(self.catalogue.index.kinds)
        except ValueError as exc:
            raise InvalidRequest(f"filter.{exc}") from exc
        self._check_rules(request.rules)
        self._check_query(request.query, request.model_version)

    def _check_rules(self, rules: Sequence[Rule]) -> None:
        if len(rules) > MAX_RULES:
            raise InvalidRequest.of("rules", f"{len(rules)} rules", f"at most {MAX_RULES}")
        for rule in rules:
            for effect, value in (("boost", rule.boost), ("bury", rule.bury)):
                if not 0 <= value < math.inf:
                    raise InvalidRequest.of(f"rules[{rule.name!r}].{effect}", value, "a finite number, 0 or more")
            try:
                rule.which.check(self.catalogue.index.kinds)
            except ValueError as exc:
                raise InvalidRequest(f"rules[{rule.name!r}].{exc}") from exc

    def _check_query(self, query: QueryStates, model_version: str) -> None:
        if model_version != self.catalogue.base.model_version:
            raise PreconditionFailed(
                f"query_state.model_version={model_version!r} but the reranker holds model "
                f"{self.catalogue.base.model_version!r}; encode the history again with that model"
            )
        try:
            self.catalogue.check(query)
        except ValueError as exc:
            raise InvalidRequest(f"query_state: {exc}") from exc

    async def _wait_for(self, request: RerankQuery) -> None:
        name, position = request.index_version, request.position
        deadline = time.perf_counter() + _VERSION_WAIT_S
        # At most five polls: the thread that applies changes does not notify the event loop.
        while name and self.catalogue.may_come(name, position) and time.perf_counter() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_VERSION_CHECK_S)

    def _rank(self, request: RerankQuery) -> Ranked:
        started = time.perf_counter()
        served, is_the_pools = self._version(request)
        pool = request.candidate_item_ids
        votes = dict(zip(pool, request.votes or [0.0] * len(pool), strict=True))
        items = self._verified(served, request.filter, list(votes))
        verified = time.perf_counter()
        model_weight = request.model_share if request.votes else 1.0
        error = items.error(request.query, 0) * model_weight
        scores = items.scores(request.query, 0)
        if request.votes:
            voted = np.array([votes[item_id] for item_id in items.item_ids])
            scores = model_weight * scores + (1 - model_weight) * voted
        if request.discounts:
            discounts = dict(zip(pool, request.discounts, strict=True))
            scores = scores - np.array([discounts[item_id] for item_id in items.item_ids])
        masks = [self.catalogue.passing(rule.which, items.item_ids) for rule in request.rules]
        if masks:
            scores = scores + added(request.rules, masks)
        order, scores = order_by_score_then_id(scores, id_ranks(items.item_ids), tolerance=2 * error)
        masks = [mask[order] for mask in masks]
        scored = time.perf_counter()
        ruled = list(zip(request.rules, masks, strict=True))
        chosen = self._chosen(request, items, order, scores, ruled)
        proof = ESTIMATE
        if is_the_pools:
            # Category limits may choose items below the pool's k best; a pinned item stays at its position.
            shown = dict(enumerate(chosen.tolist(), start=1))
            pinned = {shown[rule.pin] for rule, mask in ruled if rule.pin in shown and mask[shown[rule.pin]]}
            rows = list({*shown.values()} - pinned | {request.k - 1})
            kth = float(scores[rows].min()) - 2 * error if len(items) >= request.k else None
            proof = certificate(bound=_scaled(request.bound, model_weight), kth_score=kth)
        ended = time.perf_counter()
        self._metrics.verify.observe(verified - started)
        self._metrics.score.observe(scored - verified)
        self._metrics.choose.observe(ended - scored)
        return Ranked(
            item_ids=[items.item_ids[row] for row in order[chosen].tolist()],
            scores=np.asarray(scores[chosen]).tolist(),
            certificate=proof,
            dropped_items=len(request.candidate_item_ids) - len(items),
            rerank_s=ended - started,
            index_version=served.name,
            rules=_names(ruled, chosen),
        )

    def _version(self, request: RerankQuery) -> tuple[Served, bool]:
        """Return the version to score with, and whether it made the pool and its bound."""
        if request.index_version:
            return self.catalogue.version_named(request.index_version, request.position)
        served = self.catalogue.served
        return served, served.position == NO_CHANGE

    def _verified(self, served: Served, wanted: ItemFilter, item_ids: Sequence[str]) -> FoundItems:
        """Return the pool's items that have a state, are served now and pass the filter."""
        catalogue = self.catalogue
        visible = [item_id for item_id in item_ids if not catalogue.is_hidden(item_id)]
        if not wanted.is_open:
            passes = catalogue.passing(wanted, visible)
            visible = [item_id for item_id, one in zip(visible, passes.tolist(), strict=True) if one]
        return find_items(served.version, visible)

    def _chosen(
        self, request: RerankQuery, items: FoundItems, order: np.ndarray, scores: Scores, ruled: Ruled
    ) -> np.ndarray:
        categories = None
        if request.max_per_category:
            categories = self.catalogue.categories_of([items.item_ids[row] for row in order.tolist()])
        components = items.components()[order] if request.diversity and len(items) else None
        return select(
            scores,
            request.k,
            components=components,
            diversity=request.diversity if components is not None else 0.0,
            categories=categories,
            max_per_category=request.max_per_category,
            caps=[(mask, rule.cap) for rule, mask in ruled if rule.cap],
            pins=[(mask, rule.pin) for rule, mask in ruled if rule.pin],
        )


def _names(ruled: Ruled, chosen: np.ndarray) -> list[list[str]]:
    return [
        [rule.name for rule, mask in ruled if mask[row] and (rule.adds or rule.pin == position + 1)]
        for position, row in enumerate(chosen.tolist())
    ]


def _scaled(bound: float | None, model_weight: float) -> float | None:
    """Return the bound on model_weight * s, since omitted items have no vote."""
    if bound is None or math.isinf(bound):
        return bound
    return bound if model_weight == 1.0 else math.nextafter(model_weight * bound, math.inf)

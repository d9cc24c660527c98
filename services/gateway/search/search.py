"""Search: ask every text source at once, fuse their ranks, and order the items for the user, if any.

Search fails only if no source answers. Without a state of the user, the answer is not personal, and is marked.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.algorithms.text.rank_fusion import Fused, reciprocal_rank_fusion
from services.contracts.query_state import PackedQueryState
from services.gateway.domain import Degradation, Pool, Ranking, Seen, ServedModel, now_ms
from services.gateway.metrics import GatewayMetrics
from services.gateway.recommend.catalogue import Titles
from services.gateway.recommend.exposures import Exposures
from services.gateway.search.searching import PERSONAL, SearchAnswer, SearchQuery, SearchResult, SourceRank, SourceTime
from services.gateway.search.text_retrieval import SourceAnswer, TextRetrieval, no_source, without_seen
from services.gateway.stages import Limits, Stages, Work
from services.gateway.validation import MAX_K, check_search
from services.platform.large_requests import in_turn
from services.user_state.values import UserView

# Items of each source, at least twice k: an item of middle rank in two sources can win. At larger depths, items of low
# rank in all sources win: on 500 pseudo queries over MovieLens-1M's titles, MRR@10 is .759 with 100, .792 with 50, .825
# with 30, .850 with 20.
DEPTH = 30
# How many found items the user's model orders, at least k.
PERSONAL_POOL = 200
# How many last seen items come first if found.
RECENT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The handler."""

    stages: Stages
    text: TextRetrieval
    metrics: GatewayMetrics
    titles: Titles
    model: ServedModel
    exposures: Exposures
    limits: Limits

    async def __call__(self, query: SearchQuery) -> SearchAnswer:
        """Answer a search. Raises: InvalidRequest; DeadlineExceeded; as `no_source`."""
        work, asked_ms = Work.begin(query, budget_s=self.limits.budget_s), now_ms()
        await in_turn(check_search, query, self.model.kinds)
        view = None
        if query.user_id and query.filter.exclude_seen:
            # Sources exclude seen items, so that the answer stays full.
            view = await self._read_user(work, with_seen=True)
        answers, state = await asyncio.gather(self._find(work), self._state(work, view, asked_ms))
        if all(answer.hits is None for answer in answers):
            raise no_source(answers)
        if any(answer.failed for answer in answers):
            work.mark(Degradation.PARTIAL_SOURCES)
        times = [answer.time for answer in answers]
        hits = {answer.source: answer.hits.items for answer in answers if answer.hits is not None}
        rankings = {source: [hit.item_id for hit in found] for source, found in hits.items()}
        scores = {source: {hit.item_id: hit.score for hit in found} for source, found in hits.items()}
        fused = reciprocal_rank_fusion(rankings)
        model_version = ""
        if query.user_id:
            personal, spent = await self._order(work, state, fused)
            times.append(spent)
            if personal is None:
                work.mark(Degradation.NOT_PERSONALISED)
                work.absence_bucket = 0
            else:
                model_version = self.model.version
                rankings[PERSONAL] = [item.item_id for item in personal.items]
                scores[PERSONAL] = {item.item_id: item.score for item in personal.items}
                fused = reciprocal_rank_fusion(rankings)
        total_ms = work.end()
        results = self._results(fused[: query.k], scores, answers)
        text_version = next((a.hits.text_version for a in answers if a.hits and a.hits.text_version), "")
        answer = SearchAnswer(
            results=results,
            text_version=text_version,
            model_version=model_version,
            degradations=work.degradations,
            sources=times,
            total_ms=total_ms,
            exposure_id=self.exposures.shown(
                "search",
                query.user_id,
                item_ids=[result.item_id for result in results],
                scores=[result.score for result in results],
                sources=["+".join(found.source for found in result.found_by) for result in results],
                model_version=model_version,
                text_version=text_version,
                context=query.context,
                absence_bucket=work.absence_bucket,
                assignments=query.assignments,
            ),
            absence_bucket=work.absence_bucket,
            warnings=self.model.warnings(query.filter),
        )
        self.metrics.searched(answer)
        return answer

    async def _find(self, work: Work[SearchQuery]) -> list[SourceAnswer]:
        query, left_s = work.query, work.left_s
        kept_s = self.limits.answer_reserve_s + (self.limits.rerank_reserve_s if query.user_id else 0.0)
        return await self.text.find(
            query.query,
            k=min(MAX_K, max(DEPTH, 2 * query.k)),
            filter=without_seen(query.filter, work.seen.item_ids),
            left_s=left_s - min(kept_s, left_s / 3),
        )

    async def _state(self, work: Work[SearchQuery], view: UserView | None, asked_ms: int) -> PackedQueryState | None:
        """Return the user's state as in Recommend."""
        if not work.query.user_id:
            return None
        if view is None and not work.query.filter.exclude_seen:
            view = await self._read_user(work, with_seen=True)
        if view is None or view.epoch is None:
            return None
        return self.stages.asked_with(work, await self.stages.find_state(work, view), asked_ms)

    async def _read_user(self, work: Work[SearchQuery], *, with_seen: bool) -> UserView | None:
        view = await self.stages.read_user(work, with_seen=with_seen)
        if view is None:
            work.mark(Degradation.STATE_STORE_DOWN)
        else:
            if view.is_lost:
                work.mark(Degradation.HISTORY_INCOMPLETE)
            work.seen = Seen(view.seen)
        return view

    async def _order(
        self, work: Work[SearchQuery], state: PackedQueryState | None, fused: Sequence[Fused]
    ) -> tuple[Ranking | None, SourceTime]:
        """Order found items by the user's model, without unknown ones. Recent items come first, in the sources' order:
        users who search for a recent item most likely want it again.
        """
        if state is None:
            return None, SourceTime(source=PERSONAL, milliseconds=0.0, failure="there is no state of the user")
        query = work.query
        pool = fused[: min(MAX_K, max(PERSONAL_POOL, query.k))]
        if not pool:
            return Ranking(items=()), SourceTime(source=PERSONAL, milliseconds=0.0)
        began = time.monotonic()
        found = Pool(item_ids=[one.item_id for one in pool], scores=[one.score for one in pool])
        ranking = await self.stages.rerank(work, state, found, k=len(pool))
        if ranking is not None:
            lately = frozenset(work.seen.item_ids[:RECENT])
            by_words = [one.item_id for one in pool if one.item_id in lately]
            known = {item.item_id: item for item in ranking.items}
            again = [known[item_id] for item_id in by_words if item_id in known]
            ranking = replace(ranking, items=[*again, *(item for item in ranking.items if item.item_id not in lately)])
        return ranking, SourceTime(
            source=PERSONAL,
            milliseconds=(time.monotonic() - began) * 1000,
            failure="the reranker did not answer" if ranking is None else "",
        )

    def _results(
        self, fused: Sequence[Fused], scores: Mapping[str, Mapping[str, float]], answers: Sequence[SourceAnswer]
    ) -> list[SearchResult]:
        identifiers = {
            hit.item_id: hit.identifier
            for answer in answers
            if answer.hits is not None
            for hit in answer.hits.items
            if hit.identifier
        }
        return [
            SearchResult(
                item_id=one.item_id,
                title=title,
                score=one.score,
                found_by=[SourceRank(source, rank, scores[source][one.item_id]) for source, rank in one.ranks],
                identifier=identifiers.get(one.item_id, ""),
            )
            for one, title in zip(fused, self.titles.of([one.item_id for one in fused]), strict=True)
        ]

"""Similar: the items most similar to one item. While the state store is unavailable, the answer may contain seen items
and is marked.
"""

from dataclasses import dataclass, replace

from services.gateway.domain import SimilarAnswer, SimilarQuery
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.popular import PopularItems
from services.gateway.stages import Stages, Work
from services.gateway.validation import check_similar
from services.platform.threads import in_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Similar:
    """The handler."""

    stages: Stages
    items: PopularItems
    exposures: Exposures

    async def __call__(self, query: SimilarQuery) -> SimilarAnswer:
        """Answer a request. Raises: InvalidRequest; NotFound for an item that no index serves; DeadlineExceeded; an
        error of candidates.
        """
        work = Work.begin(query, budget_s=self.stages.limits.budget_s)
        await in_turn(check_similar, query, self.stages.model.kinds)
        leaves_out_seen = bool(query.user_id) and query.filter.exclude_seen
        if leaves_out_seen:
            await self.stages.read_seen(work)
        found = await self.stages.ports.candidates.similar(
            query.item_id,
            k=query.k,
            filter=replace(query.filter, exclude_seen=leaves_out_seen),
            seen=work.seen.item_ids,
            timeout_s=min(self.stages.limits.stage_timeout_s, work.left_s),
        )
        work.searched(found)
        total_ms = work.end()
        return SimilarAnswer(
            found=found,
            titles=self.items.titles_of([item.item_id for item in found.items]),
            model_version=self.stages.model.version,
            degradations=work.degradations,
            total_ms=total_ms,
            exposure_id=self.exposures.shown(
                "similar",
                query.user_id,
                found.items,
                model_version=self.stages.model.version,
                index_version=found.index_version,
                context=query.context,
                assignments=query.assignments,
            ),
            warnings=self.stages.model.warnings(query.filter),
        )

"""Recommend under an interleaved experiment: the answer is drafted from both arms' answers."""

import asyncio
from dataclasses import dataclass, replace
from random import Random

from services.algorithms.indexes.protocol import ESTIMATE
from services.algorithms.rules.team_draft import BOTH, team_draft
from services.contracts.topics.experiments import Arm, Assignment
from services.gateway.domain import Recommendation, RecommendQuery
from services.gateway.version_sets.routes import ServedSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Interleaved:
    """The handler: one per process, called concurrently."""

    rng: Random

    async def __call__(
        self, query: RecommendQuery, mixed: Assignment, first: ServedSet, second: ServedSet
    ) -> Recommendation:
        """Return the first set's answer with items drafted from both; it has no certificate. first, second: the arms'
        version sets. Raises: as `Recommend`.
        """
        sides = [
            served.shadowed(_of_arm(query, mixed, arm))
            for served, arm in zip((first, second), mixed.experiment.arms, strict=True)
        ]
        one, other = await asyncio.gather(*sides)
        ranking, against = ([item.item_id for item in answer.items] for answer in (one, other))
        item_ids, teams = team_draft(ranking, against, query.k, self.rng)
        found = [{item.item_id: item for item in answer.items} for answer in (one, other)]
        found.append(found[1] | found[0])  # the items of `BOTH`
        items = [found[team][item_id] for item_id, team in zip(item_ids, teams, strict=True)]
        handlers = first.handlers.recommend
        answer = replace(
            one,
            items=items,
            certificate=ESTIMATE,
            degradations=list(dict.fromkeys([*one.degradations, *other.degradations])),
            searched_share=min(one.searched_share, other.searched_share),
            token_honoured=one.token_honoured and other.token_honoured,
            assignments=query.assignments,
            exposure_id=handlers.exposures.shown(
                "recommend",
                query.user_id,
                item_ids=item_ids,
                scores=[item.score for item in items],
                sources=[item.source for item in items],
                propensities=[1.0 if team == BOTH else 0.5 for team in teams],
                model_version=one.model_version,
                index_version=one.index_version,
                context=query.context,
                absence_bucket=one.absence_bucket,
                assignments=query.assignments,
                teams=teams,
                rules_revision=one.rules_revision,
            ),
        )
        handlers.metrics.answered(answer, had_token=query.token is not None)
        return answer


def _of_arm(query: RecommendQuery, mixed: Assignment, arm: Arm) -> RecommendQuery:
    own = replace(mixed, arm=arm)
    return replace(query, assignments=tuple(own if one is mixed else one for one in query.assignments))

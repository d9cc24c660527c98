"""What an arm changes of a request."""

from collections.abc import Sequence
from dataclasses import replace

from services.contracts.experiments import Assignment
from services.gateway.domain import RecommendQuery


def with_arms(query: RecommendQuery) -> RecommendQuery:
    """The query with the settings of its arms; what it says itself stays. Rules are added to its own."""
    for one in query.assignments:
        if (arm := one.arm) is not None:
            query = replace(
                query,
                rules=(*query.rules, *arm.rules),
                diversity=query.diversity or arm.diversity,
                max_per_category=query.max_per_category or arm.max_per_category,
                new_item_share=query.new_item_share if arm.new_item_share is None else arm.new_item_share,
            )
    return query


def assigned_texts(assignments: Sequence[Assignment]) -> tuple[tuple[str, str, float], ...]:
    """(experiment, arm, share) as exposures and answers have them; arm "": interleaved."""
    return tuple((one.experiment.name, one.arm.name if one.arm else "", one.share) for one in assignments)

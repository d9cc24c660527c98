"""The effect of an arm on a request."""

from collections.abc import Sequence
from dataclasses import replace

from services.algorithms.rules.ranking_rules import Rule
from services.contracts.experiments import Assignment
from services.gateway.domain import RecommendQuery


def with_arms(query: RecommendQuery) -> RecommendQuery:
    """Return the query with its arms' settings; its own settings win. Rules are added to its own."""
    query = replace(query, rules=(*query.rules, *rules_of_arms(query.assignments)))
    for one in query.assignments:
        if (arm := one.arm) is not None:
            query = replace(
                query,
                diversity=query.diversity or arm.diversity,
                max_per_category=query.max_per_category or arm.max_per_category,
                new_item_share=query.new_item_share if arm.new_item_share is None else arm.new_item_share,
                # A further page of a list is not searched for.
                max_gap=arm.max_gap if query.max_gap is None and not query.page_token else query.max_gap,
            )
    return query


def rules_of_arms(assignments: Sequence[Assignment]) -> tuple[Rule, ...]:
    """Return the arms' rules."""
    return tuple(rule for one in assignments if one.arm is not None for rule in one.arm.rules)


def assigned_texts(assignments: Sequence[Assignment]) -> tuple[tuple[str, str, float], ...]:
    """Return (experiment, arm, share) for exposures and answers; arm "": interleaved."""
    return tuple((one.experiment.name, one.arm.name if one.arm else "", one.share) for one in assignments)

"""The effect of an arm on a request."""

from collections.abc import Sequence
from dataclasses import replace

from services.algorithms.rules.ranking_rules import Rule
from services.contracts.experiments import Assignment
from services.gateway.domain import RecommendQuery


def with_arms(query: RecommendQuery) -> RecommendQuery:
    """Return the query with its arms' settings (its own win) and rules."""
    arms = [one.arm for one in query.assignments if one.arm is not None and one.arm.has_settings]
    if not arms:
        return query
    diversity, most, share, gap = query.diversity, query.max_per_category, query.new_item_share, query.max_gap
    for arm in arms:
        diversity, most = diversity or arm.diversity, most or arm.max_per_category
        share = share if arm.new_item_share is None else arm.new_item_share
        # A further page is not searched for.
        gap = arm.max_gap if gap is None and not query.page_token else gap
    rules = (*query.rules, *rules_of_arms(query.assignments))
    return replace(query, rules=rules, diversity=diversity, max_per_category=most, new_item_share=share, max_gap=gap)


def rules_of_arms(assignments: Sequence[Assignment]) -> tuple[Rule, ...]:
    """Return the arms' rules."""
    return tuple(rule for one in assignments if one.arm is not None for rule in one.arm.rules)


def assigned_texts(assignments: Sequence[Assignment]) -> tuple[tuple[str, str, float], ...]:
    """Return (experiment, arm, share) for exposures and answers; arm "": interleaved."""
    return tuple((one.experiment.name, one.arm.name if one.arm else "", one.share) for one in assignments)

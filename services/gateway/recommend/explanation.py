"""What an explanation is made of, and how its parts become shares of the final score. Plain values, no Protobuf.

The reranker says where the similarity comes from, the candidates process which remembered interactions vote; only here
do both meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.rules.ranking_rules import Rule
from services.contracts.explanations import ExplainedScore, ItemVotes
from services.gateway.domain import HistoryEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """One question, unchecked (see `validation`). max_pairs 0: every component pair."""

    user_id: str = ""
    item_id: str
    history: tuple[HistoryEvent, ...] = ()
    max_pairs: int = 0
    rules: tuple[Rule, ...] = ()
    # Of the experiments that the user takes part in.
    arm_rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PastInteraction:
    """One of the user's own interactions; an empty title is an unknown one."""

    item_id: str
    title: str
    age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer; without a state (`state_source` "none") there is no score to explain and the parts are None."""

    model_version: str
    state_source: str
    absence_bucket: int = 0
    similarity: ExplainedScore | None = None
    votes: ItemVotes | None = None
    history: Sequence[PastInteraction] = ()
    # Those that name the item.
    rules: Sequence[Rule] = ()

    @property
    def score_with_rules(self) -> float:
        """What the score is once boosts and buries are in it."""
        return self.score + sum(rule.adds for rule in self.rules)

    @property
    def parts(self) -> tuple[float, float, float]:
        """What the final score is the sum of: the model's own components, refreshed ones, votes."""
        if self.similarity is None:
            return (0.0, 0.0, 0.0)
        weight = 1.0 if self.votes is None else self.votes.model_share
        vote = 0.0 if self.votes is None else self.votes.vote
        return (weight * self.similarity.from_model, weight * self.similarity.from_interactions, (1 - weight) * vote)

    @property
    def score(self) -> float:
        """model_share * s + (1 - model_share) * vote."""
        return sum(self.parts)

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of the parts' absolute values, in their order: parts of both signs would add up to more than the whole."""
        sizes = [abs(part) for part in self.parts]
        total = sum(sizes)
        if total == 0:
            return (0.0, 0.0, 0.0)
        model, refreshed, votes = (size / total for size in sizes)
        return (model, refreshed, votes)

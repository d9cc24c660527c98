"""The parts of an explanation, and their shares of the final score.

The reranker explains the similarity, the candidates process the voting interactions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.rules.ranking_rules import Rule
from services.contracts.explanations import ExplainedScore, ItemVotes
from services.gateway.domain import HistoryEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """One request, not validated (see `validation`). max_pairs 0: every component pair."""

    user_id: str = ""
    item_id: str
    history: tuple[HistoryEvent, ...] = ()
    max_pairs: int = 0
    rules: tuple[Rule, ...] = ()
    arm_rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PastInteraction:
    """One of the user's interactions; an unknown title is empty."""

    item_id: str
    title: str
    age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer. Without a state (state_source "none") score and parts are absent."""

    model_version: str
    state_source: str
    absence_bucket: int = 0
    similarity: ExplainedScore | None = None
    votes: ItemVotes | None = None
    history: Sequence[PastInteraction] = ()
    rules: Sequence[Rule] = ()

    @property
    def score_with_rules(self) -> float:
        """The score with boosts and buries."""
        return self.score + sum(rule.adds for rule in self.rules)

    @property
    def parts(self) -> tuple[float, float, float]:
        """The parts of the final score: the model's own components, refreshed ones, votes."""
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
        """Each part's share of the sum of absolute values: with opposite signs, a part can be larger than the score."""
        sizes = [abs(part) for part in self.parts]
        total = sum(sizes)
        if total == 0:
            return (0.0, 0.0, 0.0)
        model, refreshed, votes = (size / total for size in sizes)
        return (model, refreshed, votes)

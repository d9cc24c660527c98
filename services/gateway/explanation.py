"""What an explanation is made of, and how its parts become shares of the final score. Plain values, no Protobuf.

The reranker says where the similarity comes from, the candidates process which remembered interactions vote; only here
do both meet. Voters are kinds of interactions with ages: no user other than the one who asks is ever named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.domain import AskedRule, HistoryEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """One question, unchecked (see `validation`). max_pairs 0: every component pair."""

    user_id: str = ""
    item_id: str
    history: tuple[HistoryEvent, ...] = ()
    max_pairs: int = 0
    rules: tuple[AskedRule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPart:
    """One term of the similarity: weight * cosine = contribution, of which `from_model` is the model's own."""

    query_component: int
    item_component: int
    weight: float
    cosine: float
    contribution: float
    from_model: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """s = from_model + from_interactions; `model_share` is lambda of the item's state. rules: the places of those that
    were asked about and name the item."""

    score: float
    from_model: float
    from_interactions: float
    model_share: float
    num_interactions: int
    pairs: Sequence[PairPart]
    title: str
    index_version: str
    rules: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Voters:
    """Remembered interactions of one kind that voted; ages in seconds of stream time."""

    type: str
    count: int
    newest_age_seconds: float
    oldest_age_seconds: float
    vote: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """The vote for the item, `voters` the memory's part of it, and lambda of the votes (1 without any)."""

    vote: float
    num_neighbours: int
    model_share: float
    voters: Sequence[Voters]
    index_version: str


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
    similarity: Similarity | None = None
    votes: Votes | None = None
    history: Sequence[PastInteraction] = ()
    # Those that name the item.
    rules: Sequence[AskedRule] = ()

    @property
    def score_with_rules(self) -> float:
        """What the score is once boosts and buries are in it."""
        return self.score + sum(rule.boost - rule.bury for rule in self.rules)

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

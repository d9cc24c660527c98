"""The sources of an item's score. Votes are grouped by type, so that they identify no other user."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedPair:
    """One term of the score: gating weight times cosine. from_model: the part of the model's own components."""

    query_component: int
    item_component: int
    weight: float
    cosine: float
    contribution: float
    from_model: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedScore:
    """score = from_model + from_interactions. pairs: largest first. model_share: the model's weight (lambda). rules:
    indices of the query's rules that name the item.
    """

    score: float
    from_model: float
    from_interactions: float
    model_share: float
    num_interactions: int
    pairs: Sequence[ExplainedPair]
    title: str
    index_version: str
    rules: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VotingInteractions:
    """One kind of remembered interactions that voted; ages in seconds of stream time."""

    type: str
    count: int
    newest_age_seconds: float
    oldest_age_seconds: float
    vote: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemVotes:
    """An item's vote, in similarity units. voters: remembered interactions; the rest is from item neighbours.
    num_neighbours: remembered interactions searched for. model_share: the model's weight (lambda) against the vote.
    """

    vote: float
    num_neighbours: int
    model_share: float
    voters: Sequence[VotingInteractions]
    index_version: str

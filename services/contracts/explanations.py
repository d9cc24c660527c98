"""The sources of one item's score: the reranker's part and the votes. Plain values, no Protobuf.

Voters are kinds of interactions with ages; no other user is identified.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedPair:
    """One term of s: gating weight times cosine, and the share of the model's own component in it."""

    query_component: int
    item_component: int
    weight: float
    cosine: float
    contribution: float
    from_model: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedScore:
    """s = from_model + from_interactions, the largest pairs first. model_share: lambda of the item's state.

    rules: indices of the query's rules that name the item.
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
    """Remembered interactions of one kind that voted for an item; ages in seconds of stream time."""

    type: str
    count: int
    newest_age_seconds: float
    oldest_age_seconds: float
    vote: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemVotes:
    """An item's vote, in similarity units, and the remembered interactions in it; the rest is from item neighbours.

    Without a memory there are no neighbours. model_share: lambda of the votes, 1 without memory and neighbours.
    """

    vote: float
    num_neighbours: int
    model_share: float
    voters: Sequence[VotingInteractions]
    index_version: str

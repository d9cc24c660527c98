"""A gateway's answers as plain values, with the field names of `gateway.proto`.

Fields that this client does not know are left out; an unknown degradation or kind is named by its number
("degradation_99").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class FreshnessToken:
    """The stream position of a user's event, given by a receipt. Its text is `epoch:partition:offset`."""

    epoch: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.partition}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> FreshnessToken:
        """The token that `str(token)` wrote. Raises: InvalidArgument."""
        from freshet_client.errors import InvalidArgument

        epoch, _, place = text.partition(":")
        partition, _, offset = place.partition(":")
        if not epoch or not partition.isdecimal() or not offset.isdecimal():
            raise InvalidArgument.of("freshness_token", text, "epoch:partition:offset, as a receipt gave it")
        return cls(epoch, int(partition), int(offset))


@dataclass(frozen=True)
class Receipt:
    """A durable event's id, and the token for requests whose answer must reflect it."""

    event_id: str
    token: FreshnessToken


@dataclass(frozen=True)
class StreamPosition:
    """A partition and an offset of the topic `interactions`."""

    partition: int
    offset: int


@dataclass(frozen=True)
class Certificate:
    """How far an answer may be from the exact top k.

    `kind` is "exact", "bounded" (no left-out item scores more than `gap` above the k-th) or "estimate" (no proof; `gap`
    is None). `gap` is in similarity units, 0 to 2. `asked_gap`: the request's `max_gap`. `items_touched`: items that
    the searches read. `interleaved`: the answer mixes the rankings of an experiment's two arms.
    """

    kind: str
    gap: float | None = None
    asked_gap: float | None = None
    items_touched: int = 0
    interleaved: bool = False

    def __str__(self) -> str:
        return f"gap <= {self.gap:.4f}" if self.kind == "bounded" and self.gap is not None else self.kind


@dataclass(frozen=True)
class ScoredItem:
    """`source` found the item: "mol", "first_stage", "popular", or "new" in a reserved position. `rules` changed its
    score or position. `title` and `categories` are empty without `with_details`.
    """

    item_id: str
    score: float
    source: str
    rules: tuple[str, ...] = ()
    title: str = ""
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class IndexFreshness:
    """`deltas_offset`: the last applied offset of `index-deltas`, -1 before any. `newest_recorded_time`: when the
    broker received the newest reflected interaction. `lag_seconds`: the time from then until the index served
    it. Both are None before the first interaction.
    """

    deltas_offset: int
    newest_recorded_time: datetime | None
    lag_seconds: float | None


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds by stage; `transport_ms` is the rest."""

    queue_ms: float
    encode_ms: float
    first_stage_ms: float
    rerank_ms: float
    transport_ms: float
    total_ms: float


@dataclass(frozen=True)
class Assignment:
    """The user's arm of an experiment, "" if the answer interleaves both arms. `share`: the probability of this arm."""

    experiment: str
    arm: str
    share: float


@dataclass(frozen=True)
class Provenance:
    """Where an answer comes from.

    `state_source`: "stored" (from the stream), "stored_history" (encoded now), "request" (from the request's history),
    "page" (of a kept list) or "none" (popular items). `state_age_seconds` and `state_position` are None without a
    stored state. `index_version`: only compare it for equality. `searched_share` is below 1 if a shard did not answer.
    `absence_bucket`: the bucket of the user's absence, 0 if below the model's floor. `assignments`: the arms that
    this answer follows. `rules_revision`: the standing rules' revision, 0 for the gateway's file.
    """

    model_version: str
    index_version: str
    state_source: str
    state_age_seconds: float | None
    state_position: StreamPosition | None
    index_freshness: IndexFreshness | None
    searched_share: float
    absence_bucket: int
    assignments: tuple[Assignment, ...]
    rules_revision: int
    stage_times: StageTimes | None
    request_id: str


@dataclass(frozen=True)
class Recommendation:
    """The top k items, best first.

    `degradations` names each degradation ("popular_fallback", "not_fresh", ...). `token_honoured` is False if the
    answer does not reflect the request's token. Later interactions name the answer by `exposure_id`. `next_page_token`
    is empty if no further page is kept. `warnings`: categories of the filter that no item has.
    """

    items: tuple[ScoredItem, ...]
    certificate: Certificate | None
    provenance: Provenance
    degradations: tuple[str, ...]
    token_honoured: bool
    exposure_id: str
    next_page_token: str
    warnings: tuple[str, ...]

    @property
    def item_ids(self) -> list[str]:
        """The items' ids, best first."""
        return [item.item_id for item in self.items]


@dataclass(frozen=True)
class SourceRank:
    """A source's rank for a result, from 1, and its score in the source's unit."""

    source: str
    rank: int
    score: float


@dataclass(frozen=True)
class SearchResult:
    """An item found by a query. `score` is comparable within one answer; `identifier`: the phrase that found it."""

    item_id: str
    title: str
    score: float
    found_by: tuple[SourceRank, ...]
    identifier: str


@dataclass(frozen=True)
class SourceTime:
    """How long a search source took; `failure` is empty if it answered."""

    source: str
    milliseconds: float
    failure: str


@dataclass(frozen=True)
class SearchAnswer:
    """The top k items, best first; `model_version` is empty without a user."""

    results: tuple[SearchResult, ...]
    text_version: str
    model_version: str
    degradations: tuple[str, ...]
    sources: tuple[SourceTime, ...]
    total_ms: float
    request_id: str
    exposure_id: str
    absence_bucket: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class SimilarItem:
    """`similarity`: the mean cosine of both items' components, in [-1, 1]."""

    item_id: str
    title: str
    similarity: float


@dataclass(frozen=True)
class SimilarAnswer:
    """The top k similar items, best first."""

    items: tuple[SimilarItem, ...]
    model_version: str
    index_version: str
    certificate: Certificate | None
    degradations: tuple[str, ...]
    total_ms: float
    request_id: str
    index_freshness: IndexFreshness | None
    exposure_id: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class PairContribution:
    """One term of the similarity: `contribution` = `weight` * `cosine` of a query and an item component.

    `from_model`: the part of the model's own components; the rest comes from refreshed ones.
    """

    query_component: int
    item_component: int
    weight: float
    cosine: float
    contribution: float
    from_model: float


@dataclass(frozen=True)
class ExplainedSimilarity:
    """The model's part of a score: `score` = `from_model` + `from_interactions`.

    `model_share`: the model's weight in the item's state; `num_interactions` interactions made the rest.
    """

    score: float
    from_model: float
    from_interactions: float
    model_share: float
    num_interactions: int
    pairs: tuple[PairContribution, ...]
    title: str
    index_version: str


@dataclass(frozen=True)
class VotingInteractions:
    """The interactions of one type that voted for the item: count, ages, total vote."""

    type: str
    count: int
    newest_age_seconds: float
    oldest_age_seconds: float
    vote: float


@dataclass(frozen=True)
class ExplainedVotes:
    """The votes' part of a score; `model_share`: the model's weight, and the rest is the weight of votes."""

    vote: float
    num_neighbours: int
    model_share: float
    voters: tuple[VotingInteractions, ...]
    index_version: str


@dataclass(frozen=True)
class PastInteraction:
    """An interaction that the user's state reflects."""

    item_id: str
    title: str
    age_seconds: float


@dataclass(frozen=True)
class ExplainedRule:
    """A rule that matches the item: its addition to the score, pinned position and cap (0: none)."""

    name: str
    adds: float
    pin: int
    cap: int


@dataclass(frozen=True)
class Explanation:
    """Why an item has its score for a user.

    `score` = model_share * similarity + (1 - model_share) * vote; the three shares add up to 1. `history`: the newest
    interactions of the state, newest first, at most 10. If `state_source` is "none", there is no score.
    """

    score: float
    similarity: ExplainedSimilarity | None
    votes: ExplainedVotes | None
    share_of_model: float
    share_of_refreshed: float
    share_of_votes: float
    history: tuple[PastInteraction, ...]
    model_version: str
    state_source: str
    rules: tuple[ExplainedRule, ...]
    score_with_rules: float
    absence_bucket: int


@dataclass(frozen=True)
class ForgetReport:
    """What was found of a user, what is left, and whether every process has applied the removal. `remains`: which data
    stays elsewhere, where and until when."""

    forget_id: str
    found: Mapping[str, int]
    left: Mapping[str, int]
    is_applied: bool
    remains: tuple[str, ...]


@dataclass(frozen=True)
class PartitionProgress:
    """How far a partition is read; `end_offset` is -1 if the broker did not return it."""

    partition: int
    applied_offset: int
    end_offset: int


@dataclass(frozen=True)
class FreshnessReport:
    """How far user states reflect `interactions`, and item states reflect `attributions`."""

    model_version: str
    index_version: str
    epoch: str
    interactions: tuple[PartitionProgress, ...]
    attributions: tuple[PartitionProgress, ...]
    candidates: IndexFreshness | None
    reranker: IndexFreshness | None
    degradations: tuple[str, ...] = field(default=())

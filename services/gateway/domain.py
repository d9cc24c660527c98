"""The gateway's values: requests, pools, answers, degradations. Query states stay packed, as in Redis and Protobuf:
the gateway computes no scores.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from services.algorithms.bundles.event_schema import TURNED_DOWN_EVENTS, EventSchema
from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.indexes.protocol import ESTIMATE, Certificate
from services.algorithms.rules.attributes import Kinds
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.experiments import Assignment
from services.contracts.topics.interactions import DEFAULT_TYPE
from services.contracts.wire import PackedQueryState
from services.user_state.values import StoredState


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of a version set.

    kinds: the kind of each attribute. tau: the scale of scores (s = tau * phi). absence: the learned rows for absences.
    warnings: returns warnings for a filter's categories without items.
    """

    version: str
    schema: EventSchema
    kinds: Kinds = field(default_factory=dict)
    tau: float = 1.0
    absence: AbsenceRows | None = None
    warnings: Callable[[ItemFilter], Sequence[str]] = lambda _: ()


class Degradation(IntEnum):
    """Why an answer is worse than normal. The numbers match Protobuf."""

    STALE_STATE = 1
    POPULAR_FALLBACK = 2
    STATE_STORE_DOWN = 3
    FIRST_STAGE_ORDER = 4
    PARTIAL_CATALOGUE = 5
    NOT_FRESH = 6
    TOKEN_NOT_HONOURED = 7
    PARTIAL_SOURCES = 8
    NOT_PERSONALISED = 9
    HISTORY_INCOMPLETE = 10
    BUSY = 11
    GAP_NOT_PROVEN = 12


@dataclass(frozen=True, slots=True)
class FreshnessToken:
    """A position in a partition of `interactions`. epoch: "" if Redis was down; no answer honours such a token."""

    epoch: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One event of a request's history."""

    item_id: str
    event_time_ms: int | None = None
    type: str = ""
    value: float = 0.0


# An event of a request or of the state store.
Event = HistoryEvent | StoredEvent


@dataclass(frozen=True, slots=True)
class Seen:
    """A user's items, newest first. turned_down: items that add no votes, such as rejected ones."""

    item_ids: Sequence[str] = ()
    turned_down: Collection[str] = ()


def seen_in(history: Iterable[Event], schema: EventSchema) -> list[str]:
    """Return the items that count as seen, in the history's order."""
    return [event.item_id for event in history if schema.of(event.type or DEFAULT_TYPE).seen]


def turned_down_in(history: Sequence[Event], schema: EventSchema) -> list[str]:
    """Return the items rejected recently. history: oldest first."""
    last = history[-TURNED_DOWN_EVENTS:]
    return schema.turned_down([(event.item_id, (event.type or DEFAULT_TYPE, event.value)) for event in last])


def last_event_ms(history: Sequence[Event], schema: EventSchema) -> int:
    """Return the time of the last event that enters histories, else 0. history: events with times, oldest first."""
    kept = (event for event in reversed(history) if schema.of(event.type or DEFAULT_TYPE).history)
    return next((event.event_time_ms or 0 for event in kept), 0)


@dataclass(frozen=True, slots=True)
class NotAgain:
    """Excludes items of the user's last `answers` answers, and of the answers in the last `minutes` minutes."""

    answers: int = 0
    minutes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendQuery:
    """A request for recommendations, not validated."""

    user_id: str = ""
    k: int = 10
    filter: ItemFilter = field(default_factory=ItemFilter)
    context: Mapping[str, str] = field(default_factory=dict)
    history: tuple[HistoryEvent, ...] = ()
    token: FreshnessToken | None = None
    max_per_category: int = 0
    diversity: float = 0.0
    query: str = ""
    # Length of the list stored for further pages; 0: none.
    page_depth: int = 0
    page_token: str = ""
    not_again: NotAgain | None = None
    rules: tuple[Rule, ...] = ()
    # Unix milliseconds; None: now.
    as_of_ms: int | None = None
    # The largest accepted gap of the certificate; None: no limit.
    max_gap: float | None = None
    # arms: by experiment, chosen by an operator. assignments: the arms of this request.
    arms: Mapping[str, str] = field(default_factory=dict)
    assignments: tuple[Assignment, ...] = ()
    # Share of positions for new items; None: the gateway's setting.
    new_item_share: float | None = None
    # The revision of the standing rules in `rules`.
    rules_revision: int = 0
    without_standing_rules: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The encoder's answer. query_state: None if the encoder knows no item of the history."""

    query_state: PackedQueryState | None
    queue_ms: float = 0.0
    encode_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFreshness:
    """The last applied record of `index-deltas` (-1: none), the broker's time of the newest interaction (Unix
    milliseconds), and the seconds from then until that interaction was served.
    """

    deltas_offset: int = -1
    newest_recorded_ms: int | None = None
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What every search and rerank returns. index_version: the index that scored the items. stage_ms: the call's time.

    num_items: size of the index (0: unknown). searched_share: its share of the catalogue. items_touched: number of
    items read.
    """

    index_version: str = ""
    index_freshness: IndexFreshness | None = None
    queue_ms: float = 0.0
    stage_ms: float = 0.0
    num_items: int = 0
    searched_share: float = 1.0
    items_touched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(Found):
    """The first stage's items, best first. bound: no allowed item outside the pool has a higher s.

    votes: one per item, or empty. A final score is model_share * s + (1 - model_share) * vote.
    """

    item_ids: Sequence[str]
    scores: Sequence[float]
    bound: float | None = None
    votes: Sequence[float] = ()
    model_share: float = 1.0


@dataclass(frozen=True, slots=True)
class ScoredItem:
    """An item of an answer. source: "mol", "first_stage", "popular", or "new" in a reserved position. propensity: the
    probability of the item at its position. rules: names of the rules that changed score or position.
    """

    item_id: str
    score: float
    source: str
    propensity: float = 1.0
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(Found):
    """Ranked items."""

    items: Sequence[ScoredItem]
    certificate: Certificate = ESTIMATE


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankQuery:
    """What the reranker chooses from a pool: the k best, within rules and limits."""

    k: int
    filter: ItemFilter
    seen: Sequence[str] = ()
    max_per_category: int = 0
    diversity: float = 0.0
    discounts: Mapping[str, float] = field(default_factory=dict)
    rules: Sequence[Rule] = ()


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
class SimilarQuery:
    """A request for similar items, not validated."""

    item_id: str
    user_id: str = ""
    k: int = 10
    filter: ItemFilter = field(default_factory=ItemFilter)
    context: Mapping[str, str] = field(default_factory=dict)
    assignments: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarAnswer:
    """Items with similarities as scores, and titles ("": unknown)."""

    found: Ranking
    titles: Sequence[str]
    model_version: str
    degradations: Sequence[Degradation]
    total_ms: float
    exposure_id: str = ""
    warnings: Sequence[str] = ()


@dataclass(slots=True)
class StageTimes:
    """Times in milliseconds. queue: waiting for a batch or a freshness token. transport: time outside all stages."""

    queue_ms: float = 0.0
    encode_ms: float = 0.0
    first_stage_ms: float = 0.0
    rerank_ms: float = 0.0
    transport_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """An answer. state_source: "stored", "stored_history" (encoded for this answer), "request", "none", or "page" (of a
    stored list). items_touched: the sum over all searches.
    """

    items: Sequence[ScoredItem]
    model_version: str
    index_version: str
    state: StoredState | None
    token_honoured: bool
    degradations: Sequence[Degradation]
    certificate: Certificate
    stage_times: StageTimes
    state_source: str
    index_freshness: IndexFreshness | None = None
    exposure_id: str = ""
    next_page_token: str = ""
    searched_share: float = 1.0
    absence_bucket: int = 0
    max_gap: float | None = None
    items_touched: int = 0
    assignments: Sequence[Assignment] = ()
    warnings: Sequence[str] = ()
    rules_revision: int = 0


@dataclass(frozen=True, slots=True)
class Impression:
    """An item that the user saw at a position (from 1) of an answer."""

    position: int
    item_id: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """A durable interaction: its id, and the token of its position."""

    event_id: str
    token: FreshnessToken


# Wire names. The text sources find items; the user's model (`PERSONAL`) only orders them.
SOURCES = ("text_mol", "phrases", "lexical")
PERSONAL = "mol"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """A search, not validated. Seen items are included unless the filter excludes them."""

    query: str
    user_id: str = ""
    k: int = 10
    filter: ItemFilter = field(default_factory=lambda: ItemFilter(exclude_seen=False))
    context: Mapping[str, str] = field(default_factory=dict)
    assignments: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """An item that a source found. score: in the source's unit. identifier: the text generated for the item, if any."""

    item_id: str
    score: float
    identifier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHits:
    """A source's results, best first, each item once."""

    items: Sequence[Hit]
    text_version: str = ""
    milliseconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTime:
    """A source's time; failure: why it did not answer."""

    source: str
    milliseconds: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A source's rank of one result, from 1."""

    source: str
    rank: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """An item of the answer; score: fused, comparable within one answer only."""

    item_id: str
    title: str
    score: float
    found_by: Sequence[SourceRank]
    identifier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """An answer. model_version: empty if the user's model did not order the results."""

    results: Sequence[SearchResult]
    text_version: str
    model_version: str
    degradations: Sequence[Degradation]
    sources: Sequence[SourceTime]
    total_ms: float
    exposure_id: str = ""
    absence_bucket: int = 0
    warnings: Sequence[str] = ()

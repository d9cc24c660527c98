"""The gateway's values: requests, states, pools, answers, degradations. Query states stay packed, as in Redis and
Protobuf.

The gateway computes no scores.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from services.algorithms.bundles.event_schema import TURNED_DOWN_EVENTS, EventSchema
from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.indexes.protocol import ESTIMATE, Certificate
from services.algorithms.rules.attributes import Kinds
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.experiments import Assignment
from services.contracts.query_state import PackedQueryState
from services.contracts.topics.interactions import DEFAULT_TYPE
from services.user_state.values import StoredState


def now_ms() -> int:
    """Return Unix milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The answering model.

    kinds: of each attribute. tau: the scale of scores (s = tau * phi).
    absence: the model's learned rows for absences, if any.
    warnings: for a filter's categories without items.
    """

    version: str
    schema: EventSchema
    kinds: Kinds = field(default_factory=dict)
    tau: float = 1.0
    absence: AbsenceRows | None = None
    warnings: Callable[[ItemFilter], Sequence[str]] = lambda _: ()


class Degradation(IntEnum):
    """Why an answer is worse than normal. Numbers as in Protobuf."""

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
    """A position in the topic partition of a user's interactions.

    An empty epoch (Redis was down at the acknowledgement) is not honoured.
    """

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


@dataclass(frozen=True, slots=True)
class Seen:
    """A user's items, newest first, and those whose neighbours do not vote, such as rejected ones."""

    item_ids: Sequence[str] = ()
    turned_down: Collection[str] = ()


def seen_in(history: Iterable[HistoryEvent], schema: EventSchema) -> list[str]:
    """Return the items that count as seen, in order."""
    return [event.item_id for event in history if schema.of(event.type or DEFAULT_TYPE).seen]


def turned_down_in(history: Sequence[HistoryEvent], schema: EventSchema) -> list[str]:
    """Return the items rejected recently. history: oldest first."""
    last = history[-TURNED_DOWN_EVENTS:]
    return schema.turned_down([(event.item_id, (event.type or DEFAULT_TYPE, event.value)) for event in last])


def last_event_ms(history: Sequence[HistoryEvent], schema: EventSchema) -> int:
    """Return the time of the last event that enters histories; 0 without one. history: with times, oldest first."""
    kept = (event for event in reversed(history) if schema.of(event.type or DEFAULT_TYPE).history)
    return next((event.event_time_ms or 0 for event in kept), 0)


@dataclass(frozen=True, slots=True)
class NotAgain:
    """Exclude items of the user's last `answers` answers, and of those in the last `minutes` minutes."""

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
    # The largest accepted gap of the certificate, in similarity units; None: no limit.
    max_gap: float | None = None
    # arms: experiment -> arm, chosen by an operator. assignments: the arms of this request.
    arms: Mapping[str, str] = field(default_factory=dict)
    assignments: tuple[Assignment, ...] = ()
    # Share of positions for new items; None: the gateway's setting.
    new_item_share: float | None = None
    # The revision of the standing rules in `rules`.
    rules_revision: int = 0
    without_standing_rules: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The encoder's answer; no state if it knows no item of the history."""

    query_state: PackedQueryState | None
    queue_ms: float = 0.0
    encode_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFreshness:
    """An index's position in the stream: its last change (-1: none yet), when the broker received its newest
    interaction (Unix milliseconds), and the seconds until that was served.
    """

    deltas_offset: int = -1
    newest_recorded_ms: int | None = None
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The first stage's items, best first. bound: no allowed item outside has a higher s.

    votes: per item, of remembered queries and item neighbours; empty without votes. A final score is model_share * s +
    (1 - model_share) * vote.
    """

    item_ids: Sequence[str]
    scores: Sequence[float]
    bound: float | None = None
    votes: Sequence[float] = ()
    model_share: float = 1.0
    index_version: str = ""
    index_freshness: IndexFreshness | None = None
    queue_ms: float = 0.0
    search_ms: float = 0.0
    # The searched index's items (0: unknown), their share of the catalogue, and the items touched by all passes.
    num_items: int = 0
    searched_share: float = 1.0
    items_touched: int = 0


@dataclass(frozen=True, slots=True)
class ScoredItem:
    """source: "mol", "first_stage", "popular", or "new" in a reserved position.

    propensity: the probability of the item at its position.
    """

    item_id: str
    score: float
    source: str
    propensity: float = 1.0
    # Rules that changed score or position.
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """index_version: of the index that scored them. stage_ms: time of the search or rerank."""

    items: Sequence[ScoredItem]
    certificate: Certificate = ESTIMATE
    index_version: str = ""
    index_freshness: IndexFreshness | None = None
    queue_ms: float = 0.0
    stage_ms: float = 0.0
    # As in a pool.
    num_items: int = 0
    searched_share: float = 1.0
    items_touched: int = 0


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
    """Milliseconds. queue: waiting for a batch or a freshness token. transport: the rest."""

    queue_ms: float = 0.0
    encode_ms: float = 0.0
    first_stage_ms: float = 0.0
    rerank_ms: float = 0.0
    transport_ms: float = 0.0
    total_ms: float = 0.0

    def close(self, total_ms: float) -> None:
        """Set the total, and the time outside all stages."""
        self.total_ms = total_ms
        known = self.queue_ms + self.encode_ms + self.first_stage_ms + self.rerank_ms
        self.transport_ms = max(0.0, total_ms - known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """state_source: "stored", "stored_history" (computed for this answer), "request", "none", or "page" (of a stored
    list). absence_bucket: applied to the state. items_touched: over all searches.
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
    """A seen slot of an answer: position, from 1, and item."""

    position: int
    item_id: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """A durable interaction: its id, and the token of its position."""

    event_id: str
    token: FreshnessToken

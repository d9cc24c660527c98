"""Search's values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.experiments import Assignment
from services.gateway.domain import Degradation

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

"""What Search speaks of: words, what each source found for them, the fused answer. Plain values, no Protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.algorithms.rules.filters import ItemFilter
from services.contracts.experiments import Assignment
from services.gateway.domain import Degradation

# What finds items by words, as the wire names it, and the user's own model, which only orders what they found.
SOURCES = ("text_mol", "phrases", "lexical")
PERSONAL = "mol"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """One search, unchecked (see `validation`). Seen items are answered unless the filter says otherwise."""

    query: str
    user_id: str = ""
    k: int = 10
    filter: ItemFilter = field(default_factory=lambda: ItemFilter(exclude_seen=False))
    assignments: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """`score` is in its source's unit; `identifier` is what the source generated for the item, if it generates."""

    item_id: str
    score: float
    identifier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHits:
    """What one source found, best first, each item once, and how long it took."""

    items: Sequence[Hit]
    text_version: str = ""
    milliseconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTime:
    """How long one source took, and why it did not answer (empty when it did)."""

    source: str
    milliseconds: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A source's say about one result; ranks count from 1."""

    source: str
    rank: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """One item of the answer; `score` is fused and compares within one answer only."""

    item_id: str
    title: str
    score: float
    found_by: Sequence[SourceRank]
    identifier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """The answer with its provenance; `model_version` is empty when no user's model ordered it."""

    results: Sequence[SearchResult]
    text_version: str
    model_version: str
    degradations: Sequence[Degradation]
    sources: Sequence[SourceTime]
    total_ms: float
    exposure_id: str = ""
    absence_bucket: int = 0
    warnings: Sequence[str] = ()

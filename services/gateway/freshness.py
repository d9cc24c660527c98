"""GetFreshness's answer.

An unavailable offset is UNKNOWN. A part that did not answer is absent; the report has Recommend's degradation without
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.domain import Degradation, IndexFreshness

UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """applied_offset: -1: none. end_offset: the next record's; end_offset - 1 - applied_offset records are not yet
    applied.
    """

    partition: int
    applied_offset: int
    end_offset: int = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedIndex:
    """The index in use."""

    index_version: str
    freshness: IndexFreshness
    model_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProgress:
    """A refresher's data of an item. min_users: needed for a new item's state. reason: why it has none."""

    num_interactions: int
    num_users: int
    min_users: int
    is_published: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessReport:
    """interactions: progress into user states. attributions: into item states. A partition without a report is left
    out.
    """

    model_version: str
    epoch: str
    interactions: Sequence[PartitionProgress]
    attributions: Sequence[PartitionProgress]
    candidates: ServedIndex | None
    reranker: ServedIndex | None
    degradations: Sequence[Degradation]

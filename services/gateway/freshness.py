"""GetFreshness's answer: the progress of every part of the system. Plain values, no Protobuf.

An unavailable offset is UNKNOWN. A part that did not answer is absent; the report then has the degradation that
Recommend's answers have without that part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.domain import Degradation, IndexFreshness

UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """One partition of a topic. applied_offset: the last applied record's (-1: none). end_offset: the next record's;
    end_offset - 1 - applied_offset records are not yet applied.
    """

    partition: int
    applied_offset: int
    end_offset: int = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedIndex:
    """The index that candidates or the reranker serve now."""

    index_version: str
    freshness: IndexFreshness
    model_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProgress:
    """A refresher's data of an item. min_users: users that a new item's state needs. reason: why it has no state."""

    num_interactions: int
    num_users: int
    min_users: int
    is_published: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessReport:
    """The answer. interactions: progress of applying them to user states. attributions: progress of folding them into
    item states. A partition without a report is left out.
    """

    model_version: str
    epoch: str
    interactions: Sequence[PartitionProgress]
    attributions: Sequence[PartitionProgress]
    candidates: ServedIndex | None
    reranker: ServedIndex | None
    degradations: Sequence[Degradation]

"""The progress of every part of the system, GetFreshness's answer. Plain values, no Protobuf.

An unavailable offset is UNKNOWN; a part that did not answer is absent, and the report has the degradation that
Recommend's answers have while that part is unavailable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.domain import Degradation, IndexFreshness

UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """One partition of a topic. applied_offset: the last applied record (-1: none); end_offset: of the next record, so
    end_offset - 1 - applied_offset records wait.
    """

    partition: int
    applied_offset: int
    end_offset: int = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedIndex:
    """The present index of candidates or the reranker."""

    index_version: str
    freshness: IndexFreshness
    model_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProgress:
    """What a refresher has of an item. min_users: so many people give a new item a state. reason: why it has none."""

    num_interactions: int
    num_users: int
    min_users: int
    is_published: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessReport:
    """The answer. interactions: applied to user states; attributions: folded into item states; a partition without
    report is left out.
    """

    model_version: str
    epoch: str
    interactions: Sequence[PartitionProgress]
    attributions: Sequence[PartitionProgress]
    candidates: ServedIndex | None
    reranker: ServedIndex | None
    degradations: Sequence[Degradation]

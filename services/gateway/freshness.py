"""How far every part of the system is: what GetFreshness answers. Plain values, no Protobuf.

An offset that could not be asked for is UNKNOWN; a part that did not answer is absent, and the report says so by the
mark that Recommend's answers carry while that part is away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.domain import Degradation, IndexFreshness

UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """One partition of a topic. `applied_offset` is the last record applied (-1: none), `end_offset` where the next
    one will be written, so end_offset - 1 - applied_offset records wait."""

    partition: int
    applied_offset: int
    end_offset: int = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedIndex:
    """What candidates or reranker answers from now."""

    index_version: str
    freshness: IndexFreshness
    model_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessReport:
    """The answer. `interactions` are applied to user states, `attributions` folded into item states; a partition
    that nobody spoke for is left out."""

    model_version: str
    epoch: str
    interactions: Sequence[PartitionProgress]
    attributions: Sequence[PartitionProgress]
    candidates: ServedIndex | None
    reranker: ServedIndex | None
    degradations: Sequence[Degradation]

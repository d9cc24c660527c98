"""Requests and answers of a search as dataclasses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from services.algorithms.indexes.mutable.lookup import SimilarItems
from services.algorithms.indexes.protocol import Certificate, Pass
from services.algorithms.items.live_catalogue import Served
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import FloatArray, QueryStates
from services.contracts.shards import WHOLE, Shard


class Stage(Enum):
    """FIRST: a pool with a bound on the rest. FULL: the top k by s with a certificate."""

    FIRST = "first"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchQuery:
    """A search. algorithm: "" lets the process choose one that meets `deadline` (monotonic clock) and `max_gap`."""

    query: QueryStates
    model_version: str
    k: int
    stage: Stage
    filter: ItemFilter
    algorithm: str = ""
    deadline: float | None = None
    # The wanted version. If it is not retained, the newest one answers.
    index_version: str = ""
    # Seen items, such as rejected ones, that do not vote.
    turned_down_item_ids: Sequence[str] = ()
    max_gap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The index's result: scores descending, ties by item id. bound: only at stage FIRST. certificate: only at stage
    FULL.

    passes: of all attempts, with the batch's times and the number of items that this search read (1,). votes: one per
    item, in similarity units; None if nothing votes. model_share: lambda of the votes.
    """

    algorithm: str
    item_ids: list[str]
    scores: list[float]
    bound: float | None
    certificate: Certificate | None
    search_s: float
    passes: tuple[Pass, ...]
    served: Served
    model_version: str
    model_share: float = 1.0
    votes: list[float] | None = None
    queue_s: float = 0.0

    def after(self, earlier: "SearchResult") -> "SearchResult":
        """Return the attempt with the smaller proven gap, with the time and passes of both."""
        gaps = [
            inf if one.certificate is None or one.certificate.gap is None else one.certificate.gap
            for one in (self, earlier)
        ]
        return replace(
            self if gaps[0] <= gaps[1] else earlier,
            search_s=earlier.search_s + self.search_s,
            passes=(*earlier.passes, *self.passes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesQuery:
    """A request for the votes on an item. seen_item_ids: newest first."""

    query: QueryStates
    model_version: str
    item_id: str
    seen_item_ids: Sequence[str] = ()
    turned_down_item_ids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexInfo:
    """The loaded index."""

    model_version: str
    served: Served
    algorithm: str
    num_items: int
    bytes_per_item: float
    # Bytes per item by algorithm, in addition to the item states.
    added_bytes_per_item: dict[str, float]
    num_remembered: int = 0
    bytes_per_remembered: float = 0.0
    shard: Shard = WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarAnswer:
    """Items similar to one item, exact for `served`. components: the item's (P_x, d)."""

    found: SimilarItems
    components: FloatArray
    served: Served
    model_version: str
    search_s: float

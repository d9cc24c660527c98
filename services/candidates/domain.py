"""Requests and answers of a search as dataclasses: no Protobuf, no index internals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from services.algorithms.indexes.mutable.similar import SimilarItems
from services.algorithms.indexes.protocol import Certificate, Pass
from services.algorithms.items.live_catalogue import Served
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import FloatArray, QueryStates
from services.contracts.shards import WHOLE, Shard


class Stage(Enum):
    """FIRST: a pool with a bound on everything left out. FULL: phi and the certificate."""

    FIRST = "first"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchQuery:
    """One search. query: one state. algorithm: "" lets the process choose one that meets `deadline` (monotonic clock),
    and proves `max_gap` if given.
    """

    query: QueryStates
    model_version: str
    k: int
    stage: Stage
    filter: ItemFilter
    algorithm: str = ""
    deadline: float | None = None
    # The wanted version, if retained; "": the newest.
    index_version: str = ""
    # The seen items of the filter that the user rejected. They do not vote for their neighbours.
    turned_down_item_ids: Sequence[str] = ()
    max_gap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The index's result: scores descending, ties by item id. `bound` at stage FIRST, `certificate` at FULL.

    passes: the passes of all attempts, with the times of the whole batch and the items touched (1,) by this search.
    votes: the merged vote of memory and neighbours for each item, in similarity units, None if nothing votes.
    """

    algorithm: str
    item_ids: list[str]
    scores: list[float]
    bound: float | None
    certificate: Certificate | None
    search_s: float
    passes: tuple[Pass, ...]
    served: Served
    votes: list[float] | None = None

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
class SearchAnswer:
    """An answer with its provenance; times in seconds. model_share: lambda of the votes, 1 without any."""

    found: SearchResult
    model_version: str
    model_share: float
    queue_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesQuery:
    """A request for the votes on an item, for one query state and a user's seen items (newest first)."""

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
    # Bytes that each loaded algorithm adds to the item states, by name.
    added_bytes_per_item: dict[str, float]
    num_remembered: int = 0
    bytes_per_remembered: float = 0.0
    shard: Shard = WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarAnswer:
    """Items similar to one item, exact for `served`. components: that item's own components (P_x, d)."""

    found: SimilarItems
    components: FloatArray
    served: Served
    model_version: str
    search_s: float

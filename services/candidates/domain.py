"""What a search asks and answers, in dataclasses: no Protobuf, no index internals."""

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
    """One search. `query` holds one state; `algorithm` is empty where the process chooses, in time for `deadline`, on
    the monotonic clock, one that proves `max_gap` if that is given."""

    query: QueryStates
    model_version: str
    k: int
    stage: Stage
    filter: ItemFilter
    algorithm: str = ""
    deadline: float | None = None
    # Which version is wanted, where it is kept; "": the newest.
    index_version: str = ""
    # Of the filter's seen items, those whose neighbours do not vote.
    turned_down_item_ids: Sequence[str] = ()
    max_gap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the index found: scores descending, ties by item id. `bound` at stage FIRST, `certificate` at FULL.

    `passes` are those of all attempts, their times those of the whole batch, the items touched (1,) those of this
    search. `votes`: memory's and neighbours' for each item, in similarity units, None where nothing votes.
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

    def after(self, earlier: "Found") -> "Found":
        """The better proven one of two attempts, with what both took."""
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
    """An answer with its provenance; times in seconds. `model_share`: lambda of the votes, 1 without any."""

    found: Found
    model_version: str
    model_share: float
    queue_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesQuery:
    """Who votes for an item, seen from one query state and a user's items, newest first, but those turned down."""

    query: QueryStates
    model_version: str
    item_id: str
    seen_item_ids: Sequence[str] = ()
    turned_down_item_ids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexInfo:
    """What is loaded."""

    model_version: str
    served: Served
    algorithm: str
    num_items: int
    bytes_per_item: float
    # What each loaded algorithm adds to the item states, by name.
    added_bytes_per_item: dict[str, float]
    num_remembered: int = 0
    bytes_per_remembered: float = 0.0
    shard: Shard = WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarAnswer:
    """Items like one item, exactly those of `served`; `components` (P_x, d) are the item's own."""

    found: SimilarItems
    components: FloatArray
    served: Served
    model_version: str
    search_s: float

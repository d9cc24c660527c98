"""What a search asks and answers, in dataclasses: no Protobuf, no index internals."""

from dataclasses import dataclass
from enum import Enum

from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.protocol import Certificate, Pass
from services.algorithms.states import QueryStates


class Stage(Enum):
    """FIRST: a pool with a bound on everything left out. FULL: phi and the certificate."""

    FIRST = "first"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchQuery:
    """One search. `query` holds one state; `algorithm` is empty for the first one configured."""

    query: QueryStates
    model_version: str
    k: int
    stage: Stage
    filter: ItemFilter
    algorithm: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the index found: scores descending, ties by item id. `bound` at stage FIRST, `certificate` at FULL.

    `passes` are those of the whole batch, of which this search was number `query`.
    """

    algorithm: str
    item_ids: list[str]
    scores: list[float]
    bound: float | None
    certificate: Certificate | None
    search_s: float
    passes: tuple[Pass, ...]
    query: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchAnswer:
    """An answer with its provenance; times in seconds."""

    found: Found
    model_version: str
    index_version: str
    queue_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexInfo:
    """What is loaded."""

    model_version: str
    index_version: str
    algorithm: str
    num_items: int
    bytes_per_item: float
    # What each loaded algorithm adds to the item states, by name.
    added_bytes_per_item: dict[str, float]

"""The gateway's ports, and values that only they return. Each port has a real adapter and one in memory (tests/fakes).

Ports raise errors of `services.platform.errors`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, Protocol, TypedDict, TypeVar, Unpack

from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.dead_letters import Replayed
from services.contracts.topics.dead_letters import StoredLetter
from services.contracts.topics.exposures import Exposure
from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import Interaction
from services.contracts.topics.items import CatalogueItem
from services.contracts.wire import ExplainedScore, ItemVotes, PackedQueryState
from services.gateway.domain import Encoded, Event, IndexFreshness, Pool, Ranking, RerankQuery, Seen, SourceHits
from services.platform.errors import FreshetError
from services.platform.stream.records import Position, SourceRecord
from services.user_state.values import Progress, UserView

R = TypeVar("R", contravariant=True)


# The end offset if Kafka or a refresher did not report it.
UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """A partition's records are applied up to `applied_offset` (-1: none). end_offset: the next record's offset."""

    partition: int
    applied_offset: int
    end_offset: int = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedIndex:
    """The index that a process serves."""

    index_version: str
    freshness: IndexFreshness
    model_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProgress:
    """A refresher's data of an item. min_users: users that a new item needs to get a state. reason: why it has none."""

    num_interactions: int
    num_users: int
    min_users: int
    is_published: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUser:
    """A user's data in encoder and state store. in_model: training gave the user a component. forgotten_up_to: offset
    by partition of `interactions`, empty if the user was never forgotten.
    """

    pseudonym: str
    history_events: int = 0
    seen_items: int = 0
    query_states: int = 0
    in_model: bool = False
    forgotten_up_to: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """A refresher's data of a user. partitions: which partitions of `attributions` the refresher reads."""

    summed_interactions: int = 0
    remembered_interactions: int = 0
    forgotten_up_to: Mapping[int, int]
    partitions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer, and its position in `exposures`."""

    exposure: Exposure
    position: Position


@dataclass(frozen=True, slots=True)
class Looked:
    """A user's answers, newest first. oldest_ms: time of the oldest record read. is_complete: no answer is older."""

    answers: Sequence[Shown]
    oldest_ms: int | None
    is_complete: bool


class UserStates(Protocol):
    """The state store (`services.user_state.reader`)."""

    async def read_user(
        self, user_id: str, model_version: str, *, with_seen: bool = True, partition: int | None = None
    ) -> UserView:
        """Read state, seen items, epoch and the watermark of `partition` (None: the user's) together. States of other
        models are ignored.
        """

    async def read_events(self, user_id: str) -> Sequence[Event]:
        """Return the stored events, oldest first."""

    async def epoch(self) -> str | None:
        """Return the stream's epoch, if any."""

    async def read_progress(self) -> tuple[str | None, Mapping[int, Progress]]:
        """Return the epoch, and each partition's progress; (None, {}) without an epoch."""


class Sessions(Protocol):
    """Short lists per user that expire (Redis). `services.user_state.layout` has their kinds."""

    async def push(self, kind: str, user_id: str, entry: bytes, *, most: int, ttl_seconds: int) -> bool:
        """Store an entry. The newest `most` stay until `ttl_seconds` after the last push. Return False if nothing was
        stored, because the user has no history.
        """

    async def read(self, user_id: str, wanted: Mapping[str, int]) -> Mapping[str, list[bytes]]:
        """Return the newest entries by kind, newest first."""


class Encoder(Protocol):
    """The encoder process."""

    async def encode(self, user_id: str, history: Sequence[Event], timeout_s: float) -> Encoded:
        """Encode `history`: oldest first, every event with a time."""

    async def describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        """Return the user's data."""


class SearchOptions(TypedDict):
    """Keyword arguments of `Candidates.search` and `Candidates.propose`."""

    k: int
    filter: ItemFilter
    seen: Seen
    timeout_s: float
    max_gap: NotRequired[float | None]


class Candidates(Protocol):
    """The search over the catalogue. Items of `seen` vote for similar items."""

    async def search(self, query_state: PackedQueryState, **asked: Unpack[SearchOptions]) -> Ranking:
        """Return at most k allowed items, best first. `max_gap` is proven if time allows."""

    async def propose(self, query_state: PackedQueryState, **asked: Unpack[SearchOptions]) -> Pool:
        """Return at most k allowed items for the reranker, with a bound."""

    async def similar(
        self, item_id: str, *, k: int, filter: ItemFilter, seen: Sequence[str], timeout_s: float
    ) -> Ranking:
        """Return at most k allowed items, best first. Raises: NotFound."""

    async def explain_votes(
        self, query_state: PackedQueryState, item_id: str, *, seen: Seen, timeout_s: float
    ) -> ItemVotes:
        """Return the votes for the item."""

    async def served(self, timeout_s: float) -> ServedIndex:
        """Return the index in use."""


class Reranker(Protocol):
    """Scores a pool with the full model; applies rules and diversity."""

    async def rerank(self, query_state: PackedQueryState, pool: Pool, wanted: RerankQuery, timeout_s: float) -> Ranking:
        """Return at most k items of the pool, best first."""

    async def explain(
        self, query_state: PackedQueryState, item_id: str, *, max_pairs: int, rules: Sequence[Rule], timeout_s: float
    ) -> ExplainedScore:
        """Explain the item's similarity and name its rules. max_pairs: 0 for all. Raises: NotFound."""

    async def served(self, timeout_s: float) -> ServedIndex:
        """Return the index in use."""


class TextSources(Protocol):
    """The generator process."""

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        """Return at most k allowed items of each source, or the source's error: PreconditionFailed if it is not loaded.

        Raises: DependencyUnavailable, DeadlineExceeded if the call fails.
        """


class Refreshers(Protocol):
    """The refresher processes. Methods do not raise; each also returns whether all answered (False without any)."""

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        """Return the progress of partitions of `attributions`."""

    async def contributions(self, pseudonym: str, timeout_s: float) -> tuple[Sequence[Contributions], bool]:
        """Return a pseudonym's data in each refresher."""

    async def item(self, item_id: str, timeout_s: float) -> tuple[Sequence[ItemProgress], bool]:
        """Return the item's progress in each refresher; at most one has its interactions."""


class StreamEnds(Protocol):
    """Ends of topics (Kafka)."""

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        """Return the next record's offset by partition of `interactions`."""

    async def records(self, offsets: Mapping[int, int], timeout_s: float) -> Mapping[int, SourceRecord]:
        """Return the record of `interactions` at one offset per partition; omit absent records."""

    async def attribution_partitions(self, timeout_s: float) -> int:
        """Return the number of partitions of `attributions`."""


class Log(Protocol[R]):
    """A topic (Kafka): interactions, items, or forgets."""

    async def append(self, record: R, timeout_s: float) -> Position:
        """Write a record durably."""


class ExposureLog(Protocol):
    """The log of exposures (Kafka)."""

    def append(self, user_id: str, exposure: Exposure) -> None:
        """Enqueue an exposure, to be written under the user's pseudonym. An exposure that cannot be written is counted
        as lost; this method does not wait or fail.
        """


class StreamStatus(Protocol):
    """The last known status of Kafka and encoder."""

    @property
    def log_reachable(self) -> bool:
        """False if most brokers are known to be unreachable."""

    @property
    def encoder_serving(self) -> bool:
        """False if the encoder is known not to serve."""


class Parts(Protocol):
    """The gateway's parts, named as in `metrics.PARTS`."""

    async def problems(self, timeout_s: float) -> Mapping[str, str]:
        """Return why each configured part is not ready, "" if it is. Does not raise."""


class DeadLetterLog(Protocol):
    """Dead letters (Kafka)."""

    async def newest(self, topics: Collection[str], timeout_s: float) -> tuple[Sequence[StoredLetter], bool]:
        """Return these topics' newest letters, newest first, and whether there are older ones."""

    async def replay(self, topic: str, place: Position, *, preview: bool, timeout_s: float) -> Replayed:
        """Write a letter's record again, once. Raises: NotFound if it is not among the newest letters."""


class ShownAnswers(Protocol):
    """The log of exposures (Kafka), for reading."""

    async def newest(self, user_id: str, most: int) -> Looked:
        """Return a user's newest answers, within limits of bytes and time."""

    async def at(self, user_id: str, exposure_id: str, shown_ms: int) -> Shown:
        """Return the answer with this id and time. Raises: NotFound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The handlers' adapters."""

    states: UserStates
    sessions: Sessions
    encoder: Encoder
    candidates: Candidates
    reranker: Reranker
    sources: TextSources
    refreshers: Refreshers
    ends: StreamEnds
    interactions: Log[Interaction]
    items: Log[CatalogueItem]
    forgets: Log[Forget]
    stream: StreamStatus
    parts: Parts
    letters: DeadLetterLog
    shown: ShownAnswers

"""The gateway's ports; each has a real adapter and one in memory (tests/fakes).

All raise the error tree of `services.platform.errors`; timeouts are seconds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.dead_letters import Replayed
from services.contracts.explanations import ExplainedScore, ItemVotes
from services.contracts.query_state import PackedQueryState
from services.contracts.topics.dead_letters import StoredLetter
from services.contracts.topics.exposures import Exposure
from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import Interaction
from services.contracts.topics.items import CatalogueItem
from services.gateway.describe.shown import ShownAnswers
from services.gateway.domain import Encoded, HistoryEvent, Pool, Ranking, Seen
from services.gateway.freshness import ItemProgress, PartitionProgress, ServedIndex
from services.gateway.search.searching import SourceHits
from services.gateway.write.forgetting import Contributions, StoredUser
from services.platform.errors import FreshetError
from services.platform.stream.records import Position, SourceRecord
from services.user_state.values import UserView

R = TypeVar("R", contravariant=True)


class UserStates(Protocol):
    """The state store (Redis)."""

    async def read_user(self, user_id: str, *, with_seen: bool, partition: int | None) -> UserView:
        """Read state, seen items, epoch and the watermark of `partition` (None: the user's) in one round trip."""

    async def read_history(self, user_id: str) -> Sequence[HistoryEvent]:
        """Return the stored history, oldest first."""

    async def epoch(self) -> str | None:
        """Return the stream's epoch, if there is one."""

    async def progress(self) -> tuple[str | None, Mapping[int, int]]:
        """Return the epoch, and every partition's applied watermark (-1: nothing yet); else (None, {})."""


class Sessions(Protocol):
    """Short expiring lists per user (Redis); kinds: `services.user_state.layout`."""

    async def push(self, kind: str, user_id: str, entry: bytes, *, most: int, ttl_seconds: int) -> bool:
        """Prepend an entry; keep the newest `most`, for `ttl_seconds` after the last push. Returns False if the user
        has no history, so nothing is stored.
        """

    async def read(self, user_id: str, wanted: Mapping[str, int]) -> Mapping[str, list[bytes]]:
        """Return the newest entries by kind, newest first."""


class Encoder(Protocol):
    """Makes query states of histories, and writes the state store."""

    async def encode(self, user_id: str, history: Sequence[HistoryEvent], timeout_s: float) -> Encoded:
        """Encode `history`, oldest first; every event has its time."""

    async def describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        """Return the user's data in encoder and state store, and the offsets of applied forgets."""


class Candidates(Protocol):
    """The search over the catalogue. Items of `seen` vote for their neighbours."""

    async def search(
        self,
        query_state: PackedQueryState,
        *,
        k: int,
        filter: ItemFilter,
        seen: Seen,
        timeout_s: float,
        max_gap: float | None = None,
    ) -> Ranking:
        """Return at most k allowed items, best first, proven to `max_gap` if time allows."""

    async def propose(
        self,
        query_state: PackedQueryState,
        *,
        pool_size: int,
        filter: ItemFilter,
        seen: Seen,
        timeout_s: float,
        max_gap: float | None = None,
    ) -> Pool:
        """Return at most `pool_size` allowed items for the reranker, with a bound."""

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
    """The full model over a pool, with rules and diversity."""

    async def rerank(
        self,
        query_state: PackedQueryState,
        pool: Pool,
        *,
        k: int,
        filter: ItemFilter,
        seen: Sequence[str],
        max_per_category: int,
        diversity: float,
        discounts: Mapping[str, float],
        rules: Sequence[Rule],
        timeout_s: float,
    ) -> Ranking:
        """Return at most k items of the pool, best first."""

    async def explain(
        self,
        query_state: PackedQueryState,
        item_id: str,
        *,
        max_pairs: int,
        rules: Sequence[Rule],
        timeout_s: float,
    ) -> ExplainedScore:
        """Explain the item's similarity, and the rules that name it; max_pairs 0 is all. Raises: NotFound for an
        unknown item.
        """

    async def served(self, timeout_s: float) -> ServedIndex:
        """Return the index in use."""


class TextSources(Protocol):
    """Text sources (the generator process)."""

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        """Return at most k allowed items of each of `sources` (of `searching.SOURCES`), or its error:
        PreconditionFailed if it is not loaded. Raises: DependencyUnavailable, DeadlineExceeded for all.
        """


class Refreshers(Protocol):
    """The processes that fold attributions into item states. No method raises; each also returns whether all processes
    answered (False without refreshers).
    """

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        """Return the known progress of each partition of `attributions`."""

    async def contributions(self, pseudonym: str, timeout_s: float) -> tuple[Sequence[Contributions], bool]:
        """Return a pseudonym's data in each refresher that answers."""

    async def item(self, item_id: str, timeout_s: float) -> tuple[Sequence[ItemProgress], bool]:
        """Return the item's progress in each refresher; at most one has its interactions."""


class StreamEnds(Protocol):
    """The log's end offsets (Kafka)."""

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        """Return the next record's offset per partition of `interactions`."""

    async def records(self, offsets: Mapping[int, int], timeout_s: float) -> Mapping[int, SourceRecord]:
        """Return the record of `interactions` at one offset per partition, without absent ones."""

    async def attribution_partitions(self, timeout_s: float) -> int:
        """Return the number of partitions of `attributions`."""


class Log(Protocol[R]):
    """A topic (Kafka): interactions, items, or forgets."""

    async def append(self, record: R, timeout_s: float) -> Position:
        """Write a record durably."""


class ExposureLog(Protocol):
    """The log of exposures (Kafka)."""

    def append(self, user_id: str, exposure: Exposure) -> None:
        """Enqueue an exposure, later written under the user's pseudonym. Never waits or fails: one that cannot be
        written is counted as lost.
        """


class StreamStatus(Protocol):
    """Known status of the parts that update stored states."""

    @property
    def log_reachable(self) -> bool:
        """False if most of the stream (Kafka) is known to be unreachable."""

    @property
    def encoder_serving(self) -> bool:
        """False if the process that applies the stream is known not to serve."""


class Parts(Protocol):
    """The gateway's parts, named as in `health.minutes.PARTS`."""

    async def problems(self, timeout_s: float) -> Mapping[str, str]:
        """Return why each configured part is not ready, "" if it is. Never raises."""


class DeadLetterLog(Protocol):
    """Dead letters (Kafka)."""

    async def newest(self, topics: Collection[str], timeout_s: float) -> tuple[Sequence[StoredLetter], bool]:
        """Return the newest ones of these topics, newest first, and whether there are older ones."""

    async def replay(self, topic: str, place: Position, *, preview: bool, timeout_s: float) -> Replayed:
        """Write a record again, once. Raises: NotFound if it is not among the newest ones."""


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

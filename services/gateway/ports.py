"""What the gateway needs from outside. Each port has a real adapter and one in memory (tests/fakes).

All raise the error tree of `services.platform.errors`; timeouts are seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.explanations import ExplainedScore, ItemVotes
from services.contracts.query_state import PackedQueryState
from services.contracts.topics.exposures import Exposure
from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import Interaction
from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import Encoded, HistoryEvent, Pool, Ranking, Seen
from services.gateway.freshness import PartitionProgress, ServedIndex
from services.gateway.search.searching import SourceHits
from services.gateway.write.forgetting import Contributions, StoredUser
from services.platform.errors import FreshetError
from services.platform.stream.position import Position
from services.user_state.values import UserView

R = TypeVar("R", contravariant=True)


class UserStates(Protocol):
    """The user state store (Redis)."""

    async def read_user(self, user_id: str, *, with_seen: bool, partition: int | None) -> UserView:
        """One round trip: state, seen items (if asked for), epoch, and a partition's applied watermark: the one that
        is named, else that of the user's home."""

    async def read_history(self, user_id: str) -> Sequence[HistoryEvent]:
        """The stored history, oldest first; empty for an unknown user."""

    async def epoch(self) -> str | None:
        """The stream's current epoch; None when there is none yet."""

    async def progress(self) -> tuple[str | None, Mapping[int, int]]:
        """The epoch, and every partition's applied watermark (-1: nothing yet); else (None, {})."""


class Sessions(Protocol):
    """Short lists beside a user (Redis), which end by themselves. Kinds: those of `services.user_state.layout`."""

    async def push(self, kind: str, user_id: str, entry: bytes, *, most: int, ttl_seconds: int) -> bool:
        """Put an entry in front; the newest `most` stay, and all end so long after the last one. False: the user has
        no history, so that nothing is kept."""

    async def read(self, user_id: str, wanted: Mapping[str, int]) -> Mapping[str, list[bytes]]:
        """By kind the newest entries, at most so many, newest first."""


class Encoder(Protocol):
    """Histories in, query states out; it also keeps the state store."""

    async def encode(self, user_id: str, history: Sequence[HistoryEvent], timeout_s: float) -> Encoded:
        """The query state of `history`, oldest first; every event has its time."""

    async def describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        """What it and the state store hold of the user, and up to where a forget was applied."""


class Candidates(Protocol):
    """The search over the catalogue. Item neighbours vote from `seen`."""

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
        """At most k allowed items, best first, by similarity and votes, proven to `max_gap` where there is time."""

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
        """The first stage's: at most `pool_size` allowed items for the reranker, with a bound that may prove `max_gap`
        where there is time."""

    async def similar(
        self, item_id: str, *, k: int, filter: ItemFilter, seen: Sequence[str], timeout_s: float
    ) -> Ranking:
        """At most k allowed items like one item, best first, with their similarities. Raises: NotFound."""

    async def explain_votes(
        self, query_state: PackedQueryState, item_id: str, *, seen: Seen, timeout_s: float
    ) -> ItemVotes:
        """What votes for the item."""

    async def served(self, timeout_s: float) -> ServedIndex:
        """What searches are answered from now."""


class Reranker(Protocol):
    """The full model over a pool, then rules and diversity."""

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
        """At most k items of the pool, best first, by similarity and the pool's votes."""

    async def explain(
        self,
        query_state: PackedQueryState,
        item_id: str,
        *,
        max_pairs: int,
        rules: Sequence[Rule],
        timeout_s: float,
    ) -> ExplainedScore:
        """Where the item's similarity comes from, and which rules name it; max_pairs 0 is all. Raises: NotFound for an
        unknown item."""

    async def served(self, timeout_s: float) -> ServedIndex:
        """What pools are scored with now."""


class TextSources(Protocol):
    """What finds items by words (the generator process)."""

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        """At most k allowed items by each of `sources` (of `searching.SOURCES`), or why it did not answer:
        PreconditionFailed where it is not loaded. Raises: DependencyUnavailable, DeadlineExceeded for all of them."""


class Refreshers(Protocol):
    """The processes that fold attributions into item states. No method raises: any number of them may be away. Each
    also says whether all of them answered (False where none is configured)."""

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        """Progress of each partition of `attributions` that some refresher holds."""

    async def contributions(self, pseudonym: str, timeout_s: float) -> tuple[Sequence[Contributions], bool]:
        """What each refresher that answers holds of a user, who is a pseudonym there."""


class StreamEnds(Protocol):
    """Where the log (Kafka) ends."""

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        """Per partition of `interactions`, the offset that the next record will get."""

    async def attribution_partitions(self, timeout_s: float) -> int:
        """How many partitions `attributions` has now."""


class Log(Protocol[R]):
    """A topic (Kafka): interactions, items, or who is to be forgotten."""

    async def append(self, record: R, timeout_s: float) -> Position:
        """Write one whole, durably; return where it lies."""


class ExposureLog(Protocol):
    """What was shown (Kafka), for whoever learns from it."""

    def append(self, user_id: str, exposure: Exposure) -> None:
        """Take one, to be written a moment later under the user's pseudonym. Never waits, never fails: what cannot be
        written is counted as lost."""


class StreamStatus(Protocol):
    """What is known, without asking, about the parts that keep stored states fresh."""

    @property
    def log_reachable(self) -> bool:
        """False when the stream (Kafka), or most of it, is known to be unreachable."""

    @property
    def encoder_serving(self) -> bool:
        """False when the process that applies the stream is known not to be serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """One of each, as the handlers are given them."""

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

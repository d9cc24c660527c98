"""The gateway's interfaces to the outside. Each port has a real adapter and one in memory (tests/fakes).

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
from services.platform.stream.position import Position
from services.user_state.values import UserView

R = TypeVar("R", contravariant=True)


class UserStates(Protocol):
    """The user state store (Redis)."""

    async def read_user(self, user_id: str, *, with_seen: bool, partition: int | None) -> UserView:
        """Read in one round trip: state, seen items (if requested), epoch, and the applied watermark of `partition`
        (None: the user's own partition).
        """

    async def read_history(self, user_id: str) -> Sequence[HistoryEvent]:
        """Return the stored history, oldest first; empty for an unknown user."""

    async def epoch(self) -> str | None:
        """Return the stream's current epoch; None if there is none yet."""

    async def progress(self) -> tuple[str | None, Mapping[int, int]]:
        """Return the epoch, and every partition's applied watermark (-1: nothing yet); else (None, {})."""


class Sessions(Protocol):
    """Short lists per user (Redis), which expire. `services.user_state.layout` has their kinds."""

    async def push(self, kind: str, user_id: str, entry: bytes, *, most: int, ttl_seconds: int) -> bool:
        """Prepend an entry, and keep the newest `most`. The list expires `ttl_seconds` after the last push. Returns
        False if nothing is stored because the user has no history.
        """

    async def read(self, user_id: str, wanted: Mapping[str, int]) -> Mapping[str, list[bytes]]:
        """Return the newest entries by kind, at most the wanted number, newest first."""


class Encoder(Protocol):
    """Makes query states of histories. The encoder process also writes the state store."""

    async def encode(self, user_id: str, history: Sequence[HistoryEvent], timeout_s: float) -> Encoded:
        """Return the query state of `history`, oldest first; every event has its time."""

    async def describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        """Return the user's data in the encoder and the state store, and the offsets of applied forgets."""


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
        """Return at most k allowed items, best first, by similarity and votes, proven to `max_gap` if time allows."""

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
        """Return the first stage's pool: at most `pool_size` allowed items for the reranker, with a bound that may
        prove `max_gap` if time allows.
        """

    async def similar(
        self, item_id: str, *, k: int, filter: ItemFilter, seen: Sequence[str], timeout_s: float
    ) -> Ranking:
        """Return at most k allowed similar items, best first, with their similarities. Raises: NotFound."""

    async def explain_votes(
        self, query_state: PackedQueryState, item_id: str, *, seen: Seen, timeout_s: float
    ) -> ItemVotes:
        """Return the votes for the item."""

    async def served(self, timeout_s: float) -> ServedIndex:
        """Return the index that searches use now."""


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
        """Return at most k items of the pool, best first, by similarity and the pool's votes."""

    async def explain(
        self,
        query_state: PackedQueryState,
        item_id: str,
        *,
        max_pairs: int,
        rules: Sequence[Rule],
        timeout_s: float,
    ) -> ExplainedScore:
        """Return the parts of the item's similarity, and the rules that name it; max_pairs 0 is all. Raises: NotFound
        for an unknown item.
        """

    async def served(self, timeout_s: float) -> ServedIndex:
        """Return the index that scores use now."""


class TextSources(Protocol):
    """The sources of items by words (the generator process)."""

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        """Return at most k allowed items by each of `sources` (of `searching.SOURCES`), or its error:
        PreconditionFailed if it is not loaded. Raises: DependencyUnavailable, DeadlineExceeded for all of them.
        """


class Refreshers(Protocol):
    """The processes that fold attributions into item states. No method raises: any number of them may be unavailable.
    Each also returns whether all of them answered (False without refreshers).
    """

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        """Return the progress of each partition of `attributions` that some refresher has."""

    async def contributions(self, pseudonym: str, timeout_s: float) -> tuple[Sequence[Contributions], bool]:
        """Return the data of a user, given as a pseudonym, in each refresher that answers."""

    async def item(self, item_id: str, timeout_s: float) -> tuple[Sequence[ItemProgress], bool]:
        """Return the item's progress in each refresher that answers; at most one of them has its interactions."""


class StreamEnds(Protocol):
    """The log's end offsets (Kafka)."""

    async def interactions(self, timeout_s: float) -> Mapping[int, int]:
        """Return, per partition of `interactions`, the offset of the next record."""

    async def attribution_partitions(self, timeout_s: float) -> int:
        """Return the current number of partitions of `attributions`."""


class Log(Protocol[R]):
    """A topic (Kafka): interactions, items, or forgets."""

    async def append(self, record: R, timeout_s: float) -> Position:
        """Write a record durably; return its position."""


class ExposureLog(Protocol):
    """The log of exposures (Kafka), for writing."""

    def append(self, user_id: str, exposure: Exposure) -> None:
        """Enqueue an exposure, written a moment later under the user's pseudonym. Never waits or fails: one that cannot
        be written is counted as lost.
        """


class StreamStatus(Protocol):
    """The known status of the parts that update stored states."""

    @property
    def log_reachable(self) -> bool:
        """False if the stream (Kafka), or most of it, is known to be unreachable."""

    @property
    def encoder_serving(self) -> bool:
        """False if the process that applies the stream is known not to serve."""


class Parts(Protocol):
    """The parts that the gateway uses, with their names of `health.minutes.PARTS`."""

    async def problems(self, timeout_s: float) -> Mapping[str, str]:
        """Return by part why it is not ready, "" if it is. Never raises; a part that is not configured is left out."""


class DeadLetterLog(Protocol):
    """Dead letters (Kafka)."""

    async def newest(self, topics: Collection[str], timeout_s: float) -> tuple[Sequence[StoredLetter], bool]:
        """Return the newest ones of these topics, newest first, and whether there are older ones."""

    async def replay(self, topic: str, place: Position, *, preview: bool, timeout_s: float) -> Replayed:
        """Write a record again, once. Raises: NotFound if it is not among the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The adapters that the handlers use."""

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

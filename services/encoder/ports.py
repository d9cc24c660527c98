"""What the encoder process needs from outside, besides readers of topics and the state store: other topics, the model.

Each port has a real adapter and an in-memory one. All raise the error tree of `services.platform.errors`. Everything is
synchronous: the consumer has a thread of its own, and on-demand encoding runs in a batcher's worker thread.
"""

from collections.abc import Sequence
from typing import Protocol

from services.contracts.topics.attributions import Attributed
from services.contracts.topics.search_clicks import ClickRecord
from services.encoder.domain import EncodedStates, EncodeJob
from services.platform.stream.record import DeadLetter
from services.user_state.values import Popularity, UserKeys


class Outbox(Protocol):
    """What the consumer writes to other topics. Returns once everything is acknowledged; a failure may leave some of
    it written, so readers must know records by their source position."""

    def publish(
        self,
        attributions: Sequence[Attributed],
        dead_letters: Sequence[DeadLetter],
        clicks: Sequence[ClickRecord] = (),
    ) -> None:
        """Write all of them, what belongs to one item in the order given, clicks in the order given; a voided user into
        every partition of attributions."""

    def close(self) -> None:
        """Give the connections up; the next call makes new ones."""


class UserReader(Protocol):
    """What is stored of a user, for an event loop (the real one: `services.user_state.reader`)."""

    async def read_keys(self, user_id: str) -> UserKeys:
        """What is stored of the user. Raises: DependencyUnavailable."""

    async def read_popular(self) -> Sequence[Popularity]:
        """What is popular in each partition that something was applied of. Raises: DependencyUnavailable."""


class Keeper(Protocol):
    """What keeps something of users to go on from."""

    def drop(self, cache_keys: Sequence[int]) -> None:
        """Forget what is kept under these keys (see `EncodeJob`)."""


class SequenceEncoder(Keeper, Protocol):
    """The model."""

    def check(self) -> None:
        """Return when the model is ready to be asked. Raises: DependencyUnavailable, PreconditionFailed."""

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        """The wanted states of each job, in order."""

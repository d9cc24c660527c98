"""Ports of the encoder process: the topics it writes, stored users, the model.

Each has a real and an in-memory adapter.
"""

from collections.abc import Sequence
from typing import Protocol

from services.contracts.topics.attributions import Attributed
from services.contracts.topics.search_clicks import ClickRecord
from services.encoder.domain import EncodedStates, EncodeJob
from services.platform.stream.records import DeadLetter
from services.user_state.values import UserKeys


class Outbox(Protocol):
    """Writes to other topics, and waits for acknowledgements. A failure may leave some records written, so readers
    deduplicate by source position.
    """

    def publish(
        self,
        attributions: Sequence[Attributed],
        dead_letters: Sequence[DeadLetter],
        clicks: Sequence[ClickRecord] = (),
    ) -> None:
        """Write all records: attributions in order per item, a forget (`ForgetUpTo`) to every partition of
        `attributions`, and clicks in order.
        """

    def close(self) -> None:
        """Close the connections; the next call connects again."""


class UserReader(Protocol):
    """Reads what is stored of a user, in an event loop (`services.user_state.reader`)."""

    async def read_keys(self, user_id: str) -> UserKeys:
        """What is stored of the user. Raises: DependencyUnavailable."""


class Keeper(Protocol):
    """A cache of users' encodings."""

    def drop(self, cache_keys: Sequence[int]) -> None:
        """Drop these cache keys (see `EncodeJob`)."""


class SequenceEncoder(Keeper, Protocol):
    """The model."""

    def check(self) -> None:
        """Return when the model is ready. Raises: DependencyUnavailable, PreconditionFailed."""

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        """The wanted states of each job, in order."""

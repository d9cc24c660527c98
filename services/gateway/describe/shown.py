"""ListExposures and GetExposure: a user's answers, for authorized people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.contracts.topics.exposures import Exposure
from services.gateway.recommend.catalogue import Titles
from services.platform.errors import InvalidRequest
from services.platform.stream.records import Position
from services.platform.validation import validate_id

DEFAULT_ANSWERS, MAX_ANSWERS = 20, 100


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer, and its position in `exposures`."""

    exposure: Exposure
    position: Position


@dataclass(frozen=True, slots=True)
class Looked:
    """A user's answers, newest first. oldest_ms: time of the oldest record read. is_complete: none are older."""

    answers: Sequence[Shown]
    oldest_ms: int | None
    is_complete: bool


class ShownAnswers(Protocol):
    """The log of exposures (Kafka), for reading."""

    async def newest(self, user_id: str, most: int) -> Looked:
        """Return a user's newest answers, within limits of bytes and time."""

    async def at(self, user_id: str, exposure_id: str, shown_ms: int) -> Shown:
        """Return the answer of this time. Raises: NotFound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTo:
    """The two handlers. time_of: `Exposures.time_of`."""

    log: ShownAnswers
    time_of: Callable[[str, str], int]
    titles: Titles

    async def newest(self, user_id: str, max_answers: int) -> Looked:
        """Return a user's newest answers. Raises: InvalidRequest; PreconditionFailed if the gateway records none."""
        validate_id("user_id", user_id)
        if max_answers > MAX_ANSWERS:
            raise InvalidRequest.of("max_answers", max_answers, f"0-{MAX_ANSWERS}")
        return await self.log.newest(user_id, max_answers or DEFAULT_ANSWERS)

    async def one(self, user_id: str, exposure_id: str) -> Shown:
        """Return one answer. Raises: InvalidRequest; PermissionDenied for another user's id; NotFound."""
        validate_id("user_id", user_id)
        return await self.log.at(user_id, exposure_id, self.time_of(exposure_id, user_id))

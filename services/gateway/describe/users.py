"""GetUser, ListExposures, GetExposure and TailInteractions: users' data, for authorized people."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from services.algorithms.bundles.event_schema import EventSchema, Role
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.interactions import DEFAULT_TYPE, Interaction, decode_interaction, validate
from services.gateway.domain import Event, ServedModel
from services.gateway.ports import Looked, Shown, ShownAnswers, StreamEnds, UserStates
from services.gateway.recommend.popular import PopularItems
from services.platform.errors import InvalidRequest
from services.platform.stream.records import SourceRecord
from services.platform.validation import validate_id
from services.user_state.values import StoredState, now_ms

DEFAULT_EVENTS, MAX_EVENTS, MAX_SKIPPED = 100, 1_000, 100_000


@dataclass(frozen=True, slots=True)
class DescribedEvent:
    """An event, its item's title ("": unknown), and its `event_schema.Role`."""

    event: Event
    title: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedUser:
    """A user. events: the requested ones of `num_events`, newest first. state: stored for this model."""

    events: Sequence[DescribedEvent]
    num_events: int
    num_seen: int
    model_version: str
    state: StoredState | None
    reaches_history: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GetUser:
    """GetUser."""

    states: UserStates
    items: PopularItems
    model: ServedModel

    async def __call__(self, user_id: str, max_events: int, skip_events: int) -> DescribedUser:
        """Return the user's data; an unknown user has none. Raises: InvalidRequest, DependencyUnavailable."""
        validate_id("user_id", user_id)
        if max_events > MAX_EVENTS:
            raise InvalidRequest.of("max_events", max_events, f"0-{MAX_EVENTS}")
        if skip_events > MAX_SKIPPED:
            raise InvalidRequest.of("skip_events", skip_events, f"0-{MAX_SKIPPED}")
        view, history = await asyncio.gather(
            self.states.read_user(user_id, self.model.version), self.states.read_events(user_id)
        )
        shown = history[::-1][skip_events : skip_events + (max_events or DEFAULT_EVENTS)]
        titles = self.items.titles_of([event.item_id for event in shown])
        return DescribedUser(
            events=[
                DescribedEvent(event, title, _role(event, self.model.schema))
                for event, title in zip(shown, titles, strict=True)
            ],
            num_events=len(history),
            num_seen=len(view.seen),
            model_version=self.model.version,
            state=view.state,
            reaches_history=view.reaches_history,
        )


def _role(event: Event, schema: EventSchema) -> str:
    kind = event.type or DEFAULT_TYPE
    if schema.speaks_for(kind, event.value):
        return Role.POSITIVE
    if schema.speaks_against(kind, event.value):
        return Role.NEGATIVE
    named = schema.of(kind).role
    return Role.NEUTRAL if named is Role.POSITIVE else named


DEFAULT_ANSWERS, MAX_ANSWERS = 20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTo:
    """ListExposures and GetExposure. time_of: `Exposures.time_of`."""

    log: ShownAnswers
    time_of: Callable[[str, str], int]
    items: PopularItems

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


# A tail ends after `_LONGEST_S`; opening it again is authorized and audited again.
_EVERY_S, _TIMEOUT_S, _LONGEST_S = 1.0, 5.0, 300.0
# Each process has a new key, so that pseudonyms differ between processes and after a restart.
_KEY = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class TailedInteraction:
    """An interaction with its item's title ("": unknown). written_ms: as in `SourceRecord`."""

    interaction: Interaction
    title: str
    written_ms: int


@dataclass(frozen=True, slots=True)
class Tailed:
    """At most one interaction of each partition, oldest first.

    left_out: number of other records written since the previous sample, including those that the encoder rejects.
    """

    interactions: Sequence[TailedInteraction]
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TailInteractions:
    """TailInteractions: a live sample of `interactions`. It reads only the newest record of each partition, so a busy
    stream costs no more than a calm one.
    """

    ends: StreamEnds
    items: PopularItems

    async def __call__(self, *, shows_users: bool, stops: Callable[[], bool]) -> AsyncIterator[Tailed]:
        """Yield an empty sample at once, then one each second with new records, for five minutes or until `stops`.

        shows_users: yield user ids instead of pseudonyms. Raises: DependencyUnavailable or DeadlineExceeded if the
        log cannot be read.
        """
        until = time.monotonic() + _LONGEST_S
        before = await self.ends.interactions(_TIMEOUT_S)
        yield Tailed((), 0)
        while time.monotonic() < until and not stops():
            await asyncio.sleep(_EVERY_S)
            after = await self.ends.interactions(_TIMEOUT_S)
            moved = {partition: end - 1 for partition, end in after.items() if end > before.get(partition, end)}
            if moved:
                records = await self.ends.records(moved, _TIMEOUT_S)
                shown = self._shown(records.values(), shows_users=shows_users)
                num_written = sum(at + 1 - before[partition] for partition, at in moved.items())
                yield Tailed(shown, num_written - len(shown))
            before = after

    def _shown(self, records: Iterable[SourceRecord], *, shows_users: bool) -> list[TailedInteraction]:
        found: list[tuple[Interaction, int]] = []
        for record in sorted(records, key=lambda one: one.written_ms):
            with contextlib.suppress(InvalidRequest):
                one = decode_interaction(record.value, record.headers, record.key)
                validate(one, now_ms())
                user_id = one.user_id if shows_users else pseudonym_of(one.user_id, _KEY)
                found.append((replace(one, user_id=user_id), record.written_ms))
        titles = self.items.titles_of([one.item_id for one, _ in found])
        return [TailedInteraction(one, title, at_ms) for (one, at_ms), title in zip(found, titles, strict=True)]

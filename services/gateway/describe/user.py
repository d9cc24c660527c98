"""GetUser: a user's data in the state store, for authorized people."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.bundles.event_schema import EventSchema, Role
from services.contracts.topics.interactions import DEFAULT_TYPE
from services.gateway.domain import Event, ServedModel
from services.gateway.ports import UserStates
from services.gateway.recommend.catalogue import Titles
from services.platform.errors import InvalidRequest
from services.platform.validation import validate_id
from services.user_state.values import StoredState

DEFAULT_EVENTS, MAX_EVENTS, MAX_SKIPPED = 100, 1_000, 100_000


@dataclass(frozen=True, slots=True)
class DescribedEvent:
    """An event with its item's title ("": unknown) and meaning, an `event_schema.Role`."""

    event: Event
    title: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedUser:
    """A user. events: some of `num_events`, newest first. state: of this model."""

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
    titles: Titles
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
        titles = self.titles.of([event.item_id for event in shown])
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

"""What a gateway says of its catalogue and of a user, as plain values with the field names of `gateway.proto`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from freshet_client.answers import StreamPosition


@dataclass(frozen=True)
class CategoryCount:
    """A category and how many items it has, withdrawn ones too."""

    name: str
    items: int


@dataclass(frozen=True)
class CatalogueAttribute:
    """An attribute of items; `kind` is "number", "time" or "tag"."""

    name: str
    kind: str


@dataclass(frozen=True)
class EventTypeMeaning:
    """What events of a type mean: `role` is "positive", "negative", "exposure" or "neutral"; `seen`: the item is not
    recommended to the user again; `history`: the event enters the user's history."""

    type: str
    role: str
    seen: bool
    history: bool


@dataclass(frozen=True)
class CatalogueDescription:
    """What the catalogue holds: `categories` are the largest of `num_categories`; `event_types` those that the bundle
    names, every other one being neutral."""

    model_version: str
    items: int
    withdrawn_items: int
    categories: tuple[CategoryCount, ...]
    num_categories: int
    attributes: tuple[CatalogueAttribute, ...]
    event_types: tuple[EventTypeMeaning, ...]


@dataclass(frozen=True)
class StoredEvent:
    """An event of a user's stored history; `role` as in EventTypeMeaning, by type and value."""

    item_id: str
    title: str
    type: str
    value: float
    event_time: datetime | None
    role: str


@dataclass(frozen=True)
class UserReport:
    """What is stored of a user: events, newest first, of `num_events` in all.

    `state_position` and `state_time` are None where `model_version` has no state of the user.
    """

    events: tuple[StoredEvent, ...]
    num_events: int
    num_seen: int
    model_version: str
    state_position: StreamPosition | None
    state_time: datetime | None
    state_reaches_history: bool

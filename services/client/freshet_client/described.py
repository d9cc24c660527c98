"""Reports on catalogue, users and parts as plain values, with `gateway.proto`'s field names."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from freshet_client.answers import Assignment, StreamPosition
from freshet_client.requests import Item, Rule


@dataclass(frozen=True)
class CategoryCount:
    """A category and its number of items, including withdrawn ones."""

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
    recommended again; `history`: the event enters the history."""

    type: str
    role: str
    seen: bool
    history: bool


@dataclass(frozen=True)
class CatalogueDescription:
    """`categories`: the largest ones. `event_types`: declared by the bundle; other types are neutral. `roles`: of the
    caller's API key, or all roles if no key is required."""

    model_version: str
    items: int
    withdrawn_items: int
    categories: tuple[CategoryCount, ...]
    num_categories: int
    attributes: tuple[CatalogueAttribute, ...]
    event_types: tuple[EventTypeMeaning, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class DescribedItem:
    """A whole catalogue item. `is_trained`: training included it. `first_seen`: when a new item was first described."""

    item: Item
    is_trained: bool
    first_seen: datetime | None


@dataclass(frozen=True)
class ItemProgress:
    """An item's interactions since training, by `num_users` users; a new item needs `min_users`.

    `is_published`: answers use a state of its interactions or its text. `reason`: why its interactions make no state.
    """

    num_interactions: int
    num_users: int
    min_users: int
    is_published: bool
    reason: str


@dataclass(frozen=True)
class ItemReport:
    """One item. `progress` is None if the item's refresher did not answer."""

    item: DescribedItem
    progress: ItemProgress | None
    model_version: str


@dataclass(frozen=True)
class ItemPage:
    """A page of the catalogue; `next_page_token` is empty only on the last page."""

    items: tuple[DescribedItem, ...]
    next_page_token: str


@dataclass(frozen=True)
class StoredEvent:
    """An event of a user's stored history. `role`: as in EventTypeMeaning, for this value."""

    item_id: str
    title: str
    type: str
    value: float
    event_time: datetime | None
    role: str


@dataclass(frozen=True)
class TailedInteraction:
    """A written interaction. `user_id`: a pseudonym unless the caller has the role support.

    `item_id`: "" for an undo. `title`: the item's current title.
    """

    user_id: str
    item_id: str
    title: str
    type: str
    value: float
    written_time: datetime | None


@dataclass(frozen=True)
class TailedInteractions:
    """A sample of a second: at most one interaction per partition, oldest first; `left_out`: number of all others."""

    interactions: tuple[TailedInteraction, ...]
    left_out: int


@dataclass(frozen=True)
class UserReport:
    """What is stored of a user: a part of the `num_events` events, newest first.

    `state_position` and `state_time` are None if `model_version` has no state of the user.
    """

    events: tuple[StoredEvent, ...]
    num_events: int
    num_seen: int
    model_version: str
    state_position: StreamPosition | None
    state_time: datetime | None
    state_reaches_history: bool


@dataclass(frozen=True)
class PartHealth:
    """One part's state, and values by minute.

    `problem`: why it is not ready, "" if it is. `started`: it was once ready since the gateway's start. `effect`: what
    does not work without it. `degraded`: the gateway's degraded answers. `lag` is in `lag_unit`, -1 if unknown.
    """

    name: str
    ready: bool
    problem: str
    effect: str
    calls: tuple[int, ...]
    failed: tuple[int, ...]
    degraded: tuple[int, ...]
    p50_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]
    lag_unit: str
    lag: tuple[float, ...]
    was_ready: tuple[bool, ...]
    started: bool


@dataclass(frozen=True)
class HealthReport:
    """The state of each part since the gateway started (`since`). `last_minute_seconds`: passed seconds of the last
    minute."""

    since: datetime | None
    first_minute: datetime | None
    last_minute_seconds: float
    parts: tuple[PartHealth, ...]


@dataclass(frozen=True)
class DeadLetter:
    """An unusable record: its position, when and why it failed, its replay's position."""

    topic: str
    position: StreamPosition | None
    written_time: datetime | None
    reason: str
    replayed_to: StreamPosition | None


@dataclass(frozen=True)
class DeadLetterList:
    """Dead letters, newest first. `has_older`: older ones were not read."""

    letters: tuple[DeadLetter, ...]
    has_older: bool


@dataclass(frozen=True)
class ReplayedLetter:
    """`left_out`: why the record is not written, "" if it is. `event_id`: the id, if it is an interaction."""

    left_out: str
    written_to: StreamPosition | None
    event_id: str


@dataclass(frozen=True)
class StandingRules:
    """`revision`: how often they were put, 0 for the gateway's file. `problems`: which rules the serving model does not
    apply, and why."""

    revision: int
    rules: tuple[Rule, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Changed:
    """An operator's change: the new revision, and whether its gateway already applies it."""

    revision: int
    is_applied: bool


@dataclass(frozen=True)
class VersionSet:
    """A model and its processes; an empty address is the gateway's own."""

    name: str
    model_version: str
    bundle: str
    candidates: str
    reranker: str
    refreshers: tuple[str, ...]
    generator: str


@dataclass(frozen=True)
class SetShare:
    """A share of users (canary) or requests (shadow), above 0 and at most 1."""

    name: str
    share: float


@dataclass(frozen=True)
class ShadowReport:
    """A shadow's answers compared with the sent ones. `overlap`: the mean share of items in both. `score_shift`: the
    mean difference of the best scores, shadow less sent. `taken`: items that these users took next;
    `taken_from_answer`, `taken_from_shadow`: how many each answer contained."""

    requests: int
    skipped: int
    failed: int
    overlap: float
    score_shift: float
    median_ms: float
    p99_ms: float
    taken: int
    taken_from_answer: int
    taken_from_shadow: int


@dataclass(frozen=True)
class HeldSet:
    """A version set in a gateway. `answered`: its number of answers. `shadow`: its report if it is the shadow."""

    set: VersionSet
    ready: bool
    problem: str
    answered: int
    shadow: ShadowReport | None


@dataclass(frozen=True)
class VersionSets:
    """The version sets of a gateway. `revision` is 0 if none was ever staged. `before`: the target of a roll back."""

    revision: int
    serving: str
    before: str
    canary: SetShare | None
    shadow: SetShare | None
    sets: tuple[HeldSet, ...]


@dataclass(frozen=True)
class ShownItem:
    """An item of an answer. `title`: the current title. `source`: what found it."""

    item_id: str
    title: str
    score: float
    source: str


@dataclass(frozen=True)
class ShownAnswer:
    """A user's answer as recorded in `exposures`. `surface`: "recommend", "search" or "similar"."""

    exposure_id: str
    shown_time: datetime | None
    surface: str
    model_version: str
    index_version: str
    first_position: int
    items: tuple[ShownItem, ...]
    context: dict[str, str]
    assignments: tuple[Assignment, ...]
    position: StreamPosition | None


@dataclass(frozen=True)
class ShownAnswers:
    """A user's answers, newest first. `looked_back_to`: time of the oldest record read; `is_complete`: there are no
    older answers."""

    answers: tuple[ShownAnswer, ...]
    looked_back_to: datetime | None
    is_complete: bool

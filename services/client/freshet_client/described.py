"""What a gateway says of its catalogue, its users and its parts, as plain values with `gateway.proto`'s field names."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from freshet_client.answers import Assignment, StreamPosition
from freshet_client.requests import Item, Rule


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
class DescribedItem:
    """An item of the catalogue, whole. `is_trained`: training knew it. `first_seen`: when a new one was described."""

    item: Item
    is_trained: bool
    first_seen: datetime | None


@dataclass(frozen=True)
class ItemProgress:
    """What interactions since training say of an item: `num_users` people, and a new item needs `min_users`.

    `is_published`: answers use a refreshed state of it, or one of its texts. `reason`: why it has none of interactions.
    """

    num_interactions: int
    num_users: int
    min_users: int
    is_published: bool
    reason: str


@dataclass(frozen=True)
class ItemReport:
    """What the catalogue says of one item. `progress` is None where its refresher did not answer."""

    item: DescribedItem
    progress: ItemProgress | None
    model_version: str


@dataclass(frozen=True)
class ItemPage:
    """A page of the catalogue; `next_page_token` is empty at the end, and only there."""

    items: tuple[DescribedItem, ...]
    next_page_token: str


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


@dataclass(frozen=True)
class PartHealth:
    """One part: why it is not ready ("" if it is), what does not work while it is not, and columns by the minute.

    `calls`, `failed` and `degraded` are counts, the latter of the gateway's answers; times are milliseconds; `lag` is
    in `lag_unit`, -1 where it is not known.
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


@dataclass(frozen=True)
class HealthReport:
    """How each part does, since the gateway's process started (`since`). `last_minute_seconds`: how much of the last
    minute is over."""

    since: datetime | None
    first_minute: datetime | None
    last_minute_seconds: float
    parts: tuple[PartHealth, ...]


@dataclass(frozen=True)
class DeadLetter:
    """An unusable record: where it is, when it was written, why it is a dead letter, and where its replay is."""

    topic: str
    position: StreamPosition | None
    written_time: datetime | None
    reason: str
    replayed_to: StreamPosition | None


@dataclass(frozen=True)
class DeadLetterList:
    """Newest first. `has_older`: older ones were not looked at."""

    letters: tuple[DeadLetter, ...]
    has_older: bool


@dataclass(frozen=True)
class ReplayedLetter:
    """Why a record was not written again ("" if it was, or would be), where it was written, and an interaction's event
    id."""

    left_out: str
    written_to: StreamPosition | None
    event_id: str


@dataclass(frozen=True)
class StandingRules:
    """The standing rules: put `revision` times, 0 for those of the gateway's file. `problems`: which ones the serving
    model does not apply, and why."""

    revision: int
    rules: tuple[Rule, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Changed:
    """An operator's change: the new revision, and whether the gateway that took it applies it already."""

    revision: int
    is_applied: bool


@dataclass(frozen=True)
class VersionSet:
    """A model and the processes that serve it; an empty address is the gateway's own."""

    name: str
    model_version: str
    bundle: str
    candidates: str
    reranker: str
    refreshers: tuple[str, ...]
    generator: str


@dataclass(frozen=True)
class SetShare:
    """A set's share of users (canary) or requests (shadow), above 0 and at most 1."""

    name: str
    share: float


@dataclass(frozen=True)
class ShadowReport:
    """A shadow's answers beside those that went out: `overlap` is the mean share of items in both, `score_shift` the
    mean of its best score less the answer's; of `taken` items each answer had so many."""

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
    """A set at a gateway: ready, or the `problem`; how many answers it gave; its report where it is the shadow."""

    set: VersionSet
    ready: bool
    problem: str
    answered: int
    shadow: ShadowReport | None


@dataclass(frozen=True)
class VersionSets:
    """The version sets of a gateway. `revision` 0: none was ever staged. `before`: what a roll back returns to."""

    revision: int
    serving: str
    before: str
    canary: SetShare | None
    shadow: SetShare | None
    sets: tuple[HeldSet, ...]


@dataclass(frozen=True)
class ShownItem:
    """An item of an answer; `title` as it is now, `source`: what found it."""

    item_id: str
    title: str
    score: float
    source: str


@dataclass(frozen=True)
class ShownAnswer:
    """An answer that a user got, by "recommend", "search" or "similar", as the topic `exposures` has it."""

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
    """A user's newest answers, newest first. Records back to `looked_back_to` were read; `is_complete`: there are no
    older answers."""

    answers: tuple[ShownAnswer, ...]
    looked_back_to: datetime | None
    is_complete: bool

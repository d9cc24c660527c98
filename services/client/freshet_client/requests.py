"""Requests as plain values, with `gateway.proto`'s field names; the gateway checks them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypedDict

from freshet_client.answers import FreshnessToken

Value = float | str | datetime
"""An attribute's value: a number, a tag, or a time (UTC where it names no zone)."""
Comparison = Literal["at_most", "at_least", "below", "above", "one_of", "none_of", "present", "absent"]
"""How a `Condition` compares."""
SetChange = Literal["shadow", "canary", "promote", "roll_back", "retire"]
"""A step with a version set: compare it with the sent answers, serve a share of users or all, roll back, remove it."""


def new_event_id() -> str:
    """A random id for an event."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Interaction:
    """`type`: what the user did ("click", "rating", ...); `value`: its strength in the type's unit. `event_time`:
    None is the gateway's clock. `event_id`: writes with one id count once; each object has its own. `query`: the words
    that led to the item ("search_click"). `exposure_id`: the answer that showed the item.
    """

    user_id: str
    item_id: str
    type: str = ""
    value: float = 0.0
    event_time: datetime | None = None
    event_id: str = field(default_factory=new_event_id)
    context: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    exposure_id: str = ""


@dataclass(frozen=True)
class HistoryEvent:
    """One event of a request's history, ordered oldest first."""

    item_id: str
    event_time: datetime | None = None
    type: str = ""
    value: float = 0.0


@dataclass(frozen=True)
class Condition:
    """A condition on an attribute: `Condition("price", "at_most", [20])`. "present" and "absent" take no value."""

    name: str
    comparison: Comparison
    values: Sequence[Value] = ()


@dataclass(frozen=True)
class Filter:
    """Which items are allowed; the answer is still the best k of them.

    `exclude_seen`: leave out the user's items; None: the gateway's default, true except for `search`. An item must
    match one of `allow_item_ids` and of `allow_categories`, if given, no denied id or category, and all conditions in
    `where`.
    """

    exclude_seen: bool | None = None
    allow_item_ids: Sequence[str] = ()
    deny_item_ids: Sequence[str] = ()
    allow_categories: Sequence[str] = ()
    deny_categories: Sequence[str] = ()
    where: Sequence[Condition] = ()


@dataclass(frozen=True)
class Rule:
    """One of `boost`, `bury`, `pin` and `cap` for the items that match.

    `boost` adds to the score, `bury` subtracts. The best match is put at position `pin`, from 1. An answer has at
    most `cap` matching items.
    """

    name: str
    item_ids: Sequence[str] = ()
    categories: Sequence[str] = ()
    where: Sequence[Condition] = ()
    boost: float | None = None
    bury: float | None = None
    pin: int | None = None
    cap: int | None = None


@dataclass(frozen=True)
class NotAgain:
    """Leave out items of the user's last `answers` answers (0-50), or of the last `minutes` (0-1,440), or both."""

    answers: int = 0
    minutes: int = 0


@dataclass(frozen=True)
class Impression:
    """A seen slot of an answer: position, from 1, and item."""

    position: int
    item_id: str


@dataclass(frozen=True)
class Item:
    """A whole item: a write replaces the stored one.

    With `available` False, no answer contains it; its state stays. `withdrawn` removes it until it is put again.
    """

    item_id: str
    title: str = ""
    categories: Sequence[str] = ()
    available: bool | None = None
    withdrawn: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)


class RecommendOptions(TypedDict, total=False):
    """The keywords of `recommend`; the defaults change nothing.

    `history`: used instead of the stored one, oldest first, at most 1,000 events. `context`: device, surface, ...; kept
    with the exposure. `freshness_token`: reflect this token, else `token_honoured` is False. `max_per_category`: cap of
    items of one category. `diversity`: 0 orders by score alone; towards 1, dissimilar items are preferred. `query`: the
    user's search words. `page_depth`: keep a list of this length for further pages. `page_token`: answer a further
    page. `not_again`: leave out items that were shown. `rules`: at most 8. `as_of`: the request's time, for replays.
    `max_gap`: the certificate's largest gap, 0 for exact. `arms`: experiment -> arm, for operators. `with_details`:
    also return titles and categories. `without_standing_rules`: `rules` replace the standing ones, for operators.
    """

    filter: Filter | None
    history: Sequence[HistoryEvent]
    context: Mapping[str, str]
    freshness_token: FreshnessToken | None
    max_per_category: int
    diversity: float
    query: str
    page_depth: int
    page_token: str
    not_again: NotAgain | None
    rules: Sequence[Rule]
    as_of: datetime | None
    max_gap: float | None
    arms: Mapping[str, str]
    with_details: bool
    without_standing_rules: bool

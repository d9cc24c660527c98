"""Requests as plain values, with the field names of `gateway.proto`. The gateway checks them."""

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
    """One thing that a user did with an item.

    `type` is what happened ("click", "rating", "purchase", ...), `value` its strength in the type's own unit. Without
    `event_time` the gateway sets it from its own clock. With the same `event_id` a repeated write counts once; each
    object has its own. `query`: the words that led to the item (type "search_click").
    `exposure_id`: the answer that showed the item.
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
    """One event of a history that is given with a request; histories are ordered oldest first."""

    item_id: str
    event_time: datetime | None = None
    type: str = ""
    value: float = 0.0


@dataclass(frozen=True)
class Condition:
    """What an item's attribute must be: `Condition("price", "at_most", [20])`. "present" and "absent" take no value."""

    name: str
    comparison: Comparison
    values: Sequence[Value] = ()


@dataclass(frozen=True)
class Filter:
    """Which items may be answered; the answer is still the best k of them.

    `exclude_seen`: leave out items that the user has interacted with; None is the gateway's default, which is true
    except for `search`. An item must match one of `allow_item_ids` and one of `allow_categories`, if they are given,
    none of the denied ids and categories, and all conditions in `where`.
    """

    exclude_seen: bool | None = None
    allow_item_ids: Sequence[str] = ()
    deny_item_ids: Sequence[str] = ()
    allow_categories: Sequence[str] = ()
    deny_categories: Sequence[str] = ()
    where: Sequence[Condition] = ()


@dataclass(frozen=True)
class Rule:
    """A change of the ranking: one of `boost`, `bury`, `pin` and `cap`, for the items that match.

    `boost` adds to the score, and `bury` subtracts from it. The best of the items is put at position `pin`, from 1. At
    most `cap` of the items are answered.
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
    """One slot of an answer that was seen: its position in the answer, from 1, and the item there."""

    position: int
    item_id: str


@dataclass(frozen=True)
class Item:
    """An item of the catalogue with all its fields: a write replaces the stored item.

    `available` False keeps the item's state, but no answer contains it. `withdrawn` removes it until it is put again.
    """

    item_id: str
    title: str = ""
    categories: Sequence[str] = ()
    available: bool | None = None
    withdrawn: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)


class RecommendOptions(TypedDict, total=False):
    """The keywords of `recommend` other than user and k. The defaults change nothing.

    `filter`: which items may be answered. `history`: used instead of the stored one, oldest first, at most 1,000
    events. `context`: device, surface, ...; it is kept with the exposure and changes no answer. `freshness_token`:
    answer from a state that reflects this token, else `token_honoured` is False. `max_per_category`: the most items of
    one category. `diversity`: 0 orders by score alone; towards 1, dissimilar items are preferred. `query`: the user's
    search words. `page_depth`: keep a ranked list of this many items for further pages. `page_token`: answer a further
    page. `not_again`: leave out items that were shown. `rules`: at most 8. `as_of`: the request's time, for replays by
    operators. `max_gap`: the largest allowed gap of the certificate, 0 for exact. `arms`: experiment -> arm, instead
    of the user's own, for operators. `with_details`: also titles and categories of the items.
    `without_standing_rules`: `rules` replace the standing ones, for operators.
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

"""What a client asks with: plain values, checked by the gateway. Their fields have the names of `gateway.proto`."""

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
"""A step with a version set: ask it beside, let it answer a share or all, go back, remove it."""


def new_event_id() -> str:
    """A random id for an event."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Interaction:
    """One thing that a user did with an item.

    `type` is what happened ("click", "rating", "purchase", ...), `value` its strength in the type's own unit. Without
    `event_time` the gateway's clock counts, so that a wrong clock here changes nothing. `event_id` makes a repeated
    write count once; each object has its own. `query`: the words that led to the item (type "search_click").
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

    `exclude_seen`: leave out what the user has interacted with; None is the gateway's default, which is true but for
    `search`. An item needs one of `allow_item_ids` and of `allow_categories` where they are given, none of the denied
    ones, and all conditions in `where`.
    """

    exclude_seen: bool | None = None
    allow_item_ids: Sequence[str] = ()
    deny_item_ids: Sequence[str] = ()
    allow_categories: Sequence[str] = ()
    deny_categories: Sequence[str] = ()
    where: Sequence[Condition] = ()


@dataclass(frozen=True)
class Rule:
    """What a request changes of the ranking: one of `boost`, `bury`, `pin`, `cap` for the items that are named.

    `boost` and `bury` add to and take from the score; the best of the items stands at position `pin`, from 1; at most
    `cap` of them are answered.
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
    """Leave out the items of the user's last answers: so many (0-50), or of so many minutes (0-1,440), or both."""

    answers: int = 0
    minutes: int = 0


@dataclass(frozen=True)
class Impression:
    """One slot of an answer that was seen: its position in the answer, from 1, and the item there."""

    position: int
    item_id: str


@dataclass(frozen=True)
class Item:
    """An item of the catalogue, whole: a write replaces what the catalogue says of it.

    `available` False keeps the item's state and answers it to nobody; `withdrawn` takes it out until it is put again.
    """

    item_id: str
    title: str = ""
    categories: Sequence[str] = ()
    available: bool | None = None
    withdrawn: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)


class RecommendOptions(TypedDict, total=False):
    """What `recommend` takes beside user and k, by keyword; the defaults change nothing.

    `filter`: which items may be answered. `history`: used instead of the stored one, oldest first, at most 1,000
    events. `context`: device, surface, ...; it is kept with the exposure and changes no answer. `freshness_token`:
    answer from a state at least so fresh, or say that it is not (`token_honoured`). `max_per_category`: at most so many
    items of a category. `diversity`: 0 orders by score alone, towards 1 prefers unlike items. `query`: words that the
    user looks with. `page_depth`: keep a ranked list of so many items for further pages. `page_token`: answer a further
    page. `not_again`: leave out what was shown. `rules`: at most 8. `as_of`: when the request is made, for replays by
    operators. `max_gap`: the largest gap of the certificate that is wanted, 0 for exact. `arms`: experiment -> arm in
    place of the user's own, for operators. `with_details`: titles and categories of the items, too.
    `without_standing_rules`: `rules` stand in place of the standing ones, for operators.
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

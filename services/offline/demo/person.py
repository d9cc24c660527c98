"""The user of the demo's search and dislike; the choice is a pure function."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.offline.demo.plan import ReplayEvent

_EVENTS_WANTED = 10
# Enough for a history, few enough that ten events matter.
_PAST_WANTED = range(20, 151)


@dataclass(frozen=True, kw_only=True, slots=True)
class Person:
    """items: of the past and the replay, oldest first; last_s: of the replay's last event, unix seconds."""

    user_id: str
    items: list[str]
    last_s: int


def choose_person(events: Sequence[ReplayEvent], past: Mapping[str, Sequence[str]]) -> Person | None:
    """Return the user with a past of suitable length and about ten events, if any.

    `past`: item ids before the split, oldest first.
    """
    counts = Counter(event.user_id for event in events)
    for sizes in (_PAST_WANTED, range(1, 10**9)):
        known = [user for user in counts if len(past.get(user, ())) in sizes]
        if known:
            chosen = min(known, key=lambda user: (abs(counts[user] - _EVENTS_WANTED), user))
            own = [event for event in events if event.user_id == chosen]
            items = [*past[chosen], *(event.item_id for event in own)]
            return Person(user_id=chosen, items=items, last_s=own[-1].time_s)
    return None

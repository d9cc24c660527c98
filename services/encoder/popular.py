"""A batch's changes of item popularity per partition from users' events before and after it. Pure functions."""

import math
from collections.abc import Iterable, Mapping

from services.algorithms.bundles.event_schema import EventSchema
from services.algorithms.items.popularity import joined, level_of, without
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.interactions import Interaction
from services.encoder.domain import UserWork
from services.platform.stream.records import Position
from services.user_state.merging import Outcome
from services.user_state.values import PopularityStep

# Not late events: the user's earlier ones with the item are unknown.
_TAKEN = (Outcome.APPLIED, Outcome.KEPT_OUT, Outcome.KEPT_OUT_UNSEEN)


def popularity_steps(work: Iterable[UserWork], schema: EventSchema, half_life_s: float) -> dict[int, PopularityStep]:
    """Each partition's added and removed levels.

    Of a user's events with an item, the strongest in the window and the recent ids counts. An undone event is
    subtracted if the window still had it; otherwise it decays.
    """
    made: dict[int, tuple[dict[str, float], dict[str, float]]] = {}
    for user in work:
        _add_user(made, user, schema, half_life_s)
    return {
        partition: PopularityStep(half_life_s=half_life_s, joins=joins, goes=goes)
        for partition, (joins, goes) in made.items()
    }


def _add_user(
    made: dict[int, tuple[dict[str, float], dict[str, float]]], user: UserWork, schema: EventSchema, half_life_s: float
) -> None:
    # The history may include redelivered records: only lower offsets were there before the batch.
    first = {arrival.partition: arrival.offset for arrival in reversed(user.arrivals)}
    items = {arrival.interaction.item_id for arrival in user.arrivals}
    items.update(undone.item_id for undone in user.merged.undone.values())
    stored: dict[Position, Interaction | StoredEvent] = {
        Position(event.partition, event.offset): event
        for event in user.history.events
        if event.item_id in items and event.offset < first.get(event.partition, math.inf)
    }
    # Events outside the window, of unknown weight.
    others = {
        (one.item_id, one.outcome == Outcome.APPLIED)
        for one in user.history.recent
        if one.item_id in items
        and one.offset < first.get(one.partition, math.inf)
        and Position(one.partition, one.offset) not in stored
    }
    for number, (arrival, outcome) in enumerate(zip(user.arrivals, user.merged.outcomes, strict=True)):
        undone = user.merged.undone.get(number)
        event = arrival.interaction if outcome in _TAKEN else None if undone is None else undone.event
        if event is None:
            continue
        before = _strongest(event.item_id, stored, schema, half_life_s)
        if undone is None:
            stored[Position(arrival.partition, arrival.offset)] = event
        else:
            stored.pop(undone.position, None)
        after = _strongest(event.item_id, stored, schema, half_life_s)
        if before == after or (event.item_id, schema.of(event.type).history) in others:
            continue
        levels = made.setdefault(arrival.partition, ({}, {}))[after < before]
        change = without(max(before, after), min(before, after))
        if change is not None:
            levels[event.item_id] = joined(change, levels.get(event.item_id, -math.inf))


def _strongest(
    item_id: str, events: Mapping[Position, Interaction | StoredEvent], schema: EventSchema, half_life_s: float
) -> float:
    weighed = (
        (schema.weight_for(event.type, event.value), event.event_time_ms)
        for event in events.values()
        if event.item_id == item_id
    )
    return max((level_of(weight, time_ms, half_life_s) for weight, time_ms in weighed if weight), default=-math.inf)

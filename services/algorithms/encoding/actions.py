"""Actions: a row of the action embedding is added to the item's embedding (decision 048).

An action is an event type, or a type at one of five levels of its weight: 1 to 5 stars are "rating -2" to "rating +2".
Actions not in the bundle's manifest have row 0, which adds nothing. A negative event is encoded only if its action has
a row: row 0 would make it positive.

An item and its action are stored as one number, item + action * STRIDE, so code for sequences need not know actions.
"""

from collections.abc import Sequence
from functools import lru_cache

from services.algorithms.bundles.event_schema import EventSchema, EventType

# More than every item's index.
STRIDE = 1 << 32
# Levels on each side of the neutral level.
LEVELS = 2
# Actions with fewer training events get no row.
MIN_EVENTS = 100


def action_name(schema: EventSchema, kind: str, value: float) -> str:
    """The event's action; "" for a type unknown to the schema."""
    if kind not in schema.types:
        return ""
    weight = schema.types[kind].weight
    if weight.centre is None:
        return kind
    level = round(LEVELS * schema.feedback.weight(kind, value) / weight.limit)
    return f"{kind} {level:+d}" if level else f"{kind} 0"


class Actions:
    """A model's action embedding. names: the actions of rows 1, 2, ...

    row(type, value) is 0 for an action unknown to training, -1 if the encoder does not read the event.
    """

    def __init__(self, schema: EventSchema, names: Sequence[str]) -> None:
        self._schema, self._rows = schema, {name: row for row, name in enumerate(names, 1)}
        # Ratings have few values; other types may have many, so the cache is bounded.
        self.row = lru_cache(maxsize=4096)(self._find)

    def _find(self, kind: str, value: float) -> int:
        means: EventType = self._schema.of(kind)
        found = self._rows.get(action_name(self._schema, kind, value), 0)
        return found if means.is_encoded or (means.history and found) else -1

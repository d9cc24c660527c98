"""What an event was, as an encoder reads it: the row of an action embedding that is added to the item's.

An action is a type, or where the type's weight depends on a value, a type at one of five levels of that weight: stars
from 1 to 5 are "rating -2" to "rating +2". A bundle's manifest lists the actions that its training saw; all others
have row 0, which adds nothing. What was turned down is encoded only where its action has a row: as row 0 it would read
as taken.

Item and action travel as one number, item + action * STRIDE, so that whoever carries, caches, pads or compares
sequences has nothing to know of actions, and a model without them has the numbers that it always had.
"""

from collections.abc import Sequence
from functools import lru_cache

from services.algorithms.bundles.event_schema import EventSchema, EventType

# Above every dense index and bucket of an item.
STRIDE = 1 << 32
# Levels of a value on each side of the one that says nothing.
LEVELS = 2
# Actions that training saw less often get no row.
MIN_EVENTS = 100


def action_name(schema: EventSchema, kind: str, value: float) -> str:
    """The action of an event of this type and value; empty for a type that the schema does not name."""
    if kind not in schema.types:
        return ""
    weight = schema.types[kind].weight
    if weight.centre is None:
        return kind
    level = round(LEVELS * schema.feedback.weight(kind, value) / weight.limit)
    return f"{kind} {level:+d}" if level else f"{kind} 0"


class Actions:
    """The rows of one model's action embedding, by a schema. `names`: of rows 1, 2, ...

    row(type, value): 0 for what training did not see, -1 where the encoder does not read the event.
    """

    def __init__(self, schema: EventSchema, names: Sequence[str]) -> None:
        self._schema, self._rows = schema, {name: row for row, name in enumerate(names, 1)}
        # Values are few where they are stars, and bounded here where they are not.
        self.row = lru_cache(maxsize=4096)(self._find)

    def _find(self, kind: str, value: float) -> int:
        means: EventType = self._schema.of(kind)
        found = self._rows.get(action_name(self._schema, kind, value), 0)
        return found if means.is_encoded or (means.history and found) else -1

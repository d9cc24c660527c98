"""Records that retract interactions, and what they cover.

An `Undo` retracts one interaction, a `ForgetUpTo` all of a user up to positions of `interactions`. A covered record is
void even if it arrives later. Positions map partition to offset; an absent partition, and offset -1, cover nothing.
Both are written to `attributions` and `search-clicks`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.platform.stream.position import Position, write_up_to
from services.platform.stream.times import set_ms

UpTo = Mapping[int, int]

# Separates several pseudonyms of one user.
PSEUDONYMS_BETWEEN = ","


@dataclass(frozen=True, slots=True, kw_only=True)
class OfInteraction:
    """An interaction's fields in every record made from it, identified by (partition, offset).

    Times: Unix milliseconds. recorded_ms: the broker's time of the interaction.
    """

    event_id: str
    item_id: str
    event_time_ms: int
    recorded_ms: int
    partition: int
    offset: int
    user_pseudonym: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo(OfInteraction):
    """Retracts the interaction at `undoes`, whatever its type.

    The other fields are the undoing event's; event_id is "" if a forget voided the state.
    """

    undoes: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetUpTo:
    """Retracts a user's records at or below `up_to`."""

    forget_id: str
    up_to: UpTo
    user_pseudonym: str
    recorded_ms: int


def is_covered(up_to: UpTo, partition: int, offset: int) -> bool:
    """Return whether the record at this position is retracted."""
    return offset <= up_to.get(partition, -1)


def covers(one: UpTo, other: UpTo) -> bool:
    """Return whether `one` covers everything that `other` covers."""
    return all(is_covered(one, partition, offset) for partition, offset in other.items())


def furthest(one: UpTo, other: UpTo) -> dict[int, int]:
    """Return the positions that cover exactly what `one` or `other` covers."""
    return {partition: max(one.get(partition, -1), other.get(partition, -1)) for partition in one.keys() | other.keys()}


def write_about(message: Any, record: Any) -> None:
    """Fill the fields common to `attributions` and `search-clicks`, and all of a retraction.

    message: an Attribution or a SearchClick.
    """
    message.user_pseudonym = record.user_pseudonym
    set_ms(message.recorded_time, record.recorded_ms)
    if isinstance(record, ForgetUpTo):
        message.forgets.forget_id = record.forget_id
        write_up_to(message.forgets.up_to, record.up_to)
        return
    message.event_id, message.item_id = record.event_id, record.item_id
    message.source.partition, message.source.offset = record.partition, record.offset
    set_ms(message.event_time, record.event_time_ms)
    if isinstance(record, Undo):
        message.undoes.partition, message.undoes.offset = record.undoes

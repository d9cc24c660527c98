"""What takes interactions back, and the one rule of what it covers.

An `Undo` takes back one interaction, a `ForgetUpTo` everything of a user up to positions of `interactions`. Both hold
whenever they come: what they cover is void also when it comes later. Positions are maps from partition to offset; a
partition that is absent, and offset -1, cover nothing. Both kinds go onto `attributions` and onto `search-clicks`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.platform.stream.position import Position, write_up_to
from services.platform.stream.times import set_ms

UpTo = Mapping[int, int]

# Between several pseudonyms of one user, where there is one text for them.
PSEUDONYMS_BETWEEN = ","


@dataclass(frozen=True, slots=True, kw_only=True)
class OfInteraction:
    """What every record that an interaction leads to says of it; such records are known by (partition, offset).

    Times: Unix milliseconds; recorded_ms: when the broker took the interaction.
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
    """Takes back the interaction at `undoes`, whatever its type, and whether it was used or not.

    The other fields are those of what undid it; event_id "": no event did, a forget voided what it was made of.
    """

    undoes: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetUpTo:
    """Takes back everything of a user at or below `up_to`."""

    forget_id: str
    up_to: UpTo
    user_pseudonym: str
    recorded_ms: int


def is_covered(up_to: UpTo, partition: int, offset: int) -> bool:
    """Whether the record at this position is taken back."""
    return offset <= up_to.get(partition, -1)


def covers(one: UpTo, other: UpTo) -> bool:
    """Whether `one` takes back all that `other` does."""
    return all(is_covered(one, partition, offset) for partition, offset in other.items())


def furthest(one: UpTo, other: UpTo) -> dict[int, int]:
    """What takes back all that either does, and nothing else."""
    return {partition: max(one.get(partition, -1), other.get(partition, -1)) for partition in one.keys() | other.keys()}


def write_about(message: Any, record: Any) -> None:
    """Fill the fields that every record of `attributions` and `search-clicks` has: of whom it is, where it comes from
    and when; and the whole of what takes back. message: an Attribution or a SearchClick."""
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

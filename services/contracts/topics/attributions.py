"""The topic `attributions`: the query state before each interaction, and retractions.

The encoder writes records keyed by item, and each `ForgetUpTo` to every partition. Refreshers validate records against
their model (`services/refresher/adapters/topics.py`). `search-clicks` has the same retractions. A record at a retracted
position is void even if it arrives after the retraction.
"""

from dataclasses import dataclass
from typing import Any

from freshet.v1 import events_pb2

from services.contracts.wire import PackedQueryState, query_state_message
from services.platform.stream.records import Position, UpTo, set_ms, write_up_to
from services.platform.stream.topic import FOREVER, Topic

ATTRIBUTIONS = "attributions"
# Records are read again after a forget or an undo, and to build a new memory.
TOPIC = Topic(name=ATTRIBUTIONS, settings=FOREVER, has_dead_letters=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfInteraction:
    """Fields of every record made from an interaction. (partition, offset) of the interaction identifies the record.

    Times are Unix milliseconds. recorded_ms: the broker's time of the interaction.
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
    """Retracts the interaction at `undoes`, whatever its type. The other fields belong to the undoing event.

    event_id: "" if the interaction's query state is void because the user was forgotten.
    """

    undoes: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetUpTo:
    """Retracts a user's records at or below `up_to`."""

    forget_id: str
    up_to: UpTo
    user_pseudonym: str
    recorded_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(OfInteraction):
    """The query state before an interaction, with its item."""

    state: PackedQueryState
    type: str
    value: float


Attributed = Attribution | Undo | ForgetUpTo


def write_about(message: Any, record: Any) -> None:
    """Fill the fields common to `attributions` and `search-clicks`, and all fields of a retraction.

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


def encode_attribution(record: Attributed) -> bytes:
    message = events_pb2.Attribution()
    write_about(message, record)
    if isinstance(record, Attribution):
        message.type = record.type
        message.value = record.value
        message.query_state.CopyFrom(query_state_message(record.state))
    return message.SerializeToString()

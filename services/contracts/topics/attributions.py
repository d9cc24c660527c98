"""The topic `attributions`: the query state before each interaction, and retractions.

The encoder writes it, keyed by item (a forget goes to every partition). Refreshers validate records against their
model: `services/refresher/adapters/decoding.py`.
"""

from dataclasses import dataclass

from freshet.v1 import events_pb2

from services.contracts.query_state import PackedQueryState, to_message
from services.contracts.retraction import ForgetUpTo, OfInteraction, Undo, write_about
from services.platform.stream.topic import FOREVER, Topic

ATTRIBUTIONS = "attributions"
# Records are read again after a forget or an undo, and for a new memory.
TOPIC = Topic(name=ATTRIBUTIONS, settings=FOREVER, has_dead_letters=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(OfInteraction):
    """The query state before an interaction, with its item."""

    state: PackedQueryState
    type: str
    value: float


Attributed = Attribution | Undo | ForgetUpTo


def encode_attribution(record: Attributed) -> bytes:
    """Return a record's value."""
    message = events_pb2.Attribution()
    write_about(message, record)
    if isinstance(record, Attribution):
        message.type = record.type
        message.value = record.value
        message.query_state.CopyFrom(to_message(record.state))
    data: bytes = message.SerializeToString()
    return data

"""The records of `attributions` and `items` as the refresher sees them: one class per kind, checked, without Protobuf.

A source position is that of a record of `interactions`, packed (see `pack_position`).
Knows nothing of what a record does to sums or memory.

Letters: P_q query components, P component pairs, d component width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.contracts.query_state import PackedQueryState
from services.platform.stream.record import DeadLetter

IntArray = npt.NDArray[np.int64]


def hash_text(text: str) -> int:
    """64 bits of an id."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Interaction:
    """A user did something with an item.

    offset: of the attribution; source_position: of the interaction. moment_ms: when it happened, by the
    producer's clock but never after the broker took it: a clock that runs ahead ages nobody. recorded_ms: when the
    broker took the interaction.
    """

    offset: int
    source_position: int
    item_id: str
    user: str
    query: PackedQueryState
    type: str
    value: float
    moment_ms: int
    recorded_ms: int


@dataclass(frozen=True, slots=True)
class Undo:
    """The interaction at `source_position` is void."""

    offset: int
    source_position: int
    item_id: str
    user: str


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Everything of a user at or below these offsets of `interactions`, by partition, is void."""

    offset: int
    user: str
    up_to: Mapping[int, int]


Entry = Interaction | Undo | Forgetting | DeadLetter


@dataclass(frozen=True, slots=True)
class Listing:
    """An item as topic `items` has it."""

    item_id: str
    withdrawn: bool
    title: str = ""
    categories: tuple[str, ...] = ()

"""Validated records of `attributions` and `items`, without Protobuf.

A source position is the packed position (`pack_position`) of a record of `interactions`.

Letters: P_q query components, P component pairs, d component width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.contracts.wire import PackedQueryState
from services.platform.stream.records import DeadLetter

IntArray = npt.NDArray[np.int64]


def hash_text(text: str) -> int:
    """Return 64 bits of the hash of an id."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Interaction:
    """A user's interaction with an item.

    `offset` is the attribution's, and `source_position` the interaction's. `recorded_ms` is the broker's time.
    `moment_ms` is the earlier of the producer's and the broker's time, so that a producer's fast clock does not make
    other events look older.
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
    """Voids the interaction at `source_position`."""

    offset: int
    source_position: int
    item_id: str
    user: str


@dataclass(frozen=True, slots=True)
class Forgetting:
    """A user's interactions at or below these offsets, by partition, are void."""

    offset: int
    user: str
    up_to: Mapping[int, int]


Entry = Interaction | Undo | Forgetting | DeadLetter


@dataclass(frozen=True, slots=True)
class Listing:
    """An item of topic `items`."""

    item_id: str
    withdrawn: bool
    title: str = ""
    categories: tuple[str, ...] = ()

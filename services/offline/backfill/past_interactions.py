"""Past interactions as columns, their limits, and each row's position in `interactions`.

Letters: N interactions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.contracts.topics.interactions import Interaction, validate
from services.platform.errors import InvalidRequest
from services.platform.stream.kafka import partition_for
from services.platform.validation import validate_id
from services.user_state.values import now_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class PastInteractions:
    """N interactions, oldest first.

    Shapes: users, items, types (N,) codes into user_ids, item_ids, type_names; timestamps (N,) Unix seconds, never
    decreasing; values (N,). name: part of the event ids; another name is another import.
    """

    name: str
    users: npt.NDArray[np.integer]
    items: npt.NDArray[np.integer]
    timestamps: npt.NDArray[np.int64]
    values: npt.NDArray[np.floating]
    types: npt.NDArray[np.integer]
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    type_names: Sequence[str]

    def __len__(self) -> int:
        return len(self.users)

    def event_id(self, row: int) -> str:
        """Return an id of the import and the row, the same in every run."""
        return f"import-{self.name}-{row}"

    def interaction(self, row: int) -> Interaction:
        """Return one row as a record of the stream."""
        return Interaction(
            event_id=self.event_id(row),
            user_id=self.user_ids[self.users[row]],
            item_id=self.item_ids[self.items[row]],
            type=self.type_names[self.types[row]],
            value=float(self.values[row]),
            event_time_ms=int(self.timestamps[row]) * 1000,
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Each row's partition and offset, and each partition's rows in order."""

    partition: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    rows: list[npt.NDArray[np.int64]]


def lay_out(past: PastInteractions, num_partitions: int) -> Layout:
    """Return the positions of the rows, written in order to an empty topic with Kafka's default partitioner."""
    per_user = np.array([partition_for(user_id.encode(), num_partitions) for user_id in past.user_ids], dtype=np.int32)
    partition = per_user[past.users] if len(past) else np.zeros(0, dtype=np.int32)
    offset = np.zeros(len(past), dtype=np.int64)
    rows = []
    for number in range(num_partitions):
        mine = np.flatnonzero(partition == number)
        offset[mine] = np.arange(len(mine))
        rows.append(mine)
    return Layout(partition, offset, rows)


def check(past: PastInteractions) -> None:
    """Check all limits of an interaction, by column. Raises: InvalidRequest naming column, row or id number."""
    columns = {"items": past.items, "timestamps": past.timestamps, "values": past.values, "types": past.types}
    for name, column in columns.items():
        if len(column) != len(past):
            raise InvalidRequest.of(name, f"{len(column)} rows", f"{len(past)} rows, as many as users")
    if len(past) > 1 and (bad := np.flatnonzero(np.diff(past.timestamps) < 0)).size:
        raise InvalidRequest.of("timestamps", f"an earlier time in row {int(bad[0]) + 1}", "never decreasing")
    if (bad := np.flatnonzero(~np.isfinite(past.values))).size:
        raise InvalidRequest.of("values", f"{past.values[bad[0]]} in row {int(bad[0])}", "finite numbers")
    validate_id("name", past.name)
    if len(past):
        validate_id("event_id", past.event_id(len(past) - 1))
    now = now_ms()
    for name, ids in (("user_id", past.user_ids), ("item_id", past.item_ids)):
        for text in ids:
            validate_id(name, text)
    for name in past.type_names:
        validate(Interaction(user_id="u", item_id="i", type=name), now)
    for row in (0, len(past) - 1) if len(past) else ():
        validate(past.interaction(row), now)

"""Convert past interactions to records with event ids, check limits, and plan positions in `interactions`.

Letters: N interactions.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.contracts.topics.interactions import Interaction, validate
from services.offline.datasets import Interactions
from services.platform.errors import InvalidRequest
from services.platform.stream.kafka import partition_for
from services.platform.validation import validate_id
from services.user_state.values import now_ms


def event_id(past: Interactions, row: int) -> str:
    """Return an event id made of the data set's name and the row; it is the same in every run."""
    return f"import-{past.name}-{row}"


def interaction(past: Interactions, row: int) -> Interaction:
    """Return a row as a record."""
    return Interaction(
        event_id=event_id(past, row),
        user_id=past.user_ids[past.users[row]],
        item_id=past.item_ids[past.items[row]],
        type=past.type_names[past.types[row]],
        value=float(past.values[row]),
        event_time_ms=int(past.timestamps[row]) * 1000,
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Each row's partition and offset, and each partition's rows in order."""

    partition: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    rows: list[npt.NDArray[np.int64]]


def lay_out(past: Interactions, num_partitions: int) -> Layout:
    """Return the positions of rows written in order to an empty topic, with Kafka's default partitioner."""
    per_user = np.array([partition_for(user_id.encode(), num_partitions) for user_id in past.user_ids], dtype=np.int32)
    partition = per_user[past.users] if len(past) else np.zeros(0, dtype=np.int32)
    offset = np.zeros(len(past), dtype=np.int64)
    rows = []
    for number in range(num_partitions):
        mine = np.flatnonzero(partition == number)
        offset[mine] = np.arange(len(mine))
        rows.append(mine)
    return Layout(partition, offset, rows)


def check(past: Interactions) -> None:
    """Check every column's limits. Raises: InvalidRequest naming the column and the row or the id."""
    if (bad := np.flatnonzero(~np.isfinite(past.values))).size:
        raise InvalidRequest.of("values", f"{past.values[bad[0]]} in row {int(bad[0])}", "finite numbers")
    validate_id("name", past.name)
    if len(past):
        validate_id("event_id", event_id(past, len(past) - 1))
    now = now_ms()
    for name, ids in (("user_id", past.user_ids), ("item_id", past.item_ids)):
        for text in ids:
            validate_id(name, text)
    for name in past.type_names:
        validate(Interaction(user_id="u", item_id="i", type=name), now)
    for row in (0, len(past) - 1) if len(past) else ():
        validate(interaction(past, row), now)

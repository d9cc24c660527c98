"""What the demo reads from the state store: the stream's progress, and users' states at the split.

Each function opens its own connection and closes it: they run before and after the stream, never during it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from services.algorithms.packed_state import unpack_query_state
from services.algorithms.states import QueryStates
from services.common.state_store import Progress, StateReader
from services.common.stream.topic import NUM_PARTITIONS

T = TypeVar("T")


class StreamStalledError(RuntimeError):
    """The stream did not apply everything in time; the message says which partitions lag, and by how much."""


def stream_progress(redis_url: str) -> tuple[str, dict[int, Progress]]:
    """The stream's epoch ("" before the first) and every partition's progress."""

    async def read(reader: StateReader) -> tuple[str, dict[int, Progress]]:
        epoch, progress = await reader.read_progress(NUM_PARTITIONS)
        return epoch or "", progress

    return _with_reader(redis_url, read)


def total_counts(progress: Mapping[int, Progress]) -> dict[str, int]:
    """What became of the records, all partitions together."""
    total: Counter[str] = Counter()
    for partition in progress.values():
        total.update(partition.counts)
    return dict(total)


def wait_until_applied(redis_url: str, last_offsets: Mapping[int, int], *, timeout_s: float) -> dict[int, Progress]:
    """Wait until every partition's watermark has reached its last acknowledged offset.

    Raises: StreamStalledError after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        _, progress = stream_progress(redis_url)
        behind = {p: last - progress[p].watermark for p, last in last_offsets.items() if progress[p].watermark < last}
        if not behind:
            return progress
        if time.monotonic() > deadline:
            raise StreamStalledError(
                f"after {timeout_s:.0f} s the stream had not applied everything; records behind by partition: {behind}"
            )
        time.sleep(0.1)


def stored_query_states(redis_url: str, user_ids: Iterable[str], model_version: str) -> dict[str, QueryStates]:
    """The stored state (B = 1) of each user that has one for this model."""

    async def read(reader: StateReader) -> dict[str, QueryStates]:
        states: dict[str, QueryStates] = {}
        for user_id in user_ids:
            view = await reader.read_user(user_id, model_version, with_seen=False)
            if view.state is not None:
                packed = view.state.query_state
                states[user_id] = unpack_query_state(
                    packed.components,
                    packed.gate,
                    num_components=packed.num_components,
                    component_width=packed.component_width,
                )
        return states

    return _with_reader(redis_url, read)


def _with_reader(redis_url: str, read: Callable[[StateReader], Awaitable[T]]) -> T:
    async def run() -> T:
        reader = StateReader(redis_url, timeout_s=5.0)
        try:
            return await read(reader)
        finally:
            await reader.close()

    return asyncio.run(run())

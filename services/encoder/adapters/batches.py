"""Batch jobs for the model, in few padded shapes and bounded calls. Jobs of similar length share a call, so that a long
history does not pad many short ones.

Letters: B batch, L padded length, M positions wanted.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from services.encoder.domain import EncodeJob

PADDING_ITEM = -1

# Up to this many jobs are batched in the order given.
_TOGETHER = 8

IntArray = npt.NDArray[np.int64]


def length_buckets(max_history: int) -> list[int]:
    """Return the lengths that sequences are padded to. Evenly spread lengths grow by less than a third on average."""
    quarter = max_history // 4
    return sorted({max(4, quarter // 2), max(4, quarter), 2 * quarter, 3 * quarter, max_history})


def pad_jobs(jobs: Sequence[EncodeJob], buckets: Sequence[int]) -> dict[str, IntArray]:
    """The model's inputs for some jobs: left-aligned, padded at the end.

    Shapes: item_index (B, L), event_time (B, L), user_index (B, 1), position (B, M).
    """
    longest = max(len(job.item_index) for job in jobs)
    length = next((bucket for bucket in buckets if bucket >= longest), longest)
    most = max(len(job.positions) for job in jobs)
    wanted = 1 << (most - 1).bit_length()
    items = np.full((len(jobs), length), PADDING_ITEM, dtype=np.int64)
    times = np.empty((len(jobs), length), dtype=np.int64)
    positions = np.empty((len(jobs), wanted), dtype=np.int64)
    for row, job in enumerate(jobs):
        used = len(job.item_index)
        items[row, :used] = job.item_index
        times[row, :used] = job.event_time
        times[row, used:] = job.event_time[-1]
        positions[row, : len(job.positions)] = job.positions
        positions[row, len(job.positions) :] = job.positions[-1]
    users = np.array([[job.user_index] for job in jobs], dtype=np.int64)
    return {"item_index": items, "event_time": times, "user_index": users, "position": positions}


def calls(jobs: Sequence[EncodeJob], numbers: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """Split the jobs with these numbers into calls of at most `max_rows`; more than `_TOGETHER` by length."""
    ordered = list(numbers)
    if len(ordered) > _TOGETHER:
        ordered.sort(key=lambda number: len(jobs[number].item_index))
    for start in range(0, len(ordered), max_rows):
        yield ordered[start : start + max_rows]

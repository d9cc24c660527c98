"""The demo's stream step: plan the replay, run its process, read its result."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from services.algorithms.scoring.packed_state import unpack_query_state
from services.algorithms.scoring.states import QueryStates
from services.offline.demo.plan import ReplayPlan, ReplayResult, read, write
from services.user_state.reader import StateReader
from services.user_state.values import Progress

OnProgress = Callable[[Mapping[str, Any]], None]


class ReplayFailedError(RuntimeError):
    """The replay process ended without a result; the message has its last line."""


def run_replay(plan: ReplayPlan, folder: Path, on_progress: OnProgress) -> ReplayResult:
    """Run the plan in a separate process; `folder` gets the plan, the result and stderr.

    An interrupt also ends that process. Raises: ReplayFailedError if it ends without a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan_path, result_path, errors_path = (folder / name for name in ("plan.json", "result.json", "replay.log"))
    write(plan, plan_path)
    result_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "services.offline.demo.replay", str(plan_path), str(result_path)]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with errors_path.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | one_thread
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_progress(json.loads(line))
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status != 0 or not result_path.exists():
        last = errors_path.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise ReplayFailedError(
            f"the replay ended with status {status}: {' '.join(last) or 'no message'} ({errors_path})"
        )
    return read(ReplayResult, result_path)


T = TypeVar("T")


class StreamStalledError(RuntimeError):
    """Not everything was applied in time; the message names the lagging partitions and their lag."""


def stream_progress(redis_url: str) -> tuple[str, dict[int, Progress]]:
    """Return the epoch ("" before the first epoch) and every partition's progress."""

    async def read(reader: StateReader) -> tuple[str, dict[int, Progress]]:
        epoch, progress = await reader.read_progress()
        return epoch or "", progress

    return _with_reader(redis_url, read)


def total_counts(progress: Mapping[int, Progress]) -> dict[str, int]:
    """Return the records by outcome, over all partitions."""
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
        applied = {p: progress.get(p, Progress()).watermark for p in last_offsets}
        behind = {p: last - applied[p] for p, last in last_offsets.items() if applied[p] < last}
        if not behind:
            return progress
        if time.monotonic() > deadline:
            raise StreamStalledError(
                f"after {timeout_s:.0f} s the stream had not applied everything; records behind by partition: {behind}"
            )
        time.sleep(0.1)


def stored_query_states(redis_url: str, user_ids: Iterable[str], model_version: str) -> dict[str, QueryStates]:
    """Return the stored states (B = 1) for this model, by user."""

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

"""Natural batching: what waits goes together, errors and cancellations touch only whom they should."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.platform.errors import DependencyUnavailable, Overloaded
from services.platform.threads import Batcher


class Gate:
    """A batch function that records its batches and waits until it is let through."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, numbers: list[int]) -> list[int]:
        self.batches.append(numbers)
        self.entered.set()
        assert self.open.wait(10)
        if -1 in numbers:
            raise DependencyUnavailable("minus one")
        return [number * 10 for number in numbers]


@asynccontextmanager
async def batcher(gate: Gate, max_batch: int = 8, max_queue: int = 16) -> AsyncIterator[Batcher[int, int]]:
    made: Batcher[int, int] = Batcher(gate, max_batch=max_batch, max_queue=max_queue)
    try:
        yield made
    finally:
        gate.open.set()
        await made.close()


async def _entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 10)


async def test_no_batch_is_larger_than_allowed() -> None:
    gate = Gate()
    gate.open.set()
    async with batcher(gate, max_batch=3) as made:
        await asyncio.gather(*(made.submit(number) for number in range(8)))
    assert max(len(batch) for batch in gate.batches) == 3


async def test_a_full_queue_refuses_early() -> None:
    gate = Gate()
    async with batcher(gate, max_queue=1) as made:
        first = asyncio.create_task(made.submit(1))
        await _entered(gate)
        second = asyncio.create_task(made.submit(2))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await made.submit(3)
        gate.open.set()
        assert [(await task)[0] for task in (first, second)] == [10, 20]


async def test_an_error_reaches_each_caller_of_its_batch_and_nobody_else() -> None:
    gate = Gate()
    async with batcher(gate, max_batch=2) as made:
        first = asyncio.create_task(made.submit(1))
        await _entered(gate)
        bad = [asyncio.create_task(made.submit(number)) for number in (2, -1)]
        later = asyncio.create_task(made.submit(5))
        await asyncio.sleep(0)
        gate.open.set()
        for task in bad:
            with pytest.raises(DependencyUnavailable):
                await task
        assert (await first)[0] == 10
        assert (await later)[0] == 50


async def test_a_cancelled_caller_is_skipped_and_hurts_nobody() -> None:
    gate = Gate()
    async with batcher(gate) as made:
        first = asyncio.create_task(made.submit(1))
        await _entered(gate)
        gone, stays = asyncio.create_task(made.submit(2)), asyncio.create_task(made.submit(3))
        await asyncio.sleep(0)
        gone.cancel()
        first.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        assert (await stays)[0] == 30
    assert gate.batches == [[1], [3]]


async def test_a_missing_result_is_a_loud_bug() -> None:
    made: Batcher[int, int] = Batcher(lambda numbers: [], max_batch=2, max_queue=2)
    with pytest.raises(RuntimeError, match="0 results for 1 requests"):
        await made.submit(1)
    await made.close()
    with pytest.raises(DependencyUnavailable):
        await made.submit(1)

"""Do work outside the event loop: compute requests in batches, and process large requests in one thread.

Requests that arrive while one batch is computed form the next batch. There is no timer, so a lone request never waits.
A thread computes the batches; NumPy, PyTorch and the inference client release the GIL.

Large requests are processed in one thread, so that the event loop answers other requests. Python switches threads every
half millisecond (`process.py`). With one thread, many large requests delay the loop as little as one does.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from services.platform.errors import DependencyUnavailable, Overloaded
from services.platform.machine import give_back_freed

Req = TypeVar("Req")
Res = TypeVar("Res")


class Batcher(Generic[Req, Res]):
    """Gathers `submit` calls into lists of at most `max_batch`, and calls `process` with one list at a time.

    process: returns one result per request, in order. Its exception reaches every caller of the batch.
    """

    def __init__(
        self,
        process: Callable[[list[Req]], Sequence[Res]],
        *,
        max_batch: int,
        max_queue: int,
        name: str = "batcher",
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        if max_batch < 1 or max_queue < 1:
            raise ValueError(f"max_batch={max_batch}, max_queue={max_queue} allowed: both at least 1")
        self._process = process
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._name = name
        self._on_batch = on_batch
        self._queue: deque[tuple[Req, asyncio.Future[tuple[Res, float]], float]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pump: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, request: Req) -> tuple[Res, float]:
        """Return the result, and the seconds until the batch started. Requests cancelled before the start are skipped.

        Raises: Overloaded if the queue is full; any error of `process`.
        """
        if self._closed:
            raise DependencyUnavailable(f"{self._name} is shutting down")
        if len(self._queue) >= self._max_queue:
            raise Overloaded(f"{self._name} has {len(self._queue)} requests waiting, its limit", retry_after_ms=50)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Res, float]] = loop.create_future()
        self._queue.append((request, future, time.perf_counter()))
        if self._pump is None:
            self._pump = loop.create_task(self._run(loop))
        return await future

    async def close(self) -> None:
        self._closed = True
        if self._pump is not None:
            await asyncio.wait([self._pump])
        self._executor.shutdown(wait=True)

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while batch := self._take():
                requests = [request for request, _, _ in batch]
                started = time.perf_counter()
                try:
                    results = await loop.run_in_executor(self._executor, self._process, requests)
                    if len(results) != len(requests):
                        raise RuntimeError(f"{self._name}: {len(results)} results for {len(requests)} requests")
                except Exception as exc:
                    for _, future, _ in batch:
                        if not future.done():
                            future.set_exception(exc)
                else:
                    for (_, future, queued_at), result in zip(batch, results, strict=True):
                        if not future.done():
                            future.set_result((result, started - queued_at))
        finally:
            self._pump = None

    def _take(self) -> list[tuple[Req, asyncio.Future[tuple[Res, float]], float]]:
        batch: list[tuple[Req, asyncio.Future[tuple[Res, float]], float]] = []
        while self._queue and len(batch) < self._max_batch:
            entry = self._queue.popleft()
            if not entry[1].done():
                batch.append(entry)
        if batch and self._on_batch is not None:
            self._on_batch(len(batch))
        return batch


T = TypeVar("T")

# A request of this size takes some milliseconds to parse and check.
LARGE_BYTES = 64 * 1024
# Size of the current call's request.
size_bytes: ContextVar[int] = ContextVar("size_bytes", default=0)
_AT_ONCE = 64
_TRIM_AFTER_S = 1.0
_trimming: asyncio.TimerHandle | None = None
_thread = ThreadPoolExecutor(1, "large-requests")


async def in_turn(function: Callable[..., T], *args: object) -> T:
    """Call the function here, or in the worker thread if the current request is large."""
    if size_bytes.get() < LARGE_BYTES:
        return function(*args)
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)
    finally:
        _trim_soon()


def _trim_soon() -> None:
    """Return freed memory later, because a large request leaves some megabytes."""
    global _trimming
    loop = asyncio.get_running_loop()
    if _trimming is None or _trimming.cancelled() or _trimming.when() < loop.time():
        _trimming = loop.call_later(_TRIM_AFTER_S, loop.run_in_executor, _thread, give_back_freed)


async def side_by_side(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """Return results or exceptions. Tasks start in groups, so that other calls run in between."""
    tasks: list[asyncio.Task[T]] = []
    try:
        for number, one in enumerate(coroutines, 1):
            tasks.append(asyncio.create_task(one))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        for one in coroutines[len(tasks) :]:
            one.close()
        raise
    return await asyncio.gather(*tasks, return_exceptions=True)

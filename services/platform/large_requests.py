"""Process large requests in one thread, so that the event loop answers others.

Python switches threads every half millisecond (`process.py`). With one thread, many large requests delay the loop as
little as one does.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from services.platform.memory import give_back_freed

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
    """Call the function here, or in the thread if the current request is large."""
    if size_bytes.get() < LARGE_BYTES:
        return function(*args)
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)
    finally:
        _trim_soon()


def _trim_soon() -> None:
    """A large request leaves some megabytes of freed memory."""
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

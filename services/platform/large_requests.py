"""Where the work on a large request is done: in one thread, so that the event loop answers others meanwhile.

Python gives the interpreter to another thread every half millisecond (services/platform/process.py). One thread, so
that many large requests at a time delay the loop no more than one does.
"""

import asyncio
import ctypes
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

# What of this size takes some milliseconds to read and to check.
LARGE_BYTES = 64 * 1024
# Of the request that the current call answers.
size_bytes: ContextVar[int] = ContextVar("size_bytes", default=0)
_AT_ONCE = 64
_TRIM_AFTER_S = 1.0
_trimming: asyncio.TimerHandle | None = None
_thread = ThreadPoolExecutor(1, "large-requests")


async def in_turn(function: Callable[..., T], *args: object) -> T:
    """What `function` returns: called here, or in the thread if the current call's request is large."""
    if size_bytes.get() < LARGE_BYTES:
        return function(*args)
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)
    finally:
        _trim_soon()


def _trim_soon() -> None:
    """Give memory back a second after a large request, once for all until then: glibc keeps what lies between live
    pieces, which is some megabytes a request."""
    global _trimming
    loop = asyncio.get_running_loop()
    if _trimming is None or _trimming.cancelled() or _trimming.when() < loop.time():
        _trimming = loop.call_later(_TRIM_AFTER_S, loop.run_in_executor, _thread, _trim)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def side_by_side(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """What each returned or raised, as `asyncio.gather`; they begin some at a time, and others' calls in between."""
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

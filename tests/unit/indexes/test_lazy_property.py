"""Attributes computed when first asked for."""

import threading

from services.algorithms.lazy import lazy_property


class Slow:
    def __init__(self, go_on: threading.Event) -> None:
        self._go_on = go_on
        self.times = 0

    @lazy_property
    def size(self) -> int:
        self.times += 1
        assert self._go_on.wait(timeout=30)
        return 7


def test_a_value_is_computed_once() -> None:
    go_on = threading.Event()
    go_on.set()
    slow = Slow(go_on)
    assert (slow.size, slow.size, slow.times) == (7, 7, 1)


def test_one_instance_does_not_wait_for_another() -> None:
    blocked, free = Slow(threading.Event()), Slow(threading.Event())
    free._go_on.set()
    thread = threading.Thread(target=lambda: blocked.size)
    thread.start()
    while blocked.times == 0:
        pass
    assert free.size == 7  # functools.cached_property of Python 3.11 waits here for `blocked`
    blocked._go_on.set()
    thread.join()
    assert blocked.size == 7

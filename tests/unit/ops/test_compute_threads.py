"""The kernels' thread count: one for the process, another for a thread that asked for it."""

import threading
from collections.abc import Iterator

import pytest

from services.algorithms.native.threads import compute_threads, set_compute_threads, use_one_compute_thread_here


@pytest.fixture(autouse=True)
def _counts_as_before() -> Iterator[None]:
    before = compute_threads()
    yield
    set_compute_threads(before)


def test_a_count_holds_for_every_thread_but_those_that_use_one() -> None:
    set_compute_threads(5)
    found = {}

    def background() -> None:
        found["before"] = compute_threads()
        use_one_compute_thread_here()
        found["after"] = compute_threads()

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert found == {"before": 5, "after": 1}
    assert compute_threads() == 5


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="count=0 allowed: at least 1"):
        set_compute_threads(0)

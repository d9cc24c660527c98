"""The leases' thread and the folding loop share what is held; no Redis: its two scripts are stood in for."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from services.platform.stream.ports import Holding
from services.user_state.leases import RedisLeases

WAIT_S = 20.0


class Script:
    """One of the two scripts. A call waits until it is let through, then answers what `answer` says."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def __call__(self, *, keys: Any, args: Any) -> Any:
        self.asked.set()
        assert self.may_answer.wait(WAIT_S)
        return self._answer()


def leases(tick: Script, release: Script) -> RedisLeases:
    made: Any = RedisLeases("redis://127.0.0.1:1", process="test", group="m", lease_ms=60_000)
    made._tick, made._release = tick, release
    made._partitions = [0, 1]
    return made  # type: ignore[no-any-return]


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# A fair share of both partitions, held at terms 5 and 7.
BOTH = [2, 0, 5, 1, 7]


def test_what_is_held_is_told_at_once_while_redis_takes_its_time() -> None:
    tick = Script(lambda: BOTH)
    one = leases(tick, Script(lambda: 1))
    renewing = in_thread(one._renew)
    assert tick.asked.wait(WAIT_S)
    told: list[Holding] = []
    asking = in_thread(lambda: told.append(one.holding()))
    asking.join(2.0)
    assert told == [Holding({})]
    tick.may_answer.set()
    renewing.join(WAIT_S)
    assert one.holding() == Holding({0: 5, 1: 7})


@pytest.mark.parametrize("tick_begins_first", [True, False])
def test_what_is_given_back_does_not_come_back_with_an_answer_that_knew_nothing_of_it(tick_begins_first: bool) -> None:
    tick, release = Script(lambda: BOTH), Script(lambda: 1)
    tick.may_answer.set()
    one = leases(tick, release)
    one._renew()
    tick.asked.clear()
    tick.may_answer.clear()
    first, second = (
        (one._renew, lambda: one.release([1])) if tick_begins_first else (lambda: one.release([1]), one._renew)
    )
    threads = []
    for call, script in (
        (first, tick if tick_begins_first else release),
        (second, release if tick_begins_first else tick),
    ):
        threads.append(in_thread(call))
        assert script.asked.wait(WAIT_S)
    assert one.holding() == Holding({0: 5})
    # Redis answers the tick first: the lease was still ours then.
    tick.may_answer.set()
    threads[0 if tick_begins_first else 1].join(WAIT_S)
    assert one.holding() == Holding({0: 5})
    release.may_answer.set()
    threads[1 if tick_begins_first else 0].join(WAIT_S)
    assert one.holding() == Holding({0: 5})
    # From then on answers count again.
    one._renew()
    assert one.holding() == Holding({0: 5, 1: 7})

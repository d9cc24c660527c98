"""The door's limit: what it does to a queue past its capacity (in simulated time), and how callers share it."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from services.platform.errors import Overloaded
from services.platform.rpc import admission
from services.platform.rpc.admission import Admission, Slot

CORES, WORK_S = 2, 0.015
CAPACITY = CORES / WORK_S
IN_TIME_S = 0.1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Job:
    left_s: float
    came_s: float
    slot: Slot


def goodput(rate: float, *, admits_all: bool = False, warm_s: float = 2.0, seconds: float = 10.0) -> tuple[float, int]:
    """Answers a second within `IN_TIME_S` of two cores that all calls in flight share, and how many were refused."""
    random_ = random.Random(0)
    clock, jobs, good, refused = Clock(), list[Job](), 0, 0
    door = Admission("calls", smallest=10**6 if admits_all else 2, largest=10**6, clock=clock)
    if admits_all:
        door._limit.value = 10**6
    coming_s = random_.expovariate(rate)
    while clock.now < seconds:
        speed = min(1.0, CORES / len(jobs)) if jobs else 0.0
        first = min(jobs, key=lambda job: job.left_s, default=None)
        ends_s = clock.now + first.left_s / speed if first else float("inf")
        until = min(ends_s, coming_s)
        for job in jobs:
            job.left_s -= (until - clock.now) * speed
        clock.now = until
        if first is not None and until == ends_s:
            jobs.remove(first)
            first.slot.leave(worked=True)
            good += clock.now > warm_s and clock.now - first.came_s <= IN_TIME_S
            continue
        coming_s = clock.now + random_.expovariate(rate)
        try:
            jobs.append(Job(WORK_S * random_.gammavariate(4, 0.25), clock.now, door.enter("one")))
        except Overloaded:
            refused += clock.now > warm_s
            if jobs:
                jobs[0].left_s += WORK_S / 50  # a refusal is cheap, not free
    return good / (seconds - warm_s), refused


def test_past_its_capacity_a_process_goes_on_answering_in_time() -> None:
    at_capacity, _ = goodput(0.9 * CAPACITY)
    assert at_capacity > 0.75 * CAPACITY
    for times in (2, 4):
        answered, refused = goodput(times * CAPACITY)
        assert answered >= 0.8 * at_capacity
        assert refused > 0
    assert goodput(2 * CAPACITY, admits_all=True, seconds=6.0)[0] < 0.1 * at_capacity


def test_below_its_capacity_hardly_anybody_is_refused() -> None:
    answered, refused = goodput(0.6 * CAPACITY)
    assert answered >= 0.95 * 0.6 * CAPACITY
    assert refused < 0.03 * 8 * 0.6 * CAPACITY


def waves(door: Admission, times: int, number: int, seconds: float, *, clock: Clock) -> None:
    """So many calls at once, as many as the door lets in, each taking `seconds`; again and again."""
    for _ in range(times):
        slots = []
        for _ in range(number):
            try:
                slots.append(door.enter("one"))
            except Overloaded:
                break
        clock.now += seconds
        for slot in slots:
            slot.leave(worked=True)


def test_the_limit_comes_back_when_calls_are_quick_again() -> None:
    clock = Clock()
    door = Admission("calls", largest=64, clock=clock)

    waves(door, 100, 2, 0.01, clock=clock)
    waves(door, 300, 64, 1.0, clock=clock)
    assert door.limit <= 8
    waves(door, 300, 64, 0.01, clock=clock)
    assert door.limit == 64


def test_quick_answers_are_no_overload_however_quick_they_are_alone() -> None:
    clock = Clock()
    door = Admission("calls", largest=64, quick_s=0.03, clock=clock)

    waves(door, 100, 2, 0.004, clock=clock)
    waves(door, 300, 64, 0.025, clock=clock)
    assert door.limit == 64
    waves(door, 300, 64, 0.1, clock=clock)
    assert door.limit < 16


def test_the_limit_falls_while_calls_stand_back_however_quick_they_are() -> None:
    clock = Clock()
    door = Admission("calls", smallest=32, smallest_yielding=4, largest=64, clock=clock)
    waves(door, 300, 64, 0.01, clock=clock)
    assert door.limit == 64
    for yields, rounds, limit in ((True, 300, 4), (False, 12, 6), (False, 300, 64)):
        for _ in range(rounds):
            slots = [door.enter("one") for _ in range(int(door.limit))]
            for slot in slots:
                admission.current.set(slot)
                if yields:
                    admission.yield_to_others()
            clock.now += 0.01
            for slot in slots:
                slot.leave(worked=True)
        # A window is a tenth of a second, ten rounds: in it the limit grows by its root.
        assert door.limit == limit


def test_a_caller_cannot_take_what_is_left_for_others() -> None:
    door = Admission("calls", smallest=16, largest=16)
    others = [door.enter("modest"), door.enter("shy")]
    greedy = [door.enter("greedy") for _ in range(10)]
    with pytest.raises(Overloaded):
        door.enter("greedy")
    others += [door.enter("modest"), door.enter("shy"), door.enter("another")]
    for slot in [*greedy, *others]:
        slot.leave(worked=True)
    assert (door.in_flight, len(door._callers)) == (0, 0)


def test_a_callers_own_bound_holds_while_there_is_room() -> None:
    door = Admission("streams", smallest=16, largest=16, per_caller=3)
    admitted = Counter[str]()
    for caller in ("a", "a", "a", "a", "b", "b"):
        try:
            door.enter(caller)
        except Overloaded:
            continue
        admitted[caller] += 1
    assert admitted == {"a": 3, "b": 2}


def test_beyond_the_limit_so_many_begin_to_be_answered_cheaply() -> None:
    door = Admission("calls", smallest=2, largest=2, surplus=2)
    slots = [door.enter("one") for _ in range(4)]
    assert [slot.is_surplus for slot in slots] == [False, False, True, True]
    with pytest.raises(Overloaded):
        door.enter("one")
    assert door.in_flight == 2
    slots[3].leave(worked=True)
    slots[0].leave(worked=True)
    assert [door.enter("one").is_surplus for _ in range(2)] == [False, True]


def test_what_is_in_the_background_leaves_half_to_others() -> None:
    door = Admission("calls", smallest=4, largest=4)
    for _ in range(2):
        door.enter("one", is_background=True)
    with pytest.raises(Overloaded):
        door.enter("one", is_background=True)
    for _ in range(2):
        door.enter("one")


def test_who_waits_for_others_takes_no_place_and_is_not_measured() -> None:
    clock = Clock()
    door = Admission("calls", smallest=1, largest=4, clock=clock)
    door._limit.value = 1.0
    slot = door.enter("one")
    admission.current.set(slot)
    with admission.waiting():
        clock.now += 60
        second = door.enter("two")
        second.leave(worked=True)
    with pytest.raises(Overloaded):
        door.enter("two")
    slot.leave(worked=True)
    assert door._limit._taken_s == [0.0, 0.0]
    with admission.waiting():
        pass


async def test_a_call_without_room_waits_for_its_turn_in_the_order_of_coming() -> None:
    door = Admission("searches", smallest=2, largest=2, queue=3)
    begun: list[int] = []

    async def call(number: int) -> None:
        slot = await door.admit("one")
        begun.append(number)
        await asyncio.sleep(0)
        slot.leave(worked=True)

    outcomes = await asyncio.gather(*map(call, range(6)), return_exceptions=True)
    assert begun == [0, 1, 2, 3, 4]
    assert [str(outcome) for outcome in outcomes if outcome] == [
        "2 searches in flight, as many as are answered in time"
    ]
    assert (door.in_flight, door._queue) == (0, {})


async def test_a_full_queue_refuses_the_caller_with_most_in_it() -> None:
    door = Admission("searches", smallest=1, largest=1, queue=3)
    first = door.enter("another")
    waiting = {
        name: asyncio.create_task(door.admit(name[0])) for name in ("greedy 1", "greedy 2", "greedy 3", "modest")
    }
    await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
    assert [name for name, task in waiting.items() if task.done()] == ["greedy 3"]
    with pytest.raises(Overloaded):
        await waiting["greedy 3"]
    first.leave(worked=True)
    for name in ("greedy 1", "greedy 2", "modest"):
        (await waiting[name]).leave(worked=True)


@pytest.mark.parametrize("has_turn", [False, True])
async def test_who_goes_away_while_waiting_leaves_its_turn_to_the_next(has_turn: bool) -> None:
    door = Admission("searches", smallest=1, largest=1, queue=3)
    first = door.enter("one")
    gone, stays = (asyncio.create_task(door.admit("one")) for _ in range(2))
    await asyncio.sleep(0)
    if has_turn:
        first.leave(worked=True)
    gone.cancel()
    if not has_turn:
        first.leave(worked=True)
    (await stays).leave(worked=True)
    assert gone.cancelled() or gone.cancelling()
    assert (door.in_flight, door._queue) == (0, {})


async def test_a_turn_that_does_not_come_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_PATIENCE_S", 0.001)
    door = Admission("searches", smallest=1, largest=1, queue=3)
    door.enter("one")
    with pytest.raises(Overloaded, match="1 searches in flight"):
        await door.admit("one")

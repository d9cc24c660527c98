"""The loop around the stream: what it waits for, what it sets aside, how it starts again."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from prometheus_client import CollectorRegistry
from streams import NOW_MS, VOCABULARY, append, forget, forgets_on, interaction

from services.encoder.consumer import Consumer, ConsumerLimits
from services.encoder.domain import EncodeJob
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.metrics import EncoderMetrics
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import DependencyUnavailable
from services.user_state.forgetting import Forgotten

LIMITS = ConsumerLimits(poll_ms=2, backoff_s=0.002, max_backoff_s=0.01, check_every_s=0.0, commit_every_s=0.0)


class Model(HashEncoder):
    """Raises what it is told to, for jobs that hold item 13."""

    trouble: Exception | None = None

    def encode(self, jobs: Sequence[EncodeJob]) -> Any:
        if self.trouble is not None and any(13 in job.item_index for job in jobs):
            raise self.trouble
        return super().encode(jobs)


class Scene:
    """A consumer on memory ports."""

    def __init__(self, limits: ConsumerLimits = LIMITS, store: MemoryStore | None = None) -> None:
        self.stream, self.outbox, self.model = MemoryStream(1), MemoryOutbox(), Model()
        self.store = store or MemoryStore()
        self.forget_log, forgotten = MemoryForgetLog(), Forgotten()
        self.forgets = forgets_on(self.forget_log, self.store, self.outbox, forgotten)
        self.ready = threading.Event()
        self.consumer = Consumer(
            stream=self.stream,
            handler=ApplyRecords(
                store=self.store,
                outbox=self.outbox,
                encoder=self.model,
                vocabulary=VOCABULARY,
                pseudonym_key=b"key",
                forgotten=forgotten,
                clock_ms=lambda: NOW_MS,
            ),
            forgets=self.forgets,
            metrics=EncoderMetrics(CollectorRegistry()),
            limits=limits,
            on_ready=self.ready.set,
        )

    def counts(self) -> dict[str, int]:
        progress = self.store.progress([0], self.store.epoch() or "")[0]
        return {name: count for name, count in progress.counts.items() if count}

    def items(self) -> list[str]:
        epoch = self.store.epoch() or ""
        return [event.item_id for event in self.store.load_users(["user-0"], epoch)["user-0"].events]

    @contextmanager
    def running(self) -> Iterator[None]:
        self.consumer.start()
        try:
            assert self.ready.wait(20)
            yield
        finally:
            self.consumer.stop()


def eventually(claim: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(4_000):
        if claim():
            return
        waiting.wait(0.005)
    pytest.fail("did not come true within 20 s")


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_progress_is_committed_behind_the_watermark(scene: Scene) -> None:
    for number in range(5):
        append(scene.stream, interaction(0, number, event_id=f"e{number}"))
    with scene.running():
        eventually(lambda: scene.stream.commits == {0: 5})
    assert scene.counts() == {"applied": 5}


def test_an_absent_model_holds_the_stream_and_loses_nothing(scene: Scene) -> None:
    scene.model.trouble = DependencyUnavailable("away")
    with scene.running():
        append(scene.stream, interaction(0, 13))
        append(scene.stream, interaction(0, 14))
        eventually(lambda: len(scene.model.calls) == 0 and not scene.counts())
        scene.model.trouble = None
        eventually(lambda: scene.counts() == {"applied": 2})


def test_a_record_that_trips_a_bug_is_set_aside_and_the_stream_goes_on(scene: Scene) -> None:
    scene.model.trouble = RuntimeError("a bug")
    with scene.running():
        for item in (1, 13, 2):
            append(scene.stream, interaction(0, item))
        # The history still holds nothing of item 13, so what follows is not tripped.
        eventually(lambda: scene.counts() == {"applied": 2, "dead_lettered": 1})
    assert scene.items() == ["item-1", "item-2"]
    (letter,) = scene.outbox.dead_letters
    assert letter.reason == "internal error: RuntimeError"


def test_a_wiped_store_is_noticed_while_no_event_comes_and_filled_again(scene: Scene) -> None:
    with scene.running():
        append(scene.stream, interaction(0, 1))
        eventually(lambda: scene.counts() == {"applied": 1})
        scene.store.wipe()
        eventually(lambda: scene.counts() == {"applied": 1} and scene.items() == ["item-1"])


def test_an_import_holds_the_stream_until_it_is_done(scene: Scene) -> None:
    scene.store.pause_consumer(60)
    with scene.running():
        append(scene.stream, interaction(0, 1))
        threading.Event().wait(0.1)
        assert scene.counts() == {}
        scene.store.release()
        eventually(lambda: scene.counts() == {"applied": 1})


def test_forgets_are_applied_while_it_runs_and_before_what_comes_after(scene: Scene) -> None:
    with scene.running():
        for item in (1, 2):
            append(scene.stream, interaction(0, item))
        eventually(lambda: scene.items() == ["item-1", "item-2"])
        scene.forget_log.append(forget(0, p0=1))
        eventually(lambda: scene.items() == [])
        append(scene.stream, interaction(0, 3))
        eventually(lambda: scene.items() == ["item-3"])


def test_a_store_that_is_ahead_of_the_topic_stops_the_stream_until_it_is_emptied(scene: Scene) -> None:
    with scene.running():
        for item in range(3):
            append(scene.stream, interaction(0, item))
        eventually(lambda: scene.counts() == {"applied": 3})
    scene.stream.log[0].clear()
    fresh = Scene(store=scene.store)
    fresh.stream.log = scene.stream.log
    append(fresh.stream, interaction(0, 9))
    fresh.consumer.start()
    try:
        assert not fresh.ready.wait(0.1)
        fresh.store.wipe()
        eventually(lambda: fresh.items() == ["item-9"])
    finally:
        fresh.consumer.stop()


def test_polls_grow_while_they_come_back_full() -> None:
    scene = Scene(ConsumerLimits(poll_ms=1, min_records=4, max_records=16))
    asked: list[int] = []
    poll = scene.stream.poll

    def watch(timeout_ms: int, max_records: int) -> Any:
        asked.append(max_records)
        return poll(timeout_ms, max_records)

    scene.stream.poll = watch  # type: ignore[method-assign]
    for number in range(40):
        append(scene.stream, interaction(0, number % 5))
    while scene.consumer.step():
        pass
    assert asked == [4, 8, 16, 16, 4]

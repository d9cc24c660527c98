"""The consumer says when the stream no longer moves, so that readers are told that stored states grow stale."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from prometheus_client import CollectorRegistry
from streams import NOW_MS, VOCABULARY, append, forgets_on, interaction

from services.encoder.consumer import Consumer, ConsumerLimits
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.metrics import EncoderMetrics
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import DependencyUnavailable
from services.platform.stream.follower import TurnClock
from services.user_state.forgetting import Forgotten


class Away(HashEncoder):
    """An inference server that comes and goes."""

    away = False

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked = threading.Event(), threading.Event()
        self.answers.set()

    def encode(self, jobs: Sequence[Any]) -> Sequence[Any]:
        self.asked.set()
        assert self.answers.wait(20)
        if self.away:
            raise DependencyUnavailable("the inference server is away")
        return super().encode(jobs)


class Scene:
    """A consumer in its thread over in-memory ports, what it said, and a clock that the test moves."""

    def __init__(self) -> None:
        self.stream, self.store, self.encoder = MemoryStream(), MemoryStore(), Away()
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        self._said: list[str] = []
        self._heard = threading.Condition()
        outbox = MemoryOutbox()
        self.consumer = Consumer(
            stream=self.stream,
            handler=ApplyRecords(
                store=self.store,
                outbox=outbox,
                encoder=self.encoder,
                vocabulary=VOCABULARY,
                pseudonym_key=b"key",
                clock_ms=lambda: NOW_MS,
            ),
            forgets=forgets_on(MemoryForgetLog(), self.store, outbox, Forgotten()),
            metrics=EncoderMetrics(self.registry),
            limits=ConsumerLimits(poll_ms=5, backoff_s=0.005, max_backoff_s=0.01, lag_every_s=0.0),
            on_ready=lambda: self._say("ready"),
            on_stall=lambda: self._say("stalled"),
            turns=TurnClock(stuck_s=60.0, clock=lambda: self.now_s),
        )

    def _say(self, word: str) -> None:
        with self._heard:
            self._said.append(word)
            self._heard.notify_all()

    def wait_for(self, words: list[str]) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: self._said == words, timeout=20), self._said

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"freshet_encoder_{name}", labels)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def running() -> Iterator[Scene]:
    scene = Scene()
    scene.consumer.start()
    try:
        scene.wait_for(["ready"])
        yield scene
    finally:
        scene.encoder.away = False
        scene.encoder.answers.set()
        scene.consumer.stop()


def test_a_stalled_stream_is_said_and_its_recovery_too() -> None:
    with running() as scene:
        scene.encoder.away = True
        append(scene.stream, interaction())
        scene.wait_for(["ready", "stalled"])
        scene.encoder.away = False
        scene.wait_for(["ready", "stalled", "ready"])
    assert len(scene.store.load_users(["user-0"], scene.store.epoch() or "")["user-0"].events) == 1


def test_lag_and_age_grow_while_the_stream_stalls_and_fall_when_it_moves() -> None:
    with running() as scene:
        scene.encoder.away = True
        append(scene.stream, interaction())
        scene.wait_for(["ready", "stalled"])
        for number in range(1, 4):
            append(scene.stream, interaction(event_id=f"event-{number}"))
        wait_until(lambda: scene.sample("lag_records", partition="0") == 4)
        scene.now_s += 30
        assert (scene.sample("turn_age_seconds") or 0) >= 30
        # Its turns fail, but they end.
        wait_until(lambda: not scene.consumer.turns.is_stuck)
        scene.encoder.away = False
        wait_until(lambda: scene.sample("lag_records", partition="0") == 0)
        wait_until(lambda: scene.sample("turn_age_seconds") == 0)


def test_a_turn_that_hangs_is_noticed_though_nothing_is_raised() -> None:
    with running() as scene:
        scene.encoder.answers.clear()
        append(scene.stream, interaction())
        assert scene.encoder.asked.wait(20)
        scene.now_s += 61
        assert scene.consumer.turns.is_stuck
        assert (scene.sample("turn_age_seconds") or 0) >= 61
        scene.encoder.answers.set()
        wait_until(lambda: not scene.consumer.turns.is_stuck)

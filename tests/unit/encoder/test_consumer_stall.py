"""The consumer says when the stream no longer moves, so that readers are told that stored states grow stale."""

import threading
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from streams import NOW_MS, VOCABULARY, append, forgets_on, interaction

from services.common.errors import DependencyUnavailable
from services.encoder.adapters.in_memory import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStore, MemoryStream
from services.encoder.consumer import Consumer, ConsumerLimits
from services.encoder.forgetting import Forgotten
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.metrics import EncoderMetrics


class Away(HashEncoder):
    """An inference server that comes and goes."""

    away = False

    def encode(self, jobs: Sequence[Any]) -> Sequence[Any]:
        if self.away:
            raise DependencyUnavailable("the inference server is away")
        return super().encode(jobs)


def test_a_stalled_stream_is_said_and_its_recovery_too() -> None:
    stream, store, outbox, encoder = MemoryStream(), MemoryStore(), MemoryOutbox(), Away()
    said: list[str] = []
    heard = threading.Condition()

    def say(word: str) -> None:
        with heard:
            said.append(word)
            heard.notify_all()

    def wait_for(words: list[str]) -> None:
        with heard:
            assert heard.wait_for(lambda: said == words, timeout=20), said

    consumer = Consumer(
        stream=stream,
        outbox=outbox,
        encoder=encoder,
        handler=ApplyRecords(
            store=store,
            outbox=outbox,
            encoder=encoder,
            vocabulary=VOCABULARY,
            pseudonym_key=b"key",
            clock_ms=lambda: NOW_MS,
        ),
        forgets=forgets_on(MemoryForgetLog(), store, outbox, Forgotten()),
        metrics=EncoderMetrics(CollectorRegistry()),
        limits=ConsumerLimits(poll_ms=5, backoff_s=0.005, max_backoff_s=0.01),
        on_ready=lambda: say("ready"),
        on_stall=lambda: say("stalled"),
    )
    consumer.start()
    try:
        wait_for(["ready"])
        encoder.away = True
        append(stream, interaction())
        wait_for(["ready", "stalled"])
        encoder.away = False
        wait_for(["ready", "stalled", "ready"])
    finally:
        consumer.stop()
    assert len(store.load_users(["user-0"], store.epoch() or "")["user-0"].events) == 1

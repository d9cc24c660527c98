"""Where keys go, and what an absent broker costs: a prompt error, never a stalled event loop."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from services.contracts.topics import ensure_topics
from services.platform.errors import DependencyUnavailable, InvalidRequest, Overloaded
from services.platform.stream import event_producer
from services.platform.stream.event_producer import EventProducer
from services.platform.stream.kafka import BulkProducer, Record, build_consumer, partition_for


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{probe.getsockname()[1]}"


def test_keys_go_where_kafkas_own_clients_send_them() -> None:
    # murmur2 values of Kafka's UtilsTest.java.
    hashes = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    for key, value in hashes.items():
        assert partition_for(key, 8) == (value & 0x7FFFFFFF) % 8


async def test_an_absent_broker_is_said_soon_while_the_loop_goes_on(nobody: str) -> None:
    producer = EventProducer(nobody)
    turns, stop = 0, asyncio.Event()

    async def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(DependencyUnavailable):
            await producer.send("interactions", b"ann", b"value", timeout_s=1.0)
    seconds = time.monotonic() - started
    stop.set()
    await counting
    await producer.close(timeout_s=5.0)
    assert seconds < 10.0  # three times 1 s, on a machine however slow
    assert turns >= 4 * seconds
    with pytest.raises(DependencyUnavailable, match="closed"):
        await producer.send("interactions", b"ann", b"value")


async def test_more_sends_than_may_wait_are_refused(nobody: str) -> None:
    producer = EventProducer(nobody, max_queued=2)
    waiting = [asyncio.create_task(producer.send("interactions", b"ann", b"v", timeout_s=0.5)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="limit is 2"):
        await producer.send("interactions", b"ann", b"v")
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, DependencyUnavailable) for outcome in outcomes)
    await producer.close(timeout_s=5.0)


async def test_a_send_that_timed_out_keeps_its_slot_until_its_record_has_left_the_queue() -> None:
    # A broker that takes connections and says nothing: the producer's thread is busy connecting meanwhile.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        producer = EventProducer(f"127.0.0.1:{silent.getsockname()[1]}", max_queued=2)
        for _ in range(2):
            with pytest.raises(DependencyUnavailable, match="did not acknowledge"):
                await producer.send("interactions", b"ann", b"v", timeout_s=0.01)
        with pytest.raises(Overloaded, match="limit is 2"):
            await producer.send("interactions", b"ann", b"v", timeout_s=0.01)
        silent.close()
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline
            try:
                await producer.send("interactions", b"ann", b"v", timeout_s=5.0)
            except Overloaded:
                await asyncio.sleep(0.01)
            except DependencyUnavailable:
                break
        assert producer._outstanding == 0
        await producer.close(timeout_s=5.0)


class _AtOnce:
    """In the place of kafka-python's producer: each record is written when it is handed over."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self._metadata = None

    def send(self, topic: str, value: bytes, key: bytes, headers: object) -> "_AtOnce":
        self.sent.append(value)
        return self

    def add_callback(self, acknowledged: Callable[..., None], pending: object) -> None:
        acknowledged(pending, SimpleNamespace(partition=0, offset=len(self.sent) - 1))

    def add_errback(self, *_: object) -> None:
        pass

    def close(self, timeout: float) -> None:
        pass


@pytest.mark.parametrize("num_writers", [1, 8])
async def test_who_waits_for_each_answer_waits_for_no_company(
    monkeypatch: pytest.MonkeyPatch, num_writers: int
) -> None:
    broker = _AtOnce()
    monkeypatch.setattr(event_producer, "build_producer", lambda *_, **__: broker)
    monkeypatch.setattr(event_producer, "_HAND_OVER_S", 3_600.0)
    producer = EventProducer("nowhere")

    async def write(writer: int) -> None:
        for turn in range(3):
            await producer.send("interactions", b"ann", b"%d of %d" % (turn, writer), timeout_s=10.0)

    await asyncio.gather(*map(write, range(num_writers)))
    # All of a turn go together: nobody overtakes the others.
    assert broker.sent == [b"%d of %d" % (turn, writer) for turn in range(3) for writer in range(num_writers)]
    await producer.close()


async def test_a_record_beyond_the_limit_is_refused_before_it_is_sent(nobody: str) -> None:
    producer = EventProducer(nobody)
    with pytest.raises(InvalidRequest, match="at most"):
        await producer.send("interactions", b"ann", bytes(1_000_001))
    await producer.close()


def test_every_blocking_client_says_that_the_broker_is_absent(nobody: str) -> None:
    with pytest.raises(DependencyUnavailable, match=nobody):
        BulkProducer(nobody).send_many([Record("interactions", b"ann", b"v")])
    with pytest.raises(DependencyUnavailable, match=nobody):
        build_consumer(nobody, "interactions", group_id="test")
    with pytest.raises(DependencyUnavailable, match=nobody):
        ensure_topics(nobody, timeout_ms=1_500)


def test_a_broker_that_is_paused_is_absent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the client makes of a broker that accepts a connection and then says nothing, found by chaos.
    def of_old(**options: object) -> None:
        raise AssertionError("Transactional/Idempotent producer requires >= Kafka 0.11 Brokers")

    monkeypatch.setattr("services.platform.stream.kafka.KafkaProducer", of_old)
    with pytest.raises(DependencyUnavailable, match="cannot be reached"):
        BulkProducer("127.0.0.1:1").send_many([Record("interactions", b"ann", b"v")])

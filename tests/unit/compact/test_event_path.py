"""The files that one event passes through are those that CONTRIBUTING.md lists.

Gateway and encoder are the real ones, the gateway behind a gRPC server on loopback. Kafka's clients and Redis are
replaced below `services/`: topics are lists, Redis is the one in memory of `tests/chaos`. A file counts when a function
of it is called between the request's first byte and the user's state in Redis; what a turn looks at once a second, and
the first turns, which connect, are left out.
"""

import asyncio
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.called_files import Calls, listed, noted_calls
from fakes.encoder import HashEncoder
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc
from kafka import TopicPartition
from prometheus_client import CollectorRegistry

from services.contracts.topic_reader import TopicReader
from services.encoder import bootstrap
from services.encoder.config import EncoderSettings
from services.encoder.domain import Vocabulary
from services.encoder.metrics import EncoderMetrics
from services.encoder.models import Model
from services.gateway.adapters.topics import interaction_log
from services.gateway.config import GatewaySettings
from services.gateway.edge.door import admissions
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import RpcServer
from services.platform.stream import event_producer, kafka
from services.platform.stream.event_producer import EventProducer
from services.platform.stream.kafka import partition_for
from services.user_state.writer import StateWriter
from tests.chaos.memory_redis import Client, MemoryServer
from tests.unit.gateway.gateway_scene import Scene

NUM_PARTITIONS = 8
WORDS = Vocabulary(model_version="m1", item_index={"c": 0, "d": 1, "e": 2}, user_index={}, max_history=16)


class Broker:
    """Topics as lists, and kafka-python's clients of them as far as one event needs."""

    def __init__(self) -> None:
        self.logs: dict[TopicPartition, list[Any]] = defaultdict(list)

    def partitions_of(self, topic: str) -> set[int]:
        return set(range(NUM_PARTITIONS if topic in ("interactions", "histories", "attributions") else 1))

    def partitions_for(self, topic: str) -> set[int]:
        return self.partitions_of(topic)

    def send(self, topic: str, value: bytes, key: bytes, headers: Any, partition: int | None = None, **_: Any) -> Any:
        if partition is None:
            partition = partition_for(key or b"", len(self.partitions_of(topic)))
        log, now_ms = self.logs[TopicPartition(topic, partition)], int(1000 * time.time())
        log.append(SimpleNamespace(offset=len(log), timestamp=now_ms, key=key, value=value, headers=headers))
        written = SimpleNamespace(partition=partition, offset=len(log) - 1)
        return SimpleNamespace(
            get=lambda timeout: written,
            add_callback=lambda acknowledged, pending: acknowledged(pending, written),
            add_errback=lambda *_: None,
        )

    def close(self, timeout: float = 0) -> None:
        """Nothing is held."""

    def consumer(self, _: Any, *topics: str, **__: Any) -> "Consumer":
        return Consumer(self, topics)


class Consumer:
    def __init__(self, broker: Broker, topics: tuple[str, ...]) -> None:
        self._logs, self.partitions_for_topic = broker.logs, broker.partitions_of
        self.at = {TopicPartition(topic, p): 0 for topic in topics for p in broker.partitions_of(topic)}

    def assignment(self) -> set[TopicPartition]:
        return set(self.at)

    def assign(self, tps: list[TopicPartition]) -> None:
        self.at = {tp: self.at.get(tp, 0) for tp in tps}

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.at[tp] = offset

    def position(self, tp: TopicPartition, timeout_ms: int) -> int:
        return self.at[tp]

    def end_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: len(self._logs[tp]) for tp in tps}

    def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    def highwater(self, tp: TopicPartition) -> int:
        return len(self._logs[tp])

    def committed(self, tp: TopicPartition, timeout_ms: int) -> int:
        return 0

    def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        found = {tp: self._logs[tp][at : at + max_records] for tp, at in self.at.items()}
        self.at.update({tp: self.at[tp] + len(records) for tp, records in found.items()})
        return {tp: records for tp, records in found.items() if records}

    def __getattr__(self, name: str) -> Any:
        """Pauses and commits: nothing here depends on them."""
        return lambda *_, **__: ()


class Redis(Client):
    def register_script(self, script: str) -> Any:
        """Leases: all partitions, of the first term."""
        return lambda keys, args: [NUM_PARTITIONS, *(n for p in range(NUM_PARTITIONS) for n in (p, 1))]


async def record(calls: Calls, stub: Any, consumer: Any) -> None:
    request = gateway_pb2.RecordInteractionsRequest(
        interactions=[events_pb2.Interaction(user_id="ann", item_id=item, type="click") for item in "c"]
    )
    for _ in range(3):
        await stub.RecordInteractions(request)
        await asyncio.to_thread(consumer.step)
        await asyncio.to_thread(consumer.step)
    for due in (consumer._commit_due, consumer._check_due, consumer._lag_due):
        due._at = float("inf")
    with calls.watch():
        await stub.RecordInteractions(request)
        await asyncio.to_thread(consumer.step)


async def test_one_event_passes_through_the_files_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, server = Broker(), MemoryServer()
    monkeypatch.setitem(TopicReader.__init__.__kwdefaults__, "connect", broker.consumer)
    monkeypatch.setattr("services.contracts.topic_reader.ensure_topics", lambda *_, **__: [])
    for module in (kafka, event_producer):
        monkeypatch.setattr(module, "build_producer", lambda *_, **__: broker)
    for name in ("writer", "leases"):
        monkeypatch.setattr(f"services.user_state.{name}.open_client", lambda *_, **__: Redis(server))
    store, producer = StateWriter("redis://nowhere"), EventProducer("nowhere")
    scene = Scene(interactions=interaction_log(producer))  # type: ignore[arg-type]

    def add(of: Any) -> list[str]:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(scene.servicer, of)
        return []

    with noted_calls() as calls:
        stream = bootstrap.make_stream(
            EncoderSettings(port=0, metrics_port=0),
            store,
            Model(WORDS, HashEncoder()),
            EncoderMetrics(CollectorRegistry()),
        )
        settings = GatewaySettings(port=0, metrics_port=0, drain_seconds=0)
        rpc = RpcServer(
            process="gateway_test",
            settings=settings,
            add_services=add,
            registry=CollectorRegistry(),
            admissions=admissions(),
        )
        await rpc.start()
        async with rpc_client.channel(f"127.0.0.1:{rpc.port}") as channel:
            await record(calls, gateway_pb2_grpc.GatewayServiceStub(channel), stream.consumer)
        await rpc.drain()
        await producer.close()
        stream.consumer.finish()
    epoch = stream.records.progress.epoch
    assert [event.item_id for event in store.load_users(["ann"], epoch)["ann"].events] == ["c"] * 4
    library = {path for path in calls.found if path.startswith("algorithms/")}
    assert sorted(calls.found.keys() - library) == sorted(listed("one event", 2))

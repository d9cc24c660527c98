"""The system as a stranger meets it: a gRPC channel, a plain kafka-python producer, and looks at what is stored.

Everything is asked of a running stack by address. Waiting is polling with a deadline; nothing sleeps for a fixed time.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import grpc
import numpy as np
from freshet.v1 import common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.interactions import INTERACTIONS
from services.platform.stream.kafka import partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.stack import Stack
from services.user_state.layout import home_of, seen_key, state_key
from services.user_state.reader import StateReader
from services.user_state.values import Popularity
from services.user_state.writer import StateWriter

JSON = [("content-type", b"application/json")]
WITHIN_S = 30.0

T = TypeVar("T")
Place = tuple[int, int]
Headers = Sequence[tuple[str, bytes | None]]


def until(what: str, look: Callable[[], T | None], within_s: float = WITHIN_S) -> T:
    """What `look` returns as soon as that is not None or False; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(0.02)
    return found


def event(user: str, item: str, **fields: Any) -> events_pb2.Interaction:
    """An interaction of now; `at`: Unix seconds of another time."""
    at = fields.pop("at", time.time())
    message = events_pb2.Interaction(user_id=user, item_id=item, **fields)
    message.event_time.FromMilliseconds(round(at * 1000))
    return message


def same_state(one: bytes | None, other: bytes | None) -> bool:
    """Whether two stored states are equal up to the last bit of each half-precision value.

    The encoder sums in another order when it recomputes a state than when it extends it event by event (decision 071).
    """
    bits = [np.frombuffer(state or b"", "<i2").astype(np.int32) for state in (one, other)]
    return bits[0].size == bits[1].size > 0 and int(np.abs(bits[0] - bits[1]).max()) <= 1


class Outside:
    """A client, a producer and an onlooker of one stack."""

    def __init__(self, stack: Stack) -> None:
        self.bundle: Bundle = load_bundle(stack.bundle)
        self.items: list[str] = list(self.bundle.item_ids)
        self._bootstrap = stack.kafka_bootstrap
        self.address = stack.address("gateway")
        self._channel = grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)])
        self.gateway = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        self.producer = KafkaProducer(bootstrap_servers=stack.kafka_bootstrap, acks="all", max_request_size=1 << 20)
        self._redis_url = stack.redis_url
        self.store = StateWriter(self._redis_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self.producer.close(timeout=5)
        self.store.close()

    @staticmethod
    def new_user() -> str:
        return f"outside-{uuid.uuid4().hex[:12]}"

    def put(self, key: str | bytes | None, value: Any, headers: Headers = (), partition: int | None = None) -> Place:
        """Write one record onto `interactions`: Protobuf from a message, JSON from a dict, bytes as they are."""
        if isinstance(value, dict):
            value, headers = json.dumps(value).encode(), headers or JSON
        elif isinstance(value, events_pb2.Interaction):
            value = value.SerializeToString()
        key = key.encode() if isinstance(key, str) else key
        metadata = self.producer.send(INTERACTIONS, value, key, list(headers), partition).get(timeout=10)
        return metadata.partition, metadata.offset

    def record(self, *interactions: events_pb2.Interaction) -> list[gateway_pb2.InteractionReceipt]:
        """Write through the gateway."""
        request = gateway_pb2.RecordInteractionsRequest(interactions=interactions)
        return list(self.gateway.RecordInteractions(request, timeout=10).receipts)

    def recommend(self, user: str = "", k: int = 10, **fields: Any) -> gateway_pb2.RecommendResponse:
        request = gateway_pb2.RecommendRequest(user_id=user, k=k, **fields)
        return self.gateway.Recommend(request, timeout=10)

    def ids(self, user: str = "", k: int = 10, **fields: Any) -> list[str]:
        """The ids of an answer."""
        return [item.item_id for item in self.recommend(user, k, **fields).items]

    def unmoved(
        self,
        ask: Callable[[], gateway_pb2.RecommendResponse],
        then: Callable[[gateway_pb2.RecommendResponse], T],
    ) -> tuple[gateway_pb2.RecommendResponse, T]:
        """The answer of `ask`, and what `then` makes of it, while neither the index nor what is popular changes.

        Events change both a moment later, other tests' too. `ask` is called again after `then`: if the answers differ,
        both start over.
        """

        def look() -> tuple[gateway_pb2.RecommendResponse, T] | None:
            answer = ask()
            found, again = then(answer), ask()
            is_same = answer.index_version == again.index_version and answer.items == again.items
            return (answer, found) if is_same else None

        return until("the same answer twice", look)

    def live(self, user: str, *items: str, start: float | None = None) -> common_pb2.FreshnessToken:
        """Record these items one minute apart; the last one's token, applied."""
        start = time.time() - 60 * len(items) if start is None else start
        receipts = self.record(*(event(user, item, at=start + 60 * place) for place, item in enumerate(items)))
        token = receipts[-1].token
        self.applied((token.partition, token.offset))
        return token

    def applied(self, *places: Place) -> None:
        """Wait until all these positions are applied."""
        for partition, offset in places:
            until(f"{partition}:{offset} applied", lambda p=partition, o=offset: self._watermark(p) >= o)

    def counts(self, *partitions: int) -> dict[str, int]:
        """What became of the records of these partitions (default: of all) so far; no zeros."""
        epoch = self.store.epoch() or ""
        total: dict[str, int] = {}
        for progress in self.store.progress(partitions or range(NUM_PARTITIONS), epoch).values():
            for name, count in progress.counts.items():
                if count:
                    total[name] = total.get(name, 0) + count
        return total

    def history(self, user: str) -> list[str]:
        """Item ids of the stored history, oldest first."""
        epoch = self.store.epoch() or ""
        return [stored.item_id for stored in self.store.load_users([user], epoch)[user].events]

    def stored_components(self, user: str) -> bytes | None:
        """The stored query state's bytes."""
        home = home_of(user, self.store.epoch() or "")
        return self.store._redis.hget(state_key(home, self.bundle.model_version), "components")

    def seen(self, user: str) -> set[str]:
        return {
            item.decode() for item in self.store._redis.zrange(seen_key(home_of(user, self.store.epoch() or "")), 0, -1)
        }

    def popular(self, k: int) -> list[str]:
        """What a stranger should be answered with: counts as they are stored, and training's."""

        async def read() -> list[Popularity]:
            reader = StateReader(self._redis_url)
            try:
                return await reader.read_popular()
            finally:
                await reader.close()

        now_ms = time.time_ns() // 1_000_000
        counts = {item: 0.03 * int(count) for item, count in zip(self.items, self.bundle.counts, strict=True)}
        for partition in asyncio.run(read()):
            for item, level in partition.levels.items():
                if item in counts:
                    counts[item] += 2.0 ** (level - now_ms / (1000 * partition.half_life_s))
        order = sorted(range(len(self.items)), key=lambda row: (-self.bundle.counts[row], self.items[row]))
        return sorted((self.items[row] for row in order), key=lambda item: -counts[item])[:k]

    def dead_letter(self, place: Place) -> Any:
        """The record on the dead-letter topic that came from this position."""
        origin = (str(place[0]).encode(), str(place[1]).encode())
        for letter in self._read_all(INTERACTIONS + SUFFIX):
            headers = dict(letter.headers)
            if (headers["freshet-source-partition"], headers["freshet-source-offset"]) == origin:
                return letter
        raise AssertionError(f"no dead letter of {place}")

    def written(self) -> int:
        """How many records `interactions` holds."""
        consumer = KafkaConsumer(bootstrap_servers=self._bootstrap, enable_auto_commit=False)
        try:
            return sum(consumer.end_offsets([TopicPartition(INTERACTIONS, p) for p in range(NUM_PARTITIONS)]).values())
        finally:
            consumer.close()

    def partition_of(self, user: str) -> int:
        return partition_for(user.encode(), NUM_PARTITIONS)

    def _watermark(self, partition: int) -> int:
        return self.store.progress([partition], self.store.epoch() or "")[partition].watermark

    def _read_all(self, topic: str) -> Iterable[Any]:
        consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
        )
        try:
            tp = TopicPartition(topic, 0)
            consumer.assign([tp])
            end = consumer.end_offsets([tp])[tp]
            while consumer.position(tp) < end:
                for records in consumer.poll(timeout_ms=500).values():
                    yield from records
        finally:
            consumer.close()

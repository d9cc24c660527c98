"""How fast one refresher folds on one core: real records' bytes in, index deltas' bytes out, without a broker between.

The question: does a core sustain 5,000 attributions a second, decoding, folding, publishing every 200 ms and keeping
checkpoints, for a model of this shape? Kafka's own cost comes on top and is other processes'.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from freshet.v1 import common_pb2, events_pb2
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.pefa.policy import SharePolicy
from services.contracts.topics import index_deltas
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.platform.leases import Holding
from services.platform.stream.record import DeadLetter, SourceRecord
from services.refresher.adapters.decoding import QueryShape, decode_attribution
from services.refresher.bootstrap import fold_rules
from services.refresher.config import RefresherSettings
from services.refresher.consumer import Refresher, RefresherLimits
from services.refresher.domain.records import Entry, Interaction, Listing
from services.refresher.handlers.describe import PartitionRegistry
from services.refresher.handlers.publish import Publisher
from services.refresher.metrics import RefresherMetrics
from services.refresher.ports import Kept, Polled

_USERS = 5_000
_POLL = 2_048
_START_MS = 1_700_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldRate:
    """What was measured; bytes_in_all and checkpoint_bytes at the end of it."""

    model_version: str
    records: int
    seconds: float
    cpu_seconds: float
    records_per_second: float
    records_per_cpu_second: float
    deltas: int
    delta_bytes: int
    bytes_per_item: float
    bytes_per_remembered: float
    bytes_in_all: int
    checkpoint_bytes: int


class _BytesLog:
    """A partition of encoded attributions, decoded when polled, as Kafka's adapter does; no items are listed."""

    def __init__(self, shape: QueryShape) -> None:
        self.values: Sequence[bytes] = ()
        self._shape, self._at = shape, 0

    def partitions(self) -> Sequence[int]:
        return [0]

    def listings(self) -> Sequence[Listing]:
        return []

    def assign(self, offsets: Mapping[int, int]) -> None:
        self._at = offsets.get(0, 0)

    def poll(self, timeout_ms: int) -> Polled:
        batch = [self._decoded(offset) for offset in range(self._at, min(self._at + _POLL, len(self.values)))]
        self._at += len(batch)
        return Polled(entries={0: batch} if batch else {})

    def bounds(self, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        return dict.fromkeys(partitions, (0, len(self.values)))

    def known_ends(self) -> Mapping[int, int]:
        return {0: len(self.values)}

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        found = ((offset, self._decoded(offset)) for offset in offsets)
        return {offset: entry for offset, entry in found if isinstance(entry, Interaction)}

    def close(self) -> None:
        """Nothing is held."""

    def _decoded(self, offset: int) -> Entry:
        return decode_attribution(SourceRecord(ATTRIBUTIONS, 0, offset, 0, None, self.values[offset]), self._shape)


class _OneHolder:
    """Leases where nobody else takes part."""

    def start(self, partitions: Sequence[int]) -> None:
        """Nobody is asked."""

    def holding(self) -> Holding:
        return Holding({0: 1})

    def release(self, partitions: Collection[int]) -> None:
        """Nobody waits for them."""

    def close(self) -> None:
        """Nothing is held."""


class _Counting:
    """Encodes deltas and counts their bytes."""

    def __init__(self) -> None:
        self.deltas = self.nbytes = 0

    def publish(
        self,
        deltas: Sequence[index_deltas.IndexDelta],
        unreadable: Sequence[DeadLetter],
        tombstones: Sequence[bytes] = (),
    ) -> None:
        for delta in deltas:
            self.nbytes += len(delta.key) + len(index_deltas.encode(delta))
        self.deltas += len(deltas)

    def close(self) -> None:
        """Nothing is held."""


class _Parts:
    """Keeps the newest parts of the one partition."""

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}

    def save(self, partition: int, values: Mapping[str, Any], parts: Mapping[str, bytes | None]) -> None:
        self.parts = {name: self.parts[name] if data is None else data for name, data in parts.items()}

    def load(self, partition: int) -> Iterator[Kept]:
        return iter(())

    def close(self) -> None:
        """Nothing is held."""


def measure(bundle: Bundle, records: int, *, seed: int = 0) -> FoldRate:
    """Fold `records` random attributions on the bundle's own items (popular ones more often)."""
    values = [value for _, value in attributions(bundle, records, np.random.default_rng(seed))]
    head = bundle.manifest.head
    shape = QueryShape(
        model_version=bundle.model_version,
        num_components=head.num_query_components,
        component_width=head.component_width,
        num_pairs=head.num_pairs if head.is_mixture else 0,
    )
    return _fold(bundle, values, shape)


def _fold(bundle: Bundle, values: Sequence[bytes], shape: QueryShape) -> FoldRate:
    settings = RefresherSettings(bundle=bundle.path)
    rules = fold_rules(settings, bundle)
    registry, withdrawn, outbox, kept = PartitionRegistry(), dict[str, bool](), _Counting(), _Parts()
    log = _BytesLog(shape)
    refresher = Refresher(
        log=log,
        outbox=outbox,
        checkpoints=kept,
        leases=_OneHolder(),
        rules=rules,
        publisher=Publisher(
            weight_policy=SharePolicy.parse(settings.model_weight), min_users=settings.min_users, withdrawn=withdrawn
        ),
        withdrawn=withdrawn,
        registry=registry,
        metrics=RefresherMetrics(CollectorRegistry()),
        limits=RefresherLimits(checkpoint_s=settings.checkpoint_seconds),
    )
    refresher.step()
    log.values = values
    started, cpu = time.perf_counter(), time.process_time()
    while True:
        refresher.step()
        state = registry.partitions[0]
        if state.folded_offset == len(values) - 1 and not state.outgoing.num_changes:
            break
    refresher.finish()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return FoldRate(
        model_version=bundle.model_version,
        records=len(values),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        records_per_second=len(values) / seconds,
        records_per_cpu_second=len(values) / cpu_seconds,
        deltas=outbox.deltas,
        delta_bytes=outbox.nbytes,
        bytes_per_item=float(state.sums.bytes_per_item),
        bytes_per_remembered=float(state.remembered.memory.bytes_per_entry),
        bytes_in_all=state.nbytes,
        checkpoint_bytes=sum(map(len, kept.parts.values())),
    )


def attributions(
    bundle: Bundle, records: int, rng: np.random.Generator, *, users: int = _USERS, first: int = 0
) -> Iterator[tuple[str, bytes]]:
    """Item and bytes of random attributions; first: the offset of the first one's interaction."""
    head = bundle.manifest.head
    share = bundle.counts + 1.0
    items = rng.choice(bundle.num_items, size=records, p=share / share.sum())
    owners = rng.integers(users, size=records)
    for number, (item, user) in enumerate(zip(items.tolist(), owners.tolist(), strict=True), start=first):
        components = rng.normal(size=(head.num_query_components, head.component_width))
        components /= np.linalg.norm(components, axis=1, keepdims=True)
        gate = rng.normal(size=head.num_pairs) if head.is_mixture else np.zeros(0)
        message = events_pb2.Attribution(
            item_id=bundle.item_ids[item],
            type="rating",
            value=float(1 + number % 5),
            user_pseudonym=f"{user:032x}",
            source=common_pb2.StreamPosition(partition=user % 8, offset=number),
            query_state=common_pb2.QueryState(
                model_version=bundle.model_version,
                components=components.astype("<f2").tobytes(),
                gate=gate.astype("<f2").tobytes(),
                num_components=head.num_query_components,
                component_width=head.component_width,
            ),
        )
        message.event_time.FromMilliseconds(_START_MS + number)
        message.recorded_time.FromMilliseconds(_START_MS + number)
        value: bytes = message.SerializeToString()
        yield bundle.item_ids[item], value

"""The topic `index-deltas`: its records and their batches.

Refresher, candidates and reranker use this module, so they agree on keys, limits and positions. Readers at the same
position serve the same content.

Letters: P_q, P_x query and item components, P = P_q * P_x, d component width.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import numpy.typing as npt
from freshet.v1 import events_pb2

from services.platform.errors import InvalidRequest
from services.platform.stream.records import check_key, parse, read_ms, read_position, set_ms
from services.platform.stream.topic import COMPACTED, Topic
from services.platform.validation import validate_id

INDEX_DELTAS = "index-deltas"
# A broker compacts only closed segments. Of 500,000 records of 25,000 items, a late reader reads all with the broker's
# defaults, and 25,139 with these settings. Forgotten contributions are compacted within a day.
TOPIC = Topic(
    name=INDEX_DELTAS,
    num_partitions=1,
    settings=COMPACTED
    | {
        "segment.bytes": str(16 << 20),
        "min.cleanable.dirty.ratio": "0.1",
        "max.compaction.lag.ms": str(24 * 3600 * 1000),
    },
)

FloatArray = npt.NDArray[np.float32]

# The writer should close a batch at this size; otherwise the reader closes it.
MAX_BATCH_RECORDS = 10_000
MAX_DROPPED_KEYS = 16_384

# Limits from `algorithms.scoring.states` for components and gates, and `pefa.policy` for weights.
_MAX_LENGTH, _MAX_GATE, _MAX_WEIGHT = 1.001, 65_504.0, 2.0**16

_FLOAT = np.dtype("<f4")
_HALF = np.dtype("<f2")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemDelta:
    """An item's complete refreshed state: components (P_x, d), of length 1 at most, gate (P,) or None for a plain dot
    product.

    model_share: the model's weight (lambda) in [0, 1], 0 for an item unknown to the model. dropped: the bundle's state
    applies instead, if there is one. is_read: whether the reader serves the item. If dropped or not read, the arrays
    are empty.

    Raises: InvalidRequest with the field.
    """

    item_id: str
    components: FloatArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    gate: FloatArray | None = None
    model_share: float = 1.0
    num_interactions: int = 0
    dropped: bool = False
    is_read: bool = True

    def __post_init__(self) -> None:
        validate_id("item_id", self.item_id)
        if not 0 <= self.model_share <= 1:
            raise InvalidRequest.of("model_share", self.model_share, "0-1")
        if self.num_interactions < 0:
            raise InvalidRequest.of("num_interactions", self.num_interactions, "0 or more")
        if self.is_read and not self.dropped:
            _check_matrix(self.components)
            if self.gate is not None and (self.gate.ndim != 1 or not (np.abs(self.gate) <= _MAX_GATE).all()):
                raise InvalidRequest.of("gate", self.gate.shape, f"(P,) numbers of at most {_MAX_GATE}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryDelta:
    """One remembered interaction: a query state's components (P_q, d), half precision on the wire, and its item.

    event_time_ms: Unix milliseconds. dropped: it left the memory (the array is empty).

    Raises: InvalidRequest with the field.
    """

    entry_id: str
    item_id: str = ""
    components: FloatArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    weight: float = 1.0
    type: str = ""
    event_time_ms: int = 0
    dropped: bool = False

    def __post_init__(self) -> None:
        validate_id("entry_id", self.entry_id)
        if not abs(self.weight) <= _MAX_WEIGHT:  # NaN too
            raise InvalidRequest.of("weight", self.weight, f"a number of at most {_MAX_WEIGHT}")
        if not self.dropped:
            validate_id("item_id", self.item_id)
            _check_matrix(self.components)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IndexDelta:
    """One record: a change and its writer's progress.

    partition, offset: the record of `attributions` that the change reflects; the partition identifies the writer, and
    `batch` counts the writer's batches. newest_recorded_ms: the broker's time of the batch's newest interaction, Unix
    milliseconds. A batch has each key once.
    """

    model_version: str
    partition: int
    offset: int
    batch: int
    last_of_batch: bool
    change: ItemDelta | MemoryDelta
    newest_recorded_ms: int | None = None

    @property
    def key(self) -> bytes:
        if isinstance(self.change, ItemDelta):
            return item_key(self.model_version, self.change.item_id)
        return memory_key(self.model_version, self.change.entry_id)


def item_key(model_version: str, item_id: str) -> bytes:
    return f"{model_version}/item/{item_id}".encode()


def memory_key(model_version: str, entry_id: str) -> bytes:
    return f"{model_version}/memory/{entry_id}".encode()


def is_of_model(key: bytes | None, model_version: str) -> bool:
    return key is not None and key.startswith(f"{model_version}/".encode())


def encode(delta: IndexDelta) -> bytes:
    message = events_pb2.IndexDelta(
        model_version=delta.model_version, batch=delta.batch, last_of_batch=delta.last_of_batch
    )
    message.reflects.partition, message.reflects.offset = delta.partition, delta.offset
    if delta.newest_recorded_ms is not None:
        set_ms(message.newest_recorded_time, delta.newest_recorded_ms)
    change = delta.change
    num_components, width = change.components.shape
    if isinstance(change, ItemDelta):
        message.item.item_id = change.item_id
        message.item.components = change.components.astype(_FLOAT).tobytes()
        message.item.gate = b"" if change.gate is None else change.gate.astype(_FLOAT).tobytes()
        message.item.num_components, message.item.component_width = num_components, width
        message.item.model_share = change.model_share
        message.item.num_interactions = change.num_interactions
        message.item.dropped = change.dropped
    else:
        message.memory.entry_id, message.memory.item_id = change.entry_id, change.item_id
        message.memory.components = change.components.astype(_HALF).tobytes()
        message.memory.num_components, message.memory.component_width = num_components, width
        message.memory.weight, message.memory.type = change.weight, change.type
        set_ms(message.memory.event_time, change.event_time_ms)
        message.memory.dropped = change.dropped
    return message.SerializeToString()


def decode(key: bytes | None, value: bytes | None, holds: Callable[[str], bool] = lambda item_id: True) -> IndexDelta:
    """Decode a record. holds: states of items for which it returns False are not decoded.

    Raises: InvalidRequest with the field.
    """
    message = parse(events_pb2.IndexDelta, value)
    kind = message.WhichOneof("change")
    if kind is None:
        raise InvalidRequest.of("change", "absent", "item or memory")
    if not message.HasField("reflects"):
        raise InvalidRequest.of("reflects", "absent", "a partition and an offset")
    partition, offset = read_position("reflects", message.reflects)
    delta = IndexDelta(
        model_version=message.model_version,
        partition=partition,
        offset=offset,
        batch=message.batch,
        last_of_batch=message.last_of_batch,
        newest_recorded_ms=read_ms(message.newest_recorded_time, "newest_recorded_time")
        if message.HasField("newest_recorded_time")
        else None,
        change=_item(message.item, holds) if kind == "item" else _memory(message.memory),
    )
    check_key(key, delta.key, "model/kind/id")
    return delta


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One batch's changes, to apply together. offset: the closing record's offset.

    mark: distinguishes the closing record from a record of another log at the same offset.
    """

    offset: int
    deltas: Sequence[IndexDelta]
    newest_recorded_ms: int | None
    mark: str = ""


def joined(batches: Sequence[Batch]) -> Batch:
    """Join batches into one that ends like the last; each key's last change counts."""
    return Batch(
        offset=batches[-1].offset,
        deltas=tuple({delta.key: delta for batch in batches for delta in batch.deltas}.values()),
        newest_recorded_ms=_newest_ms(batches),
        mark=batches[-1].mark,
    )


class Batches:
    """Assembles one model's batches from records in order of offset; writers may interleave.

    A batch is closed by its last record, by its writer's next batch, or at `MAX_BATCH_RECORDS`. Compaction deletes a
    record only after a later batch of the same writer. A change is left out if it reflects a lower offset than an
    earlier change of the same key and partition, so a writer that was replaced changes nothing. If two partitions
    change a key, the later record applies.

    A writer publishes a key's tombstone after the batch that dropped the key and before its next batch. The next batch
    closes the dropping batch if compaction deleted its last record.

    Memory: some 200 bytes per key, and per key among the last `MAX_DROPPED_KEYS` dropped ones.
    """

    def __init__(self) -> None:
        self._open: dict[int, list[IndexDelta]] = {}
        self._reflected: dict[bytes, tuple[int, int]] = {}
        self._dropped: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, offset: int, delta: IndexDelta) -> list[Batch]:
        """Add a record; return the batches that it closes (at most two)."""
        closed: list[Batch] = []
        waiting = self._open.setdefault(delta.partition, [])
        if waiting and waiting[-1].batch != delta.batch:
            # A writer that restarts from an older checkpoint may count from a lower number.
            closed.append(self._close(offset, delta))
            waiting = self._open.setdefault(delta.partition, [])
        waiting.append(delta)
        if delta.last_of_batch or len(waiting) >= MAX_BATCH_RECORDS:
            closed.append(self._close(offset, delta))
        return closed

    def gone(self, offset: int, key: bytes) -> list[Batch]:
        """Add a tombstone; return a batch that drops the key, or none if the key is already dropped.

        Raises: InvalidRequest for an invalid key; nothing changes.
        """
        model_version, change = _dropped(key)
        self._open = {writer: [one for one in waiting if one.key != key] for writer, waiting in self._open.items()}
        if key in self._dropped:
            return []
        partition, reflected = self._reflected.get(key, (0, -1))
        delta = IndexDelta(
            model_version=model_version,
            partition=partition,
            offset=reflected,
            batch=0,
            last_of_batch=True,
            change=change,
        )
        self._drop(key)
        return [Batch(offset=offset, deltas=(delta,), newest_recorded_ms=None, mark=mark_of(delta))]

    def _drop(self, key: bytes) -> None:
        self._dropped[key] = None
        if len(self._dropped) > MAX_DROPPED_KEYS:
            oldest, _ = self._dropped.popitem(last=False)
            self._reflected.pop(oldest, None)

    def _close(self, offset: int, closing: IndexDelta) -> Batch:
        partition = closing.partition
        deltas = self._open.pop(partition)
        newest: dict[bytes, IndexDelta] = {}
        for delta in deltas:
            key = delta.key
            known_partition, known_offset = self._reflected.get(key, (partition, -1))
            if known_partition != partition or delta.offset >= known_offset:
                self._reflected[key] = (partition, delta.offset)
                newest.pop(key, None)  # if the writer began a batch twice, the later record counts
                newest[key] = delta
                self._dropped.pop(key, None)
                if delta.change.dropped:
                    self._drop(key)
        return Batch(
            offset=offset,
            deltas=tuple(newest.values()),
            newest_recorded_ms=_newest_ms(deltas),
            mark=mark_of(closing),
        )


def _dropped(key: bytes) -> tuple[str, ItemDelta | MemoryDelta]:
    parts = key.decode(errors="replace").split("/", 2)
    if len(parts) == 3 and parts[1] == "item":
        return parts[0], ItemDelta(item_id=parts[2], dropped=True)
    if len(parts) == 3 and parts[1] == "memory":
        return parts[0], MemoryDelta(entry_id=parts[2], dropped=True)
    raise InvalidRequest.of("key", f"{len(key)} other bytes", "model/item/id or model/memory/id")


def mark_of(closing: IndexDelta) -> str:
    """Return a batch's mark; it distinguishes records at one offset."""
    fields = (closing.key, closing.partition, closing.offset, closing.batch, closing.newest_recorded_ms)
    return f"{crc32(repr(fields).encode()):08x}"


def _newest_ms(records: Sequence[Batch | IndexDelta]) -> int | None:
    return max((one.newest_recorded_ms for one in records if one.newest_recorded_ms is not None), default=None)


def _item(message: events_pb2.ItemState, holds: Callable[[str], bool]) -> ItemDelta:
    shape = (message.num_components, message.component_width)
    if message.dropped:
        return ItemDelta(item_id=message.item_id, dropped=True)
    if not holds(message.item_id):
        return ItemDelta(item_id=message.item_id, is_read=False)
    return ItemDelta(
        item_id=message.item_id,
        components=_array("components", message.components, _FLOAT, shape),
        gate=_array("gate", message.gate, _FLOAT, (len(message.gate) // 4,)) if message.gate else None,
        model_share=message.model_share,
        num_interactions=message.num_interactions,
    )


def _memory(message: events_pb2.MemoryEntry) -> MemoryDelta:
    if message.dropped:
        return MemoryDelta(entry_id=message.entry_id, item_id=message.item_id, dropped=True)
    return MemoryDelta(
        entry_id=message.entry_id,
        item_id=message.item_id,
        components=_array("components", message.components, _HALF, (message.num_components, message.component_width)),
        weight=message.weight,
        type=message.type,
        event_time_ms=read_ms(message.event_time, "memory.event_time"),
    )


def _array(name: str, data: bytes, dtype: np.dtype[np.floating], shape: tuple[int, ...]) -> FloatArray:
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise InvalidRequest.of(name, f"{len(data)} bytes", f"{math.prod(shape) * dtype.itemsize}, for shape {shape}")
    return np.frombuffer(data, dtype).astype(np.float32).reshape(shape)


def _check_matrix(components: FloatArray) -> None:
    if components.ndim != 2 or not components.size:
        raise InvalidRequest.of("components", components.shape, "(components, width), at least 1 of each")
    length = float(np.sqrt(np.einsum("pd,pd->p", components, components).max()))
    if not length <= _MAX_LENGTH:  # NaN too
        raise InvalidRequest.of("components", f"one of length {length:.6g}", f"lengths of at most {_MAX_LENGTH}")

"""The checkpoint port over the topic `refresher-checkpoints`, so that any host can continue a partition (decision 033).

A checkpoint is a head and parts; the head is written after the parts are acknowledged. A refresher stops saving when
it finds a later claim of another refresher, so only the owner of the latest claim deletes parts. It deletes a
checkpoint's parts once the partition has two later heads.
"""

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from services.contracts.topics.refresher_checkpoints import (
    HEADS,
    PART_BYTES,
    REFRESHER_CHECKPOINTS,
    Head,
    Piece,
    decode_head,
    digest_of,
    encode_head,
    prefix_of,
)
from services.platform.errors import Conflict, DependencyUnavailable, InvalidRequest
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.ports import Reader
from services.platform.stream.reading import read_offsets
from services.refresher.checkpoint import CheckpointError, from_file
from services.refresher.ports import StoredCheckpoint

_TOPIC = REFRESHER_CHECKPOINTS
_CLAIM = "claim"
_KEPT_HEADS = 2
# Skipping this many records is cheaper than another fetch.
_GAP_RECORDS = 8
_WRITTEN_TOGETHER = 16
_WRITE_S = 15.0
# Maximum number of parts that a killed refresher may have left without a head.
_ORPHANS = 256


@dataclass(slots=True)
class _OpenPartition:
    """A partition that this process opened.

    `base` has the stored parts that `save` may refer to. `heads` has the keys of valid heads, oldest first, each with
    the keys of its pieces. `orphans` has the keys of pieces without a head.
    """

    base: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    heads: list[tuple[str, set[str]]] = field(default_factory=list)
    orphans: set[str] = field(default_factory=set)
    saves: int = 0


class CheckpointFiles:
    """Reads `root`, which may be absent."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def load(self, partition: int) -> Iterator[StoredCheckpoint]:
        path = self._root / f"partition-{partition}.checkpoint"
        if path.exists():
            yield StoredCheckpoint(str(path), partial(_read, path), is_base=False)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise DependencyUnavailable(f"{path} cannot be read: {exc}") from exc
    return from_file(data)


class CheckpointTopic:
    """Stores the checkpoints of one model. `load` yields `files` after the topic's checkpoints."""

    def __init__(
        self,
        reader: Reader,
        producer: BulkProducer,
        model_version: str,
        *,
        files: CheckpointFiles | None = None,
    ) -> None:
        self._reader, self._producer, self._model = reader, producer, model_version
        self._files = files
        self._owner = secrets.token_hex(8)
        self._next_piece = 0
        # Guards everything below: one thread opens while another saves.
        self._lock = threading.RLock()
        self._next_head = 0
        # `_heads` maps a key to the newest record's offset and value, `_owners` a partition to its last owner.
        self._heads: dict[str, tuple[int, bytes]] = {}
        self._owners: dict[int, str] = {}
        self._opened: dict[int, _OpenPartition] = {}

    def load(self, partition: int) -> Iterator[StoredCheckpoint]:
        with self._lock:
            self._open(partition)
            return iter(self._stored_checkpoints(partition, is_base=True))

    def look(self, partition: int) -> Iterator[StoredCheckpoint]:
        """Return the checkpoints, newest first, without opening the partition."""
        with self._lock:
            self._read_heads()
            return iter(self._stored_checkpoints(partition, is_base=False))

    def save(self, partition: int, values: Mapping[str, Any], parts: Mapping[str, bytes | None]) -> None:
        with self._lock:
            if partition not in self._opened:
                self._open(partition)
            self._require_owner(partition)
            opened = self._opened[partition]
            written = self._write(partition, {name: data for name, data in parts.items() if data is not None})
            named = {name: written[name] if name in written else opened.base[name] for name in parts}
            head = Head(owner=self._owner, next_piece=self._next_piece, values=values, parts=named)
            key = f"{prefix_of(self._model, partition)}{self._owner}/head-{opened.saves % _KEPT_HEADS}"
            self._send([Record(_TOPIC, key.encode(), encode_head(head), partition=HEADS)])
            opened.orphans -= head.keys
            opened.base, opened.saves = named, opened.saves + 1
            opened.heads.append((key, head.keys))
            # Do not delete another owner's records.
            self._require_owner(partition)
            self._clean(partition, opened)

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._producer.close()
            self._next_head, self._heads, self._owners, self._opened = 0, {}, {}, {}

    def _open(self, partition: int) -> None:
        key = f"{prefix_of(self._model, partition)}{_CLAIM}"
        self._send([Record(_TOPIC, key.encode(), self._owner.encode(), partition=HEADS)])
        self._read_heads()
        opened = self._opened[partition] = _OpenPartition()
        for key, (_, value) in reversed(self._of(partition)):
            try:
                head = decode_head(value)
            except InvalidRequest:
                continue
            opened.heads.append((key, head.keys))
            if head.owner != self._owner:
                opened.orphans |= {f"{head.owner}/{head.next_piece + number}" for number in range(_ORPHANS)}
        for _, keys in opened.heads:
            opened.orphans -= keys

    def _of(self, partition: int) -> list[tuple[str, tuple[int, bytes]]]:
        prefix = prefix_of(self._model, partition)
        found = [(key, head) for key, head in self._heads.items() if key.startswith(prefix)]
        return sorted(found, key=lambda one: -one[1][0])

    def _stored_checkpoints(self, partition: int, *, is_base: bool) -> list[StoredCheckpoint]:
        found = []
        for _, (offset, value) in self._of(partition):
            name = f"{_TOPIC} partition {HEADS} offset {offset}"
            found.append(StoredCheckpoint(name, partial(self._read, partition, value, is_base=is_base), is_base))
        return found if self._files is None else [*found, *self._files.load(partition)]

    def _read_heads(self) -> None:
        prefix = f"{self._model}/"
        self._reader.assign({HEADS: self._next_head}, _TOPIC)
        records = self._reader.read_to_end(_TOPIC)
        self._next_head = self._reader.positions(_TOPIC)[HEADS]
        for record in records:
            key = (record.key or b"").decode("utf-8", "replace")
            if not key.startswith(prefix):
                continue
            partition, _, rest = key.removeprefix(prefix).partition("/")
            if rest == _CLAIM:
                if partition.isdecimal():  # other keys are invalid
                    self._owners[int(partition)] = (record.value or b"").decode(errors="replace")
            elif record.value:
                self._heads[key] = (record.offset, record.value)
            else:
                self._heads.pop(key, None)

    def _require_owner(self, partition: int) -> None:
        self._read_heads()
        if self._owners.get(partition) != self._owner:
            del self._opened[partition]
            raise Conflict(f"another refresher has opened the checkpoints of partition {partition}")

    def _partition_of(self, partition: int) -> int:
        return 1 + partition % (self._producer.num_partitions(_TOPIC) - 1)

    def _write(self, partition: int, parts: Mapping[str, bytes]) -> dict[str, tuple[Piece, ...]]:
        into, prefix, opened = self._partition_of(partition), prefix_of(self._model, partition), self._opened[partition]
        written: dict[str, list[Piece]] = {name: [] for name in parts}
        waiting: list[tuple[str, bytes]] = [
            (name, data[start : start + PART_BYTES])
            for name, data in parts.items()
            for start in range(0, len(data), PART_BYTES)
        ]
        for start in range(0, len(waiting), _WRITTEN_TOGETHER):
            batch = waiting[start : start + _WRITTEN_TOGETHER]
            while batch:
                keys = [f"{self._owner}/{self._next_piece + number}" for number in range(len(batch))]
                self._next_piece += len(keys)
                opened.orphans.update(keys)
                offsets = self._send(
                    [
                        Record(_TOPIC, f"{prefix}{key}".encode(), data, partition=into)
                        for key, (_, data) in zip(keys, batch, strict=True)
                    ]
                )
                if -1 in offsets:
                    continue  # a record without an offset must be written again
                for key, offset, (name, data) in zip(keys, offsets, batch, strict=True):
                    written[name].append(Piece(key, offset, len(data), digest_of(data)))
                batch = []
        return {name: tuple(pieces) for name, pieces in written.items()}

    def _send(self, records: Sequence[Record]) -> list[int]:
        return [offset for _, offset in self._producer.send_many(records, _WRITE_S)]

    def _clean(self, partition: int, opened: _OpenPartition) -> None:
        gone, opened.heads = opened.heads[:-_KEPT_HEADS], opened.heads[-_KEPT_HEADS:]
        if not gone:
            return
        own = {key for key, _ in opened.heads}
        named: set[str] = set().union(*(keys for _, keys in opened.heads))
        keys = (opened.orphans | set().union(*(keys for _, keys in gone))) - named
        opened.orphans = set()
        into, prefix = self._partition_of(partition), prefix_of(self._model, partition)
        self._send(
            [
                *(Record(_TOPIC, key.encode(), None, partition=HEADS) for key, _ in gone if key not in own),
                *(Record(_TOPIC, f"{prefix}{key}".encode(), None, partition=into) for key in sorted(keys)),
            ]
        )

    def _read(self, partition: int, value: bytes, *, is_base: bool) -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
        with self._lock:
            try:
                head = decode_head(value)
            except InvalidRequest as exc:
                raise CheckpointError(f"its head is torn or altered: {exc.message}") from exc
            wanted = {piece.offset: piece for pieces in head.parts.values() for piece in pieces}
            of_part = {piece.offset: part for part, pieces in head.parts.items() for piece in pieces}
            found: dict[int, bytes] = {}
            into = self._partition_of(partition)
            for offset, record in read_offsets(self._reader, _TOPIC, into, sorted(wanted), max_gap=_GAP_RECORDS):
                piece, data = wanted[offset], None if record is None else record.value
                if data is None or len(data) != piece.size or digest_of(data) != piece.digest:
                    raise CheckpointError(
                        f"part {of_part[offset]!r} at offset {offset} of partition {into} of {_TOPIC} is "
                        + ("gone" if data is None else f"altered: {len(data)} bytes of digest {digest_of(data)}")
                        + f"; expected by its head: {piece.size} bytes of digest {piece.digest}"
                    )
                found[offset] = data
            if is_base and partition in self._opened:
                self._opened[partition].base = head.parts
            parts = {part: b"".join(found[piece.offset] for piece in pieces) for part, pieces in head.parts.items()}
            return head.values, parts

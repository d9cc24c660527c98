"""Check that a partition of `interactions` is still the log whose records were applied (decision 030).

The progress stores three anchors of each partition. `first` is this epoch's first record. `newest` is the newest record
and shows whether the log lost its end and was overwritten. `last` is at or shortly before `newest`. It advances only
after a check found its record in place, so it belongs to the same log as the earlier records.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Self

import structlog

from services.platform.errors import Conflict, PreconditionFailed
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.records import SourceRecord

log = structlog.get_logger()


class Anchor(NamedTuple):
    """A record's offset, and a digest of its time, key and value."""

    offset: int
    digest: str

    @classmethod
    def of(cls, record: SourceRecord) -> Self:
        digest = blake2b(digest_size=8)
        for part in (str(record.written_ms).encode(), record.key or b"", record.value or b""):
            digest.update(len(part).to_bytes(4, "little") + part)
        return cls(record.offset, digest.hexdigest())


class Anchors(NamedTuple):
    """The stored anchors of a partition."""

    first: Anchor
    last: Anchor
    newest: Anchor

    @classmethod
    def parse(cls, text: str) -> "Anchors | None":
        """The inverse of `text`; None for ""."""
        if not text:
            return None
        pairs = (one.partition(":") for one in text.split(","))
        return cls(*(Anchor(int(offset), digest) for offset, _, digest in pairs))

    @property
    def text(self) -> str:
        """The anchors as text for the state store."""
        return ",".join(f"{offset}:{digest}" for offset, digest in self)


class LostTail(Exception):
    """Some partitions lost applied records at their end. ends: their present ends."""

    def __init__(self, ends: Mapping[int, int]) -> None:
        super().__init__(f"the log lost its end: partitions end at {dict(ends)}")
        self.ends = ends


@dataclass(eq=False)
class LogIdentity:
    """The anchors of one process's partitions."""

    _anchors: dict[int, Anchors] = field(default_factory=dict)
    # Each partition's last record read: the next `last` anchor.
    _latest: dict[int, SourceRecord] = field(default_factory=dict)
    # Anchors from before the store was emptied; the new epoch's progress has none yet.
    _kept: dict[int, Anchors] = field(default_factory=dict)

    @property
    def partitions(self) -> Collection[int]:
        """Partitions with anchors."""
        return self._anchors.keys()

    def text(self, partition: int) -> str:
        """Return the text to store with the partition's progress; "" without anchors."""
        found = self._anchors.get(partition)
        return "" if found is None else found.text

    def came(self, records: Sequence[SourceRecord]) -> None:
        """Update the anchors from records in order within each partition. Call `check` before."""
        latest = {record.partition: record for record in records}
        for partition in latest.keys() - self._anchors.keys():
            first = next(record for record in records if record.partition == partition)
            last = Anchor.of(latest[partition])
            self._anchors[partition] = Anchors(Anchor.of(first), last, last)
        for partition, record in latest.items():
            self._anchors[partition] = self._anchors[partition]._replace(newest=Anchor.of(record))
        self._latest |= latest

    def check(self, stream: Reader, partitions: Collection[int]) -> None:
        """Check that the records at `last` and `newest` are unchanged, then move `last` to the last record read.

        Raises: Conflict if a record is not (`resync` finds the cause); DependencyUnavailable.
        """
        known = {partition: self._anchors[partition] for partition in partitions if partition in self._anchors}
        same = _found_last(stream, known)
        if other := sorted(known.keys() - same):
            raise Conflict(f"partitions {other} do not have the records that were read from them")
        for partition in same & self._latest.keys():
            self._anchors[partition] = self._anchors[partition]._replace(last=Anchor.of(self._latest[partition]))

    def resync(self, stream: Reader, watermarks: Offsets, stored: Mapping[int, str]) -> None:
        """Restart from the state store's anchors. stored: `text` of each partition.

        Raises: LostTail if the same log lost applied records at its end; PreconditionFailed if it is another log;
        DependencyUnavailable.
        """
        known = {partition: anchors for partition in watermarks if (anchors := Anchors.parse(stored[partition]))}
        bounds = stream.bounds(list(watermarks))
        last_found = _found_last(stream, known)
        first_found = _found(stream, {p: anchors.first for p, anchors in known.items()})
        self._latest.clear()
        lost: dict[int, int] = {}
        for partition, watermark in watermarks.items():
            begin, end = bounds[partition]
            anchors = known.get(partition)
            if watermark < end and (anchors is None or partition in last_found or anchors.last.offset < begin):
                if anchors is not None and partition not in last_found:
                    # Retention deleted the anchors.
                    log.warning("log_identity_unknown", partition=partition, begins=begin)
                continue
            if anchors is None or (partition not in first_found and partition not in last_found):
                raise PreconditionFailed(_another_log(partition, watermark, end, has_anchors=anchors is not None))
            lost[partition] = end
        # Missing anchors are made from present records.
        wanted = {p: watermark for p, watermark in watermarks.items() if watermark >= 0 and p not in lost}
        lasts = stream.records_at({p: watermark for p, watermark in wanted.items() if p not in last_found})
        firsts = stream.records_at(
            {p: bounds[p][0] for p in wanted if p not in first_found and bounds[p][0] <= watermarks[p]}
        )
        self._anchors = {
            p: anchors for p, anchors in known.items() if p in first_found and (p in last_found or p in lost)
        }
        for partition in wanted.keys() - self._anchors.keys():
            old = known.get(partition)
            last = old.last if old and partition in last_found else _anchor(lasts.get(partition))
            first = old.first if old and partition in first_found else _anchor(firsts.get(partition))
            if last is not None:
                self._anchors[partition] = Anchors(
                    first or last, last, old.newest if old and partition in last_found else last
                )
        self._anchors |= {p: anchors for p, anchors in self._kept.items() if watermarks.get(p) == -1}
        self._kept = {}
        if lost:
            raise LostTail(lost)

    def keep(self) -> None:
        """Let the next `resync`, after `LostTail` and with an empty store, identify each log by its first record."""
        self._kept = {p: Anchors(*[anchors.first] * 3) for p, anchors in self._anchors.items()}


def _anchor(record: SourceRecord | None) -> Anchor | None:
    return None if record is None else Anchor.of(record)


def _found(stream: Reader, anchors: Mapping[int, Anchor]) -> set[int]:
    records = stream.records_at({partition: anchor.offset for partition, anchor in anchors.items()})
    return {p for p, anchor in anchors.items() if (record := records.get(p)) and Anchor.of(record) == anchor}


def _found_last(stream: Reader, known: Mapping[int, Anchors]) -> set[int]:
    found = _found(stream, {partition: anchors.last for partition, anchors in known.items()})
    return found & _found(stream, {partition: anchors.newest for partition, anchors in known.items()})


def _another_log(partition: int, watermark: int, end: int, *, has_anchors: bool) -> str:
    what = (
        f"partition {partition} of the topic has other records than those that were applied"
        if has_anchors
        else f"partition {partition} of the topic ends before offset {end}"
    )
    return (
        f"{what}, but the state store has applied up to {watermark}: the topic was recreated. Empty the state store, "
        "and it is filled again from the topic; or restore the topic"
    )


def same_logs(stream: Reader, remembered: Mapping[int, tuple[int, str]]) -> set[int]:
    """Return the partitions that are still the remembered log. remembered: last offset and `LogIdentity.text`.

    A partition is also accepted if retention deleted its `last` anchor, or if its last offset is -1 and it is empty.
    Raises: DependencyUnavailable.
    """
    bounds = stream.bounds(list(remembered))
    known = {p: anchors.last for p, (_, text) in remembered.items() if (anchors := Anchors.parse(text))}
    found = _found(stream, known)
    return {
        partition
        for partition, (last, _) in remembered.items()
        if last < bounds[partition][1]
        and (
            partition in found
            or (partition in known and known[partition].offset < bounds[partition][0])
            or (last < 0 and bounds[partition][1] == 0)
        )
    }

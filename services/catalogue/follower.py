"""Follow the catalogue's topics: `index-deltas` in whole batches, and `items`.

A thread reads them from the start and is ready once it has reached the ends of both topics. Until then withdrawals may
be unknown, so `CatalogueGate` refuses requests, and the thread applies the batches of many polls together. Later it
applies the batches of one poll together if it is behind; otherwise one by one, so that two followers have the same
positions. Deltas that do not fit into memory are tried again in order, while the thread continues with `items`.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import structlog

from services.catalogue.snapshots import CatalogueSnapshots
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.index_deltas import (
    INDEX_DELTAS,
    Batch,
    Batches,
    decode,
    is_of_model,
    joined,
    mark_of,
)
from services.contracts.topics.items import ITEMS, CatalogueItem, decode_item
from services.platform.errors import DependencyUnavailable, InvalidRequest
from services.platform.request_context import OFF, Tracing
from services.platform.rpc.server import HealthState
from services.platform.stream.follower import TurnClock
from services.platform.stream.kafka import Brokers, BulkProducer
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord
from services.platform.stream.topic import Replicas
from services.platform.stream.topic_follower import TopicFollower

log = structlog.get_logger()

_MAX_RECORDS = 4_096
_MAX_PENDING = 4_096  # deltas that wait for room
# Deltas applied at once before the process is ready: 200,000 items of 8x4x64 took 12 s of processor time in blocks of
# 4,096, and 6.5 s in this size (80 MB).
_GATHERED = 32_768
# When serving, the follower pauses after so many records: without pauses, two followers that read a batch at the same
# moment use both cores of a small machine. The pauses per poll are limited, so that it keeps up.
_SLICE, _PAUSE_S, _MAX_PAUSES = 16, 0.001, 32


def catalogue_reader(
    bootstrap: Brokers,
    process: str,
    *topics: str,
    makes_topics: Replicas | None = None,
    writes_dead_letters: bool = False,
) -> TopicReader:
    """Return a reader of the catalogue's topics (default: both). writes_dead_letters: send
    malformed records of `items` to the dead-letter topic; only one process sets it.
    """
    name = f"{process}-catalogue"
    return TopicReader(
        bootstrap,
        *(topics or (INDEX_DELTAS, ITEMS)),
        group_id=name,
        client_id=name,
        partitions=[0],
        makes_topics=makes_topics,
        max_poll_records=_MAX_RECORDS,
        rest_ms=1_000,
        dead_letters=BulkProducer(bootstrap, client_id=f"{process}-items") if writes_dead_letters else None,
    )


_Described = tuple[SourceRecord, CatalogueItem]


class Listener(Protocol):
    """Reacts to changes, in the follower's thread. A listener of `items` alone needs only `describe`."""

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Apply descriptions of items."""

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        """Apply a batch. Return False if there is no room now; the follower then tries again."""
        return True

    def reset(self) -> None:
        """Drop all batches, because `index-deltas` was recreated."""
        return None

    def counted(self, kind: str, records: int) -> None:
        """Count skipped records: "other_model", "unreadable_delta", "unreadable_item", "poison_item"."""
        return None


class CatalogueFollower(TopicFollower):
    """Follows the topics. It skips no batch: a later position implies that all earlier batches are in the index.

    follows_deltas: False means `items` only. kinds: the bundle's attribute kinds; an item with another kind is
    unreadable. snapshots: snapshots of `index-deltas`; `items` is always read from its start. holds: whether the
    listener serves an item; states of other items are not decoded.
    """

    def __init__(
        self,
        topics: Reader,
        listener: Listener,
        *,
        model_version: str,
        on_ready: Callable[[], None] = lambda: None,
        follows_deltas: bool = True,
        kinds: Mapping[str, str] = MappingProxyType({}),
        snapshots: CatalogueSnapshots | None = None,
        holds: Callable[[str], bool] = lambda item_id: True,
        poll_s: float = 1.0,
        backoff_s: float = 0.5,
        turns: TurnClock | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        super().__init__(
            "catalogue-follower",
            topics,
            (INDEX_DELTAS, ITEMS) if follows_deltas else (ITEMS,),
            poll_s=poll_s,
            on_ready=on_ready,
            backoff_s=backoff_s,
            turns=turns,
        )
        self._listener, self._model_version, self._kinds = listener, model_version, kinds
        self._snapshots, self._looked_for_one = snapshots, False
        self._holds, self._batches = holds, Batches()
        self._pending: list[Batch] = []
        # The traceparents of waiting deltas, by offset.
        self._tracing, self._traceparents = tracing, dict[int, str]()
        # The last applied batch, and the traceparent of its application.
        self._applied_in = (-1, "")

    @property
    def next_item(self) -> int:
        return self._next[ITEMS]

    def applied_in(self, position: int) -> str:
        """Return the traceparent of the span that applied this position; "" if unknown."""
        offset, traceparent = self._applied_in
        return traceparent if offset == position else ""

    def finish(self) -> None:
        """Stop. The next start reads everything again, or from the newest snapshot."""
        if self._snapshots is not None:
            self._snapshots.close()
        super().finish()

    def turn(self) -> int:
        """Read and apply. The first turn begins at the record after the snapshot's, if the snapshot is usable."""
        if self._snapshots is not None and not self._looked_for_one:
            first = self._snapshots.first_offset(self._is_in_place)
            if first is None:
                self._listener.reset()
            self._next[INDEX_DELTAS] = first or 0
            self._looked_for_one = True
        records = super().turn()
        if self._snapshots is not None and not (self.is_behind or self._pending or self._batches.num_open):
            self._snapshots.look(self._next[INDEX_DELTAS])
        return records

    def poll(self) -> Sequence[SourceRecord]:
        """Poll `items` alone while deltas wait for room."""
        room = _GATHERED if self._gathers else _MAX_PENDING
        takes_deltas = INDEX_DELTAS in self._next and self._num_pending < room
        wait_ms = 0 if self._pending and not self._gathers else round(1000 * self._poll_s)
        return self._topics.poll(wait_ms, only="" if takes_deltas else ITEMS)

    def take(self, records: Sequence[SourceRecord], ends: Mapping[str, int]) -> None:
        self._take([record for record in records if record.topic == INDEX_DELTAS])
        self._describe([record for record in records if record.topic == ITEMS])
        self._apply(ends)

    def drop(self, topic: str) -> None:
        """Drop a recreated topic's deltas. An item's description stays until the new topic has the item."""
        if topic == INDEX_DELTAS:
            self._batches, self._pending, self._traceparents = Batches(), [], {}
            self._listener.reset()

    def caught_up(self) -> None:
        log.info("catalogue_caught_up", next_offsets=dict(self._next))

    @property
    def _gathers(self) -> bool:
        return self.is_behind and not self._is_ready

    @property
    def _num_pending(self) -> int:
        return sum(len(batch.deltas) for batch in self._pending)

    def _is_in_place(self, offset: int, mark: str) -> bool:
        if self._topics.end_offsets(INDEX_DELTAS)[0] <= offset:
            return False
        record = self._topics.records_at({0: offset}, INDEX_DELTAS).get(0)
        try:
            return record is not None and mark_of(decode(record.key, record.value)) == mark
        except InvalidRequest:
            return False

    def _take(self, records: Sequence[SourceRecord]) -> None:
        skipped: Counter[str] = Counter()
        closed: list[Batch] = []
        traced = self._tracing.sampled(records)
        self._traceparents.update({offset: traceparent for (_, offset), traceparent in traced.items()})
        slice_size = max(_SLICE, len(records) // _MAX_PAUSES)
        for number, record in enumerate(records, start=1):
            self._next[INDEX_DELTAS] = record.offset + 1
            if not is_of_model(record.key, self._model_version):
                skipped["other_model"] += 1
                continue
            try:
                if record.key is not None and record.value is None:
                    closed += self._batches.gone(record.offset, record.key)
                else:
                    closed += self._batches.add(record.offset, decode(record.key, record.value, self._holds))
            except InvalidRequest as exc:
                skipped["unreadable_delta"] += 1
                log.error("delta_unreadable", offset=record.offset, reason=str(exc))
                continue
            if not self.is_behind and number % slice_size == 0:
                time.sleep(_PAUSE_S)
        # When live, each batch makes a version, so that all readers have the same versions.
        self._pending += [joined(closed)] if closed and self.is_behind and not self._gathers else closed
        for kind, count in skipped.items():
            self._listener.counted(kind, count)

    def _describe(self, records: Sequence[SourceRecord]) -> None:
        items: list[_Described] = []
        for record in records:
            try:
                item = decode_item(record.key, record.value, self._kinds)
                items.append((record, replace(item, written_ms=record.written_ms, offset=record.offset)))
            except InvalidRequest as exc:
                self._listener.counted("unreadable_item", 1)
                log.warning("item_unreadable", offset=record.offset, reason=str(exc))
                self._topics.dead_letter(record, str(exc))
        if items and self.tries_alone:
            self.one_by_one(
                items,
                key=lambda one: one[0].offset,
                apply=self._describe_one,
                set_aside=self._set_aside,
                # Each record is a whole item, so it may be described twice.
                rehearse=lambda one: self._listener.describe([one[1]]),
            )
        elif items:
            self._listener.describe([item for _, item in items])
            self.poison.applied(items)
        if records:
            self._next[ITEMS] = records[-1].offset + 1

    def _describe_one(self, described: _Described) -> None:
        self._listener.describe([described[1]])
        self._next[ITEMS] = described[0].offset + 1

    def _set_aside(self, described: _Described, reason: str) -> None:
        self._listener.counted("poison_item", 1)
        self._topics.dead_letter(described[0], reason)
        self._next[ITEMS] = described[0].offset + 1

    def _apply(self, ends: Mapping[str, int]) -> None:
        if self._pending and self._gathers:
            if self._num_pending < _GATHERED and not self.is_at(ends):
                return
            self._pending = [joined(self._pending)]
        while self._pending:
            if not self._serve(self._pending[0]):
                self._stop.wait(self._first_backoff_s)
                return
            del self._pending[0]

    def _serve(self, batch: Batch) -> bool:
        made_of = [offset for offset in self._traceparents if offset <= batch.offset]
        links = [self._traceparents[offset] for offset in made_of]
        with self._tracing.batch("apply deltas", links, deltas=len(batch.deltas)) as span:
            if not self._listener.apply(batch, is_live=not self.is_behind):
                return False
        self._applied_in = (batch.offset, span)
        for offset in made_of:
            del self._traceparents[offset]
        return True


def age_seconds(recorded_ms: int | None) -> float | None:
    """Return the seconds since this time, never negative although clocks differ."""
    return None if recorded_ms is None else max(0.0, time.time() - recorded_ms / 1000)


NOT_READ = "the catalogue's topics were not read to their ends yet, so what is withdrawn is not known; Kafka is needed"


class CatalogueGate:
    """Closed until `open`, which is thread-safe. A process with items calls `check` before each answer."""

    def __init__(self, process: str, health: HealthState) -> None:
        self._process, self._health, self._is_open = process, health, False
        health.set_ready(False, NOT_READ)

    def open(self) -> None:
        """Open the gate until the process ends."""
        self._is_open = True
        self._health.set_ready(True)

    def check(self) -> None:
        """Raise DependencyUnavailable while closed."""
        if not self._is_open:
            raise DependencyUnavailable(f"{self._process} is not ready: {NOT_READ}")

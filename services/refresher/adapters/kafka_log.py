"""The log port over Apache Kafka: assigned partitions, no group membership, progress kept in the checkpoints.

One consumer follows the stream; another, made when first needed, reads single records again (a forgotten user's, say)
without disturbing it. kafka-python hides a lost broker from `poll`, so silence is normal; calls that need an answer
raise DependencyUnavailable after a few seconds.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from services.common.errors import DependencyUnavailable, PreconditionFailed
from services.common.stream.record import DeadLetter, SourceRecord
from services.common.topics import ATTRIBUTIONS, ITEMS
from services.refresher.adapters.decoding import QueryShape, decode_attribution, decode_listing
from services.refresher.domain.records import Interaction, Listing
from services.refresher.ports import Polled

ANSWER_TIMEOUT_S = 10.0
_ITEMS_PARTITION = TopicPartition(ITEMS, 0)
_AGAIN_WAIT_MS = 20  # somebody waits for what is read again
# Records between two wanted ones are read and thrown away up to this many: cheaper than another fetch.
_GAP_RECORDS = 200


class KafkaLog:
    """`build(client_id, window_ms)` makes a consumer that has the whole of `attributions` assigned."""

    def __init__(
        self,
        build: Callable[[str, int], KafkaConsumer],
        shape: QueryShape,
        *,
        gather_ms: int,
        attributions: str = ATTRIBUTIONS,
    ) -> None:
        """`gather_ms`: how long the broker gathers what is new before it answers, so that few turns take it in."""
        self._build = build
        self._gather_ms = gather_ms
        self._shape = shape
        self._topic = attributions
        self._consumer: KafkaConsumer | None = None
        self._reader: KafkaConsumer | None = None
        self._next: dict[TopicPartition, int] = {}

    def partitions(self) -> Sequence[int]:
        with self._errors():
            return sorted(self._stream().partitions_for_topic(self._topic) or ())

    def listings(self) -> tuple[Sequence[Listing], Sequence[DeadLetter]]:
        found: dict[str, Listing] = {}
        unreadable: list[DeadLetter] = []
        with self._errors():
            consumer = self._stream()
            consumer.assign([_ITEMS_PARTITION])
            consumer.seek_to_beginning(_ITEMS_PARTITION)
            end = consumer.end_offsets([_ITEMS_PARTITION])[_ITEMS_PARTITION]
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
            while (position := consumer.position(_ITEMS_PARTITION)) < end:
                for batch in consumer.poll(timeout_ms=200).values():
                    deadline = time.monotonic() + ANSWER_TIMEOUT_S
                    for record in batch:
                        listing = decode_listing(_source(record))
                        if isinstance(listing, DeadLetter):
                            unreadable.append(listing)
                        else:
                            found[listing.item_id] = listing
                if time.monotonic() > deadline:
                    raise DependencyUnavailable(f"Kafka gave {ITEMS} up to {position} of {end} only")
            self._next = {_ITEMS_PARTITION: end}
        return list(found.values()), unreadable

    def assign(self, offsets: Mapping[int, int]) -> None:
        kept = {tp: at for tp, at in self._next.items() if tp.topic == ITEMS or tp.partition in offsets}
        self._next = {TopicPartition(self._topic, partition): offset for partition, offset in offsets.items()} | kept
        with self._errors():
            consumer = self._stream()
            consumer.assign(list(self._next))
            for tp, offset in self._next.items():
                consumer.seek(tp, offset)

    def poll(self, timeout_ms: int) -> Polled:
        with self._errors():
            batches = self._stream().poll(timeout_ms=timeout_ms)
        polled = Polled()
        for tp, batch in batches.items():
            if not batch:
                continue
            self._next[tp] = batch[-1].offset + 1
            if tp.topic == ITEMS:
                for record in batch:
                    listing = decode_listing(_source(record))
                    if isinstance(listing, DeadLetter):
                        polled.unreadable.append(listing)
                    else:
                        polled.listings.append(listing)
            else:
                polled.entries[tp.partition] = [decode_attribution(_source(record), self._shape) for record in batch]
        return polled

    def bounds(self, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        wanted = [TopicPartition(self._topic, partition) for partition in partitions]
        with self._errors():
            consumer = self._stream()
            firsts, ends = consumer.beginning_offsets(wanted), consumer.end_offsets(wanted)
        return {tp.partition: (firsts[tp], ends[tp]) for tp in wanted}

    def known_ends(self) -> Mapping[int, int]:
        with self._errors():
            consumer = self._stream()
            known = {tp.partition: consumer.highwater(tp) for tp in self._next if tp.topic == self._topic}
        return {partition: end for partition, end in known.items() if end is not None}

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        found: dict[int, Interaction] = {}
        with self._errors():
            for run in _runs(sorted(offsets)):
                self._read_run(partition, run, found)
        return found

    def close(self) -> None:
        for consumer in (self._consumer, self._reader):
            if consumer is not None:
                with contextlib.suppress(Exception):
                    consumer.close(autocommit=False, timeout_ms=500)
        self._consumer = self._reader = None

    def _read_run(self, partition: int, run: Sequence[int], found: dict[int, Interaction]) -> None:
        reader, tp = self._rereader(), TopicPartition(self._topic, partition)
        reader.assign([tp])
        reader.seek(tp, run[0])
        waiting = set(run)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while waiting:
            records = reader.poll(timeout_ms=200, max_records=run[-1] - run[0] + 1).get(tp, ())
            for record in records:
                if record.offset in waiting:
                    entry = decode_attribution(_source(record), self._shape)
                    if not isinstance(entry, Interaction):
                        raise PreconditionFailed(
                            f"offset {record.offset} of {tp} held an interaction, and does not now"
                        )
                    found[record.offset] = entry
                    waiting.discard(record.offset)
            if records and waiting and records[-1].offset >= min(waiting):
                raise PreconditionFailed(f"offsets {sorted(waiting)[:3]} of {tp} are not there any more")
            if time.monotonic() > deadline:
                raise DependencyUnavailable(f"Kafka did not give offsets {sorted(waiting)[:3]} of {tp}")

    def _stream(self) -> KafkaConsumer:
        if self._consumer is None:
            self._consumer = self._build("freshet-refresher", self._gather_ms)
        return self._consumer

    def _rereader(self) -> KafkaConsumer:
        if self._reader is None:
            self._reader = self._build("freshet-refresher-again", _AGAIN_WAIT_MS)
        return self._reader

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (KafkaError, OSError) as exc:
            self.close()
            raise DependencyUnavailable(f"Kafka does not answer: {type(exc).__name__}: {exc}") from exc


def _source(record: object) -> SourceRecord:
    return SourceRecord(
        record.topic,  # type: ignore[attr-defined]
        record.partition,  # type: ignore[attr-defined]
        record.offset,  # type: ignore[attr-defined]
        record.timestamp,  # type: ignore[attr-defined]
        record.key,  # type: ignore[attr-defined]
        record.value,  # type: ignore[attr-defined]
        record.headers,  # type: ignore[attr-defined]
    )


def _runs(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Ascending offsets cut where the next one is too far away to read on."""
    run: list[int] = []
    for offset in offsets:
        if run and offset - run[-1] > _GAP_RECORDS:
            yield run
            run = []
        run.append(offset)
    if run:
        yield run

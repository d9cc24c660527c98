"""The log and the outbox over Kafka.

One reader follows the stream. The other connects on first use and reads single records again, such as a forgotten
user's. Unreadable `items` are only logged, because the candidates process writes their dead letters.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import structlog

from services.contracts.topics import index_deltas
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.dead_letters import dead_letter
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.contracts.topics.items import ITEMS
from services.platform.errors import PreconditionFailed
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.ports import Reader
from services.platform.stream.reading import read_offsets
from services.platform.stream.records import DeadLetter, SourceRecord
from services.platform.tracing import OFF, Tracing
from services.refresher.adapters.decoding import QueryShape, decode_attribution, decode_listing
from services.refresher.domain.records import Interaction, Listing
from services.refresher.ports import Polled

log = structlog.get_logger()

# Skipping this many records is cheaper than another fetch.
_GAP_RECORDS = 200


class KafkaLog:
    """The log over two readers: of `attributions` and `items`, and (`again`) of single `attributions`."""

    def __init__(self, reader: Reader, again: Reader, shape: QueryShape, tracing: Tracing = OFF) -> None:
        self._reader, self._again, self._shape, self._tracing = reader, again, shape, tracing

    def partitions(self) -> Sequence[int]:
        return self._reader.partitions(ATTRIBUTIONS)

    def listings(self) -> Sequence[Listing]:
        self._reader.seek({0: 0}, ITEMS)
        return list({listing.item_id: listing for listing in _listings(self._reader.read_to_end(ITEMS))}.values())

    def assign(self, offsets: Mapping[int, int]) -> None:
        self._reader.assign(offsets, ATTRIBUTIONS)

    def poll(self, timeout_ms: int) -> Polled:
        records = self._reader.poll(timeout_ms)
        polled = Polled(listings=list(_listings(record for record in records if record.topic == ITEMS)))
        for record in records:
            if record.topic != ITEMS:
                entries = polled.entries.setdefault(record.partition, [])
                entries.append(decode_attribution(record, self._shape))
        polled.traceparents = self._tracing.sampled(r for r in records if r.topic != ITEMS).values()
        return polled

    def bounds(self, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        return self._reader.bounds(partitions, ATTRIBUTIONS)

    def known_ends(self) -> Mapping[int, int]:
        return self._reader.known_end_offsets(ATTRIBUTIONS)

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        found: dict[int, Interaction] = {}
        for offset, record in read_offsets(self._again, ATTRIBUTIONS, partition, sorted(offsets), max_gap=_GAP_RECORDS):
            if record is None:
                raise PreconditionFailed(f"offset {offset} of partition {partition} is not there any more")
            entry = decode_attribution(record, self._shape)
            if not isinstance(entry, Interaction):
                raise PreconditionFailed(f"offset {offset} of partition {partition} no longer contains an interaction")
            found[offset] = entry
        return found

    def close(self) -> None:
        self._reader.close()
        self._again.close()


def _listings(records: Iterable[SourceRecord]) -> Iterator[Listing]:
    for record in records:
        listing = decode_listing(record)
        if isinstance(listing, DeadLetter):
            log.warning("item_unreadable", offset=record.offset, reason=listing.reason)
        else:
            yield listing


class KafkaOutbox:
    """Publishes records and waits for all acknowledgements."""

    def __init__(
        self,
        producer: BulkProducer,
        *,
        timeout_s: float = 15.0,
        tracing: Tracing = OFF,
    ) -> None:
        self._producer, self._tracing = producer, tracing
        self._timeout_s = timeout_s

    def publish(
        self,
        deltas: Sequence[index_deltas.IndexDelta],
        unreadable: Sequence[DeadLetter],
        tombstones: Sequence[bytes] = (),
    ) -> None:
        records = [Record(INDEX_DELTAS, key, None, partition=0) for key in tombstones]
        headers = self._tracing.headers()
        records += [Record(INDEX_DELTAS, d.key, index_deltas.encode(d), headers, partition=0) for d in deltas]
        records += [dead_letter(entry) for entry in unreadable]
        self._producer.send_many(records, self._timeout_s)

    def close(self) -> None:
        self._producer.close()

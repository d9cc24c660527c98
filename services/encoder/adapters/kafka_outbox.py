"""The outbox port over Kafka.

A forget (`ForgetUpTo`) goes to every partition of `attributions`.
"""

from collections.abc import Iterator, Sequence

from services.contracts.topics.attributions import ATTRIBUTIONS, Attributed, ForgetUpTo, encode_attribution
from services.contracts.topics.dead_letters import dead_letter
from services.contracts.topics.histories import HISTORIES, EncodedHistory
from services.contracts.topics.search_clicks import SEARCH_CLICKS, ClickRecord, encode_click, key_of
from services.platform.request_context import OFF, Headers, Tracing
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.records import DeadLetter

# More would not fit into the producer's buffer during an import (32 MiB; a state has 1-3 kB).
MAX_TOGETHER = 5_000


class KafkaOutbox:
    """Publishes records and waits for all acknowledgements."""

    def __init__(self, producer: BulkProducer, *, timeout_s: float = 15.0, tracing: Tracing = OFF) -> None:
        self._producer = producer
        self._timeout_s = timeout_s
        self._tracing = tracing

    def publish(
        self,
        attributions: Sequence[Attributed],
        dead_letters: Sequence[DeadLetter],
        clicks: Sequence[ClickRecord] = (),
    ) -> None:
        headers = self._tracing.headers()
        records = [record for attribution in attributions for record in self._records(attribution, headers)]
        records += [Record(SEARCH_CLICKS, key_of(click), encode_click(click), headers) for click in clicks]
        records += [dead_letter(dead) for dead in dead_letters]
        for start in range(0, len(records), MAX_TOGETHER):
            self._producer.send_many(records[start : start + MAX_TOGETHER], self._timeout_s)

    def keep(self, records: Sequence[EncodedHistory]) -> Sequence[int]:
        sent = [Record(HISTORIES, key, value, partition=partition) for partition, key, value in records]
        return [offset for _, offset in self._producer.send_many(sent, self._timeout_s)]

    def close(self) -> None:
        self._producer.close()

    def _records(self, attribution: Attributed, headers: Headers) -> Iterator[Record]:
        if not isinstance(attribution, ForgetUpTo):
            yield Record(ATTRIBUTIONS, attribution.item_id.encode(), encode_attribution(attribution), headers)
            return
        key, value = attribution.user_pseudonym.encode(), encode_attribution(attribution)
        for partition in range(self._producer.num_partitions(ATTRIBUTIONS)):
            yield Record(ATTRIBUTIONS, key, value, headers, partition=partition)

"""Encode all of `interactions` again with another model, and write attributions of its version.

A new model's item states need its own query states before it goes live. The live consumer's handler computes
them and holds histories in this process. The job commits its progress, so another run adds only newer records.

Letters: L = max_history.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.contracts.topics.attributions import Attributed
from services.contracts.topics.search_clicks import ClickRecord
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.ports import Outbox, SequenceEncoder
from services.offline.archive.files import Archive
from services.platform.stream.ports import Reader
from services.platform.stream.reading import read_ranges
from services.platform.stream.records import DeadLetter, SourceRecord
from services.user_state.forgetting import ForgetTopic, Forgotten
from services.user_state.ports import Store

# The maximum is high because one pass of the model gives all states of a user.
RECORDS_PER_USER = 4_096
POLL_RECORDS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ReattributionReport:
    """Numbers of records read, of attributions written, and of records that earlier runs read (`skipped`)."""

    model_version: str
    records: int
    attributions: int
    skipped: int


class AttributionsOnly:
    """Counts attributions and drops dead letters, which the live consumer has written.

    Search clicks do not depend on the model, so they are dropped unless writes_clicks is true.
    """

    def __init__(self, outbox: Outbox, *, writes_clicks: bool) -> None:
        self._outbox, self._writes_clicks = outbox, writes_clicks
        self.written = 0

    def publish(
        self,
        attributions: Sequence[Attributed],
        dead_letters: Sequence[DeadLetter],
        clicks: Sequence[ClickRecord] = (),
    ) -> None:
        clicks = clicks if self._writes_clicks else ()
        if attributions or clicks:
            self._outbox.publish(attributions, (), clicks)
            self.written += len(attributions)

    def close(self) -> None:
        self._outbox.close()


class Reattribution:
    """Runs one reattribution.

    open_stream: returns a reader of one partition of `interactions`, with the new model's own consumer group.
    new_store: returns an empty store for one partition's users. progress: called with (records done, all records).
    """

    def __init__(
        self,
        *,
        open_stream: Callable[[int], Reader],
        partitions: Sequence[int],
        outbox: Outbox,
        forgets: ForgetTopic,
        encoder: SequenceEncoder,
        vocabulary: Vocabulary,
        pseudonym_key: bytes,
        new_store: Callable[[], Store],
        progress: Callable[[int, int], None] = lambda done, total: None,
        writes_clicks: bool = False,
        archive: Archive | None = None,
    ) -> None:
        """writes_clicks: also write search clicks, after a change of the pseudonym key.

        archive: the job reads it first, then the topic from the archive's end. The caller must have verified the
        archive with `archive.writing.check_continues`.
        """
        self._open_stream = open_stream
        self._partitions = partitions
        self._outbox = AttributionsOnly(outbox, writes_clicks=writes_clicks)
        self._forgets = forgets
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._pseudonym_key = pseudonym_key
        self._new_store = new_store
        self._progress = progress
        self._archive = archive

    def run(self) -> ReattributionReport:
        """Attribute every interaction in the topic that no earlier run of this model attributed.

        Raises: PreconditionFailed if the model is unusable; DependencyUnavailable. The job can
        run again after either error, because readers recognise duplicates by position.
        """
        self._encoder.check()
        forgotten = Forgotten()
        forgotten.read(self._forgets)
        streams = {partition: self._open_stream(partition) for partition in self._partitions}
        try:
            ends = {partition: stream.end_offsets()[partition] for partition, stream in streams.items()}
            total, done, skipped = sum(ends.values()), 0, 0
            for partition, stream in streams.items():
                skipped += min(ends[partition], stream.committed()[partition])
                for applied in self._read(stream, partition, ends[partition], forgotten):
                    self._progress(done + applied, total)
                done += ends[partition]
                self._progress(done, total)
                stream.close()
        finally:
            for stream in streams.values():
                stream.close()
        return ReattributionReport(
            model_version=self._vocabulary.model_version,
            records=total,
            attributions=self._outbox.written,
            skipped=skipped,
        )

    def _read(self, stream: Reader, partition: int, end: int, forgotten: Forgotten) -> Iterator[int]:
        """Apply one partition up to `end`; yield the offset reached after each poll."""
        handler = ApplyRecords(
            store=self._new_store(),
            outbox=self._outbox,
            encoder=self._encoder,
            vocabulary=self._vocabulary,
            pseudonym_key=self._pseudonym_key,
            forgotten=forgotten,
            stores_states=False,
            records_per_user=RECORDS_PER_USER,
        )
        handler.resync(stream)
        for records in read_partition(stream, partition, end, self._archive):
            handler.apply(records)
            stream.commit(handler.progress.committable())
            yield handler.progress.watermarks[partition] + 1
        stream.committed()  # Kafka answers only after the commit


def read_partition(
    stream: Reader, partition: int, end: int, archive: Archive | None
) -> Iterator[Sequence[SourceRecord]]:
    """Yield a partition's records before `end`: the archive's, then the stream's.

    Without an archive, the stream is read from its position.
    Raises: PreconditionFailed as `Archive.records`; DependencyUnavailable.
    """
    if archive is not None:
        yield from archive.records(partition)
        stream.seek({partition: archive.partitions[partition].end})
    first = stream.positions()[partition]
    yield from read_ranges(stream, {partition: (first, end - 1)}, max_records=POLL_RECORDS)

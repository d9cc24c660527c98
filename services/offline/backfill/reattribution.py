"""All of `interactions` encoded again by another model, into attributions of its version.

A new model's item states have to rest on its own query states, so before it goes live every interaction is attributed
once more, beside the live system and with the same rules: records are merged, undone, forgotten and attributed by the
handler that the live consumer uses, over histories that live in this process only. It reads one partition after another
to its end and commits how far the attributions went out, so that running it again adds what has come since.

Letters: L = max_history.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.contracts.topics.attributions import Attributed
from services.contracts.topics.search_clicks import ClickRecord
from services.encoder.encoding import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.ports import Outbox, SequenceEncoder
from services.offline.archive.files import Archive
from services.platform.errors import DependencyUnavailable
from services.platform.stream.ports import Reader
from services.platform.stream.record import DeadLetter, SourceRecord
from services.user_state.forget_topic import ForgetTopic
from services.user_state.forgetting import Forgotten
from services.user_state.ports import Store

# Of one user at once: nothing is ever delivered again here, and one pass of the model gives the states of all of them.
RECORDS_PER_USER = 4_096
POLL_RECORDS = 20_000
POLL_MS = 500
MAX_SILENT_POLLS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class ReattributionReport:
    """records: read of `interactions`. attributions: written now; skipped: records that an earlier run had done."""

    model_version: str
    records: int
    attributions: int
    skipped: int


class _AttributionsOnly:
    """An outbox that counts, and leaves dead letters and, unless told otherwise, search clicks (which are no model's)
    to the live consumer: it has written them already."""

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
    """One run.

    open_stream: reads one partition of `interactions`, with a consumer group of the new model's own. new_store: an
    empty store for the users of one partition. progress: (records done, records in all).
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
        """writes_clicks: search clicks, too, for who changed the pseudonyms' key. archive: read first, then the topic
        from where it ends; it is whole and of this log (`services.offline.archive.writing.check_continues`)."""
        self._open_stream = open_stream
        self._partitions = partitions
        self._outbox = _AttributionsOnly(outbox, writes_clicks=writes_clicks)
        self._forgets = forgets
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._pseudonym_key = pseudonym_key
        self._new_store = new_store
        self._progress = progress
        self._archive = archive

    def run(self) -> ReattributionReport:
        """Attribute every interaction that the topic holds now and that no earlier run of this model attributed.

        Raises: PreconditionFailed when the model cannot be used; DependencyUnavailable. Run it again after either: what
        went out twice is known by its position.
        """
        self._encoder.check()
        forgotten = Forgotten()
        for record in self._forgets.read():
            if record.forget is not None:
                forgotten.add(record.forget)
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
        """Apply one partition up to `end`; yields the offsets reached."""
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
        stream.committed()  # answered after the commit is


def read_partition(
    stream: Reader, partition: int, end: int, archive: Archive | None
) -> Iterator[Sequence[SourceRecord]]:
    """What a partition holds before offset `end`: the archive's records, then what the stream has from there on; with
    no archive from where the stream is. Raises: PreconditionFailed as `Archive.records`; DependencyUnavailable."""
    if archive is not None:
        yield from archive.records(partition)
        stream.seek({partition: archive.partitions[partition].end})
    silent_polls = 0
    # Positions, not watermarks: a topic may end with what no reader is given (an aborted transaction, say).
    while stream.positions()[partition] < end:
        records = [record for record in stream.poll(POLL_MS, POLL_RECORDS) if record.offset < end]
        silent_polls = 0 if records else silent_polls + 1
        if silent_polls > MAX_SILENT_POLLS:
            raise DependencyUnavailable(f"partition {partition} cannot be read beyond {stream.positions()[partition]}")
        yield records

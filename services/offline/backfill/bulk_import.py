"""Import past interactions into the stream and the state store before going live (`freshet import`).

The import writes interactions to `interactions` like any event. The live consumer's handler computes and stores each
user's history, seen items, state and position. An event id consists of the data's name and the row number, so another
run continues an interrupted import and does nothing after a finished one.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.ports import Outbox, SequenceEncoder
from services.offline.backfill.past_interactions import Layout, check, interaction, lay_out
from services.offline.backfill.past_log import Progressed, Writer, write_past
from services.offline.backfill.reattribution import AttributionsOnly
from services.offline.datasets import Interactions
from services.platform.errors import Conflict, PreconditionFailed
from services.platform.stream.ports import Reader
from services.user_state.forgetting import ForgetTopic, Forgotten, check_same_log
from services.user_state.merging import Arrival
from services.user_state.ports import Store
from services.user_state.values import now_ms

# If an import dies, the consumer's pause ends after this long.
PAUSE_SECONDS = 60
# A batch of users has about this many interactions, because the model's output for a whole batch is held in memory.
FILL_CHUNK = 8_192


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """Results of one run; written, users_filled and attributions do not include the work of earlier runs."""

    interactions: int
    written: int
    users_filled: int
    attributions: int
    unknown_items: int
    write_seconds: float
    fill_seconds: float


class BulkImport:
    """Runs one import, during which a running encoder process pauses. That process then skips the imported records.

    settle_seconds: the import waits this long for the encoder process to notice the pause.
    """

    def __init__(
        self,
        *,
        stream: Reader,
        writer: Writer,
        outbox: Outbox,
        store: Store,
        forgets: ForgetTopic,
        encoder: SequenceEncoder,
        vocabulary: Vocabulary,
        pseudonym_key: bytes,
        attributes: bool = True,
        progress: Progressed = lambda phase, done, total: None,
        settle_seconds: float = 2.0,
    ) -> None:
        """attributes: False if the model was trained on this data: attributions would count it twice in item states."""
        self._stream = stream
        self._writer = writer
        self._store = store
        self._forgets = forgets
        self._forgotten = Forgotten()
        self._outbox = AttributionsOnly(outbox, writes_clicks=False)
        self._handler = ApplyRecords(
            store=store,
            outbox=self._outbox,
            encoder=encoder,
            vocabulary=vocabulary,
            pseudonym_key=pseudonym_key,
            forgotten=self._forgotten,
            caches=False,
            attributes=attributes,
        )
        self._progress = progress
        self._settle_seconds = settle_seconds

    def run(self, past: Interactions) -> ImportReport:
        """Write the records and fill the state store, or continue an interrupted run of the same data.

        Raises: InvalidRequest naming a row that breaks a limit (nothing is written); PreconditionFailed if the topic
        begins with other records, or another process consumes it meanwhile; DependencyUnavailable.
        """
        check(past)
        self._handler.check_model()
        partitions = list(self._stream.partitions())
        if partitions != list(range(len(partitions))):
            raise PreconditionFailed(f"an import needs every partition of the topic, not {partitions}")
        layout = lay_out(past, len(partitions))
        started = time.perf_counter()
        self._pause()
        try:
            time.sleep(self._settle_seconds)
            self._forgotten.read(self._forgets)
            check_same_log(self._forgotten.last(), self._stream.end_offsets())
            written = write_past(
                past, layout, stream=self._stream, writer=self._writer, pause=self._pause, progress=self._progress
            )
            filled_from = time.perf_counter()
            users_filled, unknown_items = self._fill(past, layout)
        except Conflict as exc:
            raise PreconditionFailed(
                "another process consumes the stream during the import: stop the encoder process, and import again"
            ) from exc
        finally:
            self._store.release()
        return ImportReport(
            interactions=len(past),
            written=written,
            users_filled=users_filled,
            attributions=self._outbox.written,
            unknown_items=unknown_items,
            write_seconds=filled_from - started,
            fill_seconds=time.perf_counter() - filled_from,
        )

    def _pause(self) -> None:
        self._store.pause_consumer(PAUSE_SECONDS)

    def _fill(self, past: Interactions, layout: Layout) -> tuple[int, int]:
        """Apply the rows beyond the watermarks; return the numbers of users and of rows with unknown items."""
        self._handler.resync(self._stream)
        progress, recorded_ms, filled = self._handler.progress, now_ms(), 0
        watermarks = np.array([progress.watermarks[partition] for partition in range(len(layout.rows))])
        rows = np.flatnonzero(layout.offset > watermarks[layout.partition])
        num_users = len(np.unique(past.users[rows]))
        ends = {number: len(mine) - 1 for number, mine in enumerate(layout.rows) if watermarks[number] < len(mine) - 1}
        counts = {partition: Counter[str]() for partition in ends}
        for users, part in _parts(past, rows):
            arrivals = [
                Arrival(int(layout.partition[row]), int(layout.offset[row]), recorded_ms, interaction(past, row))
                for row in part.tolist()
            ]
            for partition, found in self._handler.fill(arrivals).items():
                counts[partition].update(found)
            self._pause()
            filled += users
            self._progress("states", filled, num_users)
        progress.advance(ends, counts)
        self._stream.commit(progress.committable())
        self._stream.committed()  # Kafka answers only after the commit
        return filled, sum(found["unknown_items"] for found in counts.values())


def _parts(past: Interactions, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield batches as (number of users, their rows). A batch of several users has at most FILL_CHUNK rows."""
    rows = rows[np.argsort(past.users[rows], kind="stable")]
    begin = users = last = 0
    for end in np.append(np.flatnonzero(np.diff(past.users[rows])) + 1, len(rows)).tolist():
        if users and end - begin > FILL_CHUNK:
            yield users, rows[begin:last]
            begin, users = last, 0
        users, last = users + 1, end
    if last:
        yield users, rows[begin:last]

"""Copy `interactions` into an archive, and remove forgotten users from it.

A run verifies all files, and that the topic is the archive's log and still has the next record. Then it continues at
the archive's end and commits file by file.
"""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from services.contracts.topics.interactions import INTERACTIONS
from services.offline.archive.files import (
    EXPOSURE_FOLDER,
    MANIFEST,
    SCHEMA,
    Archive,
    ArchivedPartition,
    Progressed,
    is_archive,
    open_whole,
    read_chunks,
)
from services.platform.errors import PreconditionFailed
from services.platform.stream.ports import Reader
from services.platform.stream.records import DeadLetter, SourceRecord, is_covered
from services.user_state.forgetting import ForgetTopic, Forgotten, check_same_log
from services.user_state.log_identity import Anchor, Anchors, same_logs
from services.user_state.merging import read_arrival

FILE_BYTES = 64 << 20
_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveReport:
    """The counts of a run.

    copied: records in new files. forgotten: records of forgotten users that were omitted or removed. records, bytes:
    totals of the archive. partitions: partition -> (first, end) offsets. exposures: copied records of `exposures`.
    """

    copied: int
    forgotten: int
    records: int
    bytes: int
    files: int
    partitions: Mapping[int, tuple[int, int]]
    exposures: int = 0


def check_continues(archive: Archive, log: Reader) -> None:
    """Check that the log continues the archive. Raises: PreconditionFailed."""
    bounds = log.bounds(log.partitions())
    if bounds.keys() != archive.partitions.keys():
        raise PreconditionFailed(
            f"{INTERACTIONS!r} has partitions {sorted(bounds)}, {archive.folder} has {sorted(archive.partitions)}: the "
            "topic was recreated, with other positions. Archive it into another folder"
        )
    remembered = {p: (part.end - 1, part.anchors) for p, part in archive.partitions.items() if part.anchors}
    same = same_logs(log, remembered)
    for partition, part in archive.partitions.items():
        first, end = bounds[partition]
        if end < part.end or partition in remembered.keys() - same:
            found = f"ends at offset {end}" if end < part.end else "holds other records"
            raise PreconditionFailed(
                f"partition {partition} of {INTERACTIONS!r} {found}, but {archive.folder} holds it up to {part.end}: "
                "the topic was recreated, or lost its end. Archive it into another folder"
            )
        if first > part.end:
            raise PreconditionFailed(
                f"partition {partition} of {INTERACTIONS!r} begins at offset {first}, and {archive.folder} ends at "
                f"{part.end}: retention took what lies between. Archive what is left into another folder"
            )


class ArchiveInteractions:
    """One run over all partitions.

    log: a reader of `interactions` alone. before_ms: archive each partition up to its first record of this time or
    later; None means to its end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        log: Reader,
        forgets: ForgetTopic,
        before_ms: int | None = None,
        file_bytes: int = FILE_BYTES,
        progress: Progressed = lambda what, done, total: None,
    ) -> None:
        self._folder, self._log, self._forgets = folder, log, forgets
        self._before_ms, self._file_bytes, self._progress = before_ms, file_bytes, progress
        self._forgotten, self._copied, self._dropped = Forgotten(), 0, 0

    def run(self) -> ArchiveReport:
        """Update the archive.

        Raises: PreconditionFailed, with nothing changed, if a file was altered or the topic is not the archive's log;
        DependencyUnavailable.
        """
        with _alone(self._folder):
            archive = self._opened()
            self._forgotten.read(self._forgets)
            bounds = self._log.bounds(self._log.partitions())
            check_same_log(self._forgotten.last(), {partition: end for partition, (_, end) in bounds.items()})
            if archive.partitions:
                check_continues(archive, self._log)
            for partition, (first, _) in bounds.items():
                if partition not in archive.partitions:
                    archive = archive.with_partition(partition, ArchivedPartition(first=first, end=first))
            archive = self._without_forgotten(archive.save())
            todo = {partition: end - archive.partitions[partition].end for partition, (_, end) in bounds.items()}
            done = 0
            for partition in sorted(todo):
                archive = self._copy(archive, partition, bounds[partition][1], done, sum(todo.values()))
                done += todo[partition]
        files = archive.files
        return ArchiveReport(
            copied=self._copied,
            forgotten=self._dropped,
            records=sum(file.records for file in files),
            bytes=sum(file.bytes for file in files),
            files=len(files),
            partitions={number: (part.first, part.end) for number, part in sorted(archive.partitions.items())},
        )

    def _opened(self) -> Archive:
        if is_archive(self._folder):
            return open_whole(self._folder, self._progress)
        # Without `archive.json` it is unknown which tables are complete: none is deleted.
        ours = {_LOCK, f"{MANIFEST}.writing", EXPOSURE_FOLDER}
        if others := sorted({path.name for path in self._folder.iterdir()} - ours):
            raise PreconditionFailed(f"{self._folder} has no {MANIFEST} and holds {others[0]}: name an empty folder")
        return Archive(folder=self._folder)

    # -- forgetting ----------------------------------------------------------------------------------------------------

    def _without_forgotten(self, archive: Archive) -> Archive:
        last, total = self._forgotten.last(), len(archive.files)
        for done, file in enumerate(archive.files):
            self._progress("forgetting", done, total)
            if file.first > last.get(file.partition, -1):
                continue
            keys = archive.table(file, ["offset", "record_key"])
            kept = self._is_kept(file.partition, keys["offset"].to_pylist(), keys["record_key"])
            if all(kept):
                continue
            self._dropped += len(kept) - sum(kept)
            part = archive.partitions[file.partition]
            rest = archive.write(file.partition, file.first, file.end, archive.table(file).filter(pa.array(kept)))
            files = tuple(rest if one == file else one for one in part.files)
            archive = archive.with_partition(file.partition, replace(part, files=files)).save()
        return archive

    def _is_kept(self, partition: int, offsets: Sequence[int], keys: pa.ChunkedArray) -> list[bool]:
        coded = pc.dictionary_encode(keys).combine_chunks()
        codes: list[int | None] = coded.indices.to_pylist()
        up_to = [self._up_to(key).get(partition, -1) for key in coded.dictionary.to_pylist()]
        return [code is None or offset > up_to[code] for offset, code in zip(offsets, codes, strict=True)]

    def _up_to(self, key: bytes | None) -> Mapping[int, int]:
        # Bytes that are not UTF-8 become surrogates, which no user id has.
        return {} if key is None else self._forgotten.up_to(key.decode("utf-8", "surrogateescape"))

    # -- copying -------------------------------------------------------------------------------------------------------

    def _copy(self, archive: Archive, partition: int, end: int, done: int, total: int) -> Archive:
        part = archive.partitions[partition]
        begin = part.end
        chunks = read_chunks(self._log, partition, begin, end, max_bytes=self._file_bytes, before_ms=self._before_ms)
        for found, reached in chunks:
            first = self._log.bounds([partition])[partition][0]
            if first > part.end:
                raise PreconditionFailed(
                    f"partition {partition} of {INTERACTIONS!r} begins at offset {first} now: retention took records "
                    f"from {part.end} on while they were read. Raise retention.ms, and run it again"
                )
            kept = [one for one in found if not is_covered(self._up_to(one.key), one.partition, one.offset)]
            self._copied, self._dropped = self._copied + len(kept), self._dropped + len(found) - len(kept)
            file = archive.write(partition, part.end, reached, _table(kept))
            anchors = Anchors(*[Anchor.of(found[-1])] * 3).text if found else part.anchors
            part = replace(part, end=reached, anchors=anchors, files=(*part.files, file))
            archive = archive.with_partition(partition, part).save()
            self._progress("archiving", done + reached - begin, total)
        return archive


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Allow one run at a time. Raises: PreconditionFailed if another run is active or the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise PreconditionFailed(f"another `freshet archive` writes to {folder}") from exc
            yield
    except OSError as exc:
        raise PreconditionFailed(f"{folder} cannot be written: {exc}") from exc


def _table(records: Sequence[SourceRecord]) -> pa.Table:
    columns: dict[str, list[object]] = {name: [] for name in SCHEMA.names}
    for record in records:
        arrival = read_arrival(record)
        event_cells: tuple[object, ...] = (None,) * 8
        if not isinstance(arrival, DeadLetter):
            it = arrival.interaction
            event_cells = (
                it.user_id,
                it.item_id,
                it.type,
                it.value,
                it.event_time_ms,
                it.event_id,
                it.undoes_event_id,
                it.exposure_id,
            )
        headers = [{"name": name, "value": value} for name, value in record.headers]
        lay = record.partition, record.offset, record.written_ms, record.key, record.value, headers
        for column, cell in zip(columns.values(), (*lay, *event_cells), strict=True):
            column.append(cell)
    return pa.table(columns, schema=SCHEMA)

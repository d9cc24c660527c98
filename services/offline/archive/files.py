"""An archive's files: Parquet tables of records, and `archive.json`, which lists them (decision 036).

A partition's offset ranges are contiguous, but transaction markers and records of forgotten users are missing. Files
are never modified: a new file replaces another one once `archive.json` names it. An interrupted run leaves the previous
archive intact; files that `archive.json` does not name may remain.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from services.contracts.topics.interactions import INTERACTIONS
from services.platform.errors import PreconditionFailed
from services.platform.stream.ports import Reader
from services.platform.stream.reading import read_ranges
from services.platform.stream.records import SourceRecord

MANIFEST = "archive.json"
# The folder of services.offline.archive.exposures, next to the interactions.
EXPOSURE_FOLDER = "exposures"
FORMAT = 2
_BATCH, _RECORD_BYTES = 20_000, 256
_OURS = re.compile(rf"{INTERACTIONS}-\d+-\d+-\d+-[0-9a-f]{{12}}\.parquet(\.writing)?")
_TIME = pa.timestamp("ms", "UTC")

# The record as in the topic, then its decoded fields, null for unreadable records.
SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        ("record_key", pa.binary()),
        ("record_value", pa.binary()),
        ("record_headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))),
        ("user_id", pa.string()),
        ("item_id", pa.string()),
        ("type", pa.string()),
        ("value", pa.float64()),
        ("event_time", _TIME),
        ("event_id", pa.string()),
        ("undoes_event_id", pa.string()),
        ("exposure_id", pa.string()),
    ]
)


_NEVER_NULL = {"partition", "offset", "timestamp", "record_headers"}

_T = TypeVar("_T")

# Arguments: the step's name, the number of files or offsets that are done, and their total number.
Progressed = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveFile:
    """Records from offset `first` to before `end`."""

    partition: int
    first: int
    end: int
    records: int
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file name. It contains a part of the checksum, so a replacement has another name."""
        return f"{INTERACTIONS}-{self.partition}-{self.first:012d}-{self.end:012d}-{self.sha256[:12]}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedPartition:
    """Archived offsets `first` to before `end`.

    anchors: `log_identity.Anchors` as text. They identify the log by the last record read; "" if none was read.
    """

    first: int
    end: int
    anchors: str = ""
    files: Sequence[ArchiveFile] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """An archive as in its `archive.json`."""

    folder: Path
    partitions: Mapping[int, ArchivedPartition] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an archive. Raises: PreconditionFailed if `archive.json` is missing, invalid or altered."""
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except OSError as exc:
            raise PreconditionFailed(f"{folder} is no archive: {path} cannot be read ({exc.strerror})") from exc
        try:
            manifest = json.loads(text)
            form, topic = manifest["format"], manifest["topic"]
            if (form, topic) != (FORMAT, INTERACTIONS):
                allowed = f"{INTERACTIONS!r} in format {FORMAT}"
                raise PreconditionFailed(f"{path} is of topic {topic!r} in format {form}; this version reads {allowed}")
            parts = {
                int(number): _typed(
                    ArchivedPartition, part | {"files": [_typed(ArchiveFile, f) for f in part["files"]]}
                )
                for number, part in manifest["partitions"].items()
            }
            found = cls(folder=folder, partitions=parts)
            own = manifest["sha256"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise PreconditionFailed(f"{path} is not what `freshet archive` writes: {exc!r}") from exc
        if (whole := found._text()) != text:
            wanted = json.loads(whole)["sha256"]
            raise PreconditionFailed(f"{path} was altered: it says sha256 {own}, its contents make {wanted}")
        return found

    @property
    def files(self) -> list[ArchiveFile]:
        """All files, by partition and offset."""
        return [file for _, part in sorted(self.partitions.items()) for file in part.files]

    def data(self, file: ArchiveFile) -> bytes:
        """Return the file's bytes. Raises: PreconditionFailed if their checksum differs."""
        path = self.folder / file.name
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise PreconditionFailed(f"{path} cannot be read ({exc.strerror}); {MANIFEST} lists it") from exc
        found = len(data), hashlib.sha256(data).hexdigest()
        if found != (file.bytes, file.sha256):
            raise PreconditionFailed(
                f"{path} has {found[0]} bytes and sha256 {found[1]}; {MANIFEST} says {file.bytes} and {file.sha256}"
            )
        return data

    def table(self, file: ArchiveFile, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the file's rows by offset.

        Raises: PreconditionFailed, see `data`, or if the file has no table of records.
        """
        path, data = self.folder / file.name, self.data(file)
        try:
            whole = pq.ParquetFile(pa.BufferReader(data))
            if whole.schema_arrow.names != SCHEMA.names or whole.schema_arrow.types != SCHEMA.types:
                raise PreconditionFailed(f"{path} has columns {whole.schema_arrow.names}; expected {SCHEMA.names}")
            table = whole.read(columns=None if columns is None else list(columns))
        except (pa.ArrowException, OSError) as exc:
            raise PreconditionFailed(f"{path} is no Parquet table that can be read: {exc}") from exc
        for name in _NEVER_NULL & set(table.column_names):
            if table.column(name).null_count:
                raise PreconditionFailed(f"{path}: column {name} holds nulls; allowed: none")
        return table

    def records(self, partition: int) -> Iterator[list[SourceRecord]]:
        """Yield records as in the topic, some thousands at a time."""
        for file in self.partitions[partition].files:
            for batch in self.table(file).to_batches(max_chunksize=_BATCH):
                yield list(_records(batch))

    def write(self, partition: int, first: int, end: int, table: pa.Table) -> ArchiveFile:
        """Write a new file durably. `archive.json` names it only after `save`."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue()
        if not pq.read_table(pa.BufferReader(data)).equals(table):
            raise AssertionError(f"Parquet gives other rows of partition {partition} back than were written")
        file = ArchiveFile(
            partition=partition,
            first=first,
            end=end,
            records=len(table),
            bytes=data.size,
            sha256=hashlib.sha256(data).hexdigest(),
        )
        put_durably(self.folder / file.name, data)
        return file

    def with_partition(self, number: int, part: ArchivedPartition) -> "Archive":
        """Return the archive with this partition replaced."""
        return replace(self, partitions={**self.partitions, number: part})

    def save(self) -> Self:
        """Write `archive.json`, then delete tables that it does not name."""
        put_durably(self.folder / MANIFEST, self._text())
        named = {file.name for file in self.files}
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in named:
                path.unlink()
        return self

    def _text(self) -> bytes:
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "topic": INTERACTIONS,
            "partitions": {str(number): asdict(part) for number, part in self.partitions.items()},
        }
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def open_whole(
    folder: Path,
    progress: Progressed = lambda what, done, total: None,
    *,
    partitions: Sequence[int] | None = None,
) -> Archive:
    """Open an archive and verify the checksums of all files, or of some partitions.

    Raises: PreconditionFailed naming the file, what was expected and what was found.
    """
    archive, done = Archive.open(folder), 0
    for number, part in archive.partitions.items():
        if partitions is not None and number not in partitions:
            continue
        ranges = [(part.first, part.first), *((file.first, file.end) for file in part.files), (part.end, part.end)]
        for (_, end), (first, _) in pairwise(ranges):
            if first != end:
                raise PreconditionFailed(
                    f"{folder / MANIFEST}: partition {number} goes on at offset {first}, not at {end}"
                )
        for file in part.files:
            archive.data(file)
            done += 1
            progress("verifying", done, len(archive.files))
    return archive


def read_chunks(
    log: Reader, partition: int, start: int, end: int, *, max_bytes: int, before_ms: int | None = None
) -> Iterator[tuple[list[SourceRecord], int]]:
    """Yield the records of each new file with the file's end offset (exclusive), up to `end`.

    before_ms: stop at the first record of this time or later.
    max_bytes: a file ends after the poll that reaches this size. A record's size is the bytes of its key, value and
    headers, plus _RECORD_BYTES.
    Raises: DependencyUnavailable.
    """
    chunk, size, reached = list[SourceRecord](), 0, start
    for records in read_ranges(log, {partition: (start, end - 1)}, max_records=_BATCH):
        for record in records:
            if before_ms is not None and record.written_ms >= before_ms:
                if record.offset > reached:
                    yield chunk, record.offset
                return
            chunk.append(record)
            size += _RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
            size += sum(len(name) + len(value or b"") for name, value in record.headers)
        if size >= max_bytes:
            reached = chunk[-1].offset + 1
            yield chunk, reached
            chunk, size = [], 0
    if end > reached:
        yield chunk, end


def is_archive(folder: Path) -> bool:
    """Whether a folder has an `archive.json`."""
    return (folder / MANIFEST).is_file()


def put_durably(path: Path, data: Any) -> None:
    """Write to a temporary file, sync, and rename."""
    aside = path.with_name(path.name + ".writing")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _typed(kind: type[_T], raw: Mapping[str, Any]) -> _T:
    """Check and return a dataclass. Raises: TypeError, ValueError naming a field of wrong type or below 0."""
    for one in fields(kind):  # type: ignore[arg-type]
        value = raw.get(one.name)
        if one.type in (int, str) and type(value) is not one.type:
            raise TypeError(f"{one.name}={value!r:.80}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{one.name}={value}")
    return kind(**raw)


def _records(batch: pa.RecordBatch) -> Iterator[SourceRecord]:
    times, headers = batch["timestamp"].cast(pa.int64()).to_pylist(), batch["record_headers"].to_pylist()
    names = ("partition", "offset", "record_key", "record_value")
    for partition, offset, key, value, written_ms, sides in zip(
        *(batch[name].to_pylist() for name in names), times, headers, strict=True
    ):
        pairs = [(side["name"], side["value"]) for side in sides]
        yield SourceRecord(INTERACTIONS, partition, offset, written_ms, key, value, pairs)

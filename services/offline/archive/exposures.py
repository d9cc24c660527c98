"""Exposures as Parquet files by day, next to the archive of interactions.

`exposures/day=2026-11-27/2-000000000100-000000000250.parquet` has that day's exposures of partition 2 from offset 100
to before 250; `exposures/archived.json` has each partition's archived end. Files of an interrupted
run end beyond it; the next run deletes them. A run also removes records of forgotten users. User ids are pseudonyms.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.contracts.topics.experiments import VISITOR
from services.contracts.topics.exposures import EXPOSURES, Exposure, decode_exposure
from services.offline.archive.files import EXPOSURE_FOLDER, Progressed, put_durably, read_chunks
from services.platform.errors import FreshetError, PreconditionFailed
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord

MANIFEST = "archived.json"
_FILE_BYTES = 64 << 20
_TIME = pa.timestamp("ms", "UTC")

SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        # The user's pseudonym, else the visitor of the request's context, else the exposure id.
        ("user_key", pa.string()),
        ("exposure_id", pa.string()),
        ("shown", _TIME),
        ("surface", pa.string()),
        ("model_version", pa.string()),
        ("first_position", pa.int32()),
        ("item_ids", pa.list_(pa.string())),
        ("sources", pa.list_(pa.string())),
        # Empty if each is 1.
        ("propensities", pa.list_(pa.float32())),
        ("teams", pa.list_(pa.int8())),
        ("context", pa.map_(pa.string(), pa.string())),
        (
            "assignments",
            pa.list_(pa.struct([("experiment", pa.string()), ("arm", pa.string()), ("share", pa.float64())])),
        ),
    ]
)


def exposures_table(records: Sequence[SourceRecord]) -> pa.Table:
    """Return the readable records as a table."""
    rows = [row for record in records if (row := _row(record)) is not None]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def archive_exposures(
    folder: Path,
    log: Reader,
    forgotten: Mapping[str, int],
    progress: Progressed = lambda what, done, total: None,
) -> int:
    """Archive the topic's new records; return their number.

    log: a reader of `exposures` alone. forgotten: pseudonym -> Unix milliseconds up to which the user's
    records are removed. Raises: PreconditionFailed if retention deleted records before they were archived, or if the
    topic is not the archived one; DependencyUnavailable.
    """
    place = folder / EXPOSURE_FOLDER
    place.mkdir(parents=True, exist_ok=True)
    ends = archived_ends(folder)
    for path in _files(place):
        partition, _, end = _range(path)
        if end > ends.get(partition, 0):
            path.unlink()
        else:
            _without(path, forgotten)
    bounds = log.bounds(log.partitions())
    for partition, (first, end) in bounds.items():
        if not first <= ends.setdefault(partition, first) <= end:
            raise PreconditionFailed(
                f"partition {partition} of {EXPOSURES!r} has offsets {first} to {end}, and {place} ends at "
                f"{ends[partition]}: retention took what lies between, or the topic is another one. Archive into "
                "another folder"
            )
    total, copied = sum(end - ends[partition] for partition, (_, end) in bounds.items()), 0
    for partition, (_, end) in sorted(bounds.items()):
        for records, reached in read_chunks(log, partition, ends[partition], end, max_bytes=_FILE_BYTES):
            _write(place, partition, ends[partition], reached, exposures_table(records), forgotten)
            ends[partition] = reached
            put_durably(place / MANIFEST, json.dumps({"topic": EXPOSURES, "ends": ends}).encode())
            copied += len(records)
            progress("exposures", copied, total)
    return copied


def archived_ends(folder: Path) -> dict[int, int]:
    """Return each partition's archived end offset; empty before the first run."""
    path = folder / EXPOSURE_FOLDER / MANIFEST
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        return {int(partition): int(end) for partition, end in found["ends"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise PreconditionFailed(f"{path} is not what `freshet archive` writes: {exc!r}") from exc


def exposure_files(folder: Path) -> list[Path]:
    """Return an archive's files, without those of an interrupted run."""
    ends = archived_ends(folder)
    return [path for path in _files(folder / EXPOSURE_FOLDER) if _range(path)[2] <= ends.get(_range(path)[0], 0)]


def _row(record: SourceRecord) -> dict[str, object] | None:
    try:
        one = decode_exposure(record.value)
    except FreshetError:
        return None
    return {
        "partition": record.partition,
        "offset": record.offset,
        "user_key": _user(record, one),
        "exposure_id": one.exposure_id,
        "shown": one.shown_ms,
        "surface": one.surface,
        "model_version": one.model_version,
        "first_position": one.first_position,
        "item_ids": one.item_ids,
        "sources": one.sources,
        "propensities": one.propensities,
        "teams": one.teams,
        "context": list(one.context.items()),
        "assignments": [{"experiment": name, "arm": arm, "share": share} for name, arm, share in one.assignments],
    }


def _user(record: SourceRecord, one: Exposure) -> str:
    key = (record.key or b"").decode("utf-8", "replace")
    if key != one.exposure_id:
        return key
    visitor = one.context.get(VISITOR)
    return f"visitor {visitor}" if visitor else key


def _write(place: Path, partition: int, first: int, end: int, table: pa.Table, forgotten: Mapping[str, int]) -> None:
    table = _kept(table, forgotten)
    days = [datetime.fromtimestamp(ms / 1000, UTC).date().isoformat() for ms in _milliseconds(table)]
    for day in sorted(set(days)):
        path = place / f"day={day}" / f"{partition}-{first:012d}-{end:012d}.parquet"
        path.parent.mkdir(exist_ok=True)
        _save(path, table.filter(pa.array([one == day for one in days])))


def _without(path: Path, forgotten: Mapping[str, int]) -> None:
    if not forgotten:
        return
    users = pq.read_table(path, columns=["user_key"]).column("user_key").unique().to_pylist()
    if forgotten.keys() & set(users):
        table = pq.read_table(path, schema=SCHEMA)
        kept = _kept(table, forgotten)
        if len(kept) < len(table):
            _save(path, kept)


def _kept(table: pa.Table, forgotten: Mapping[str, int]) -> pa.Table:
    users = table.column("user_key").to_pylist()
    return table.filter(
        pa.array(
            [ms > forgotten.get(user, -1) for user, ms in zip(users, _milliseconds(table), strict=True)], pa.bool_()
        )
    )


def _milliseconds(table: pa.Table) -> list[int]:
    times: list[int] = table.column("shown").cast(pa.int64()).to_pylist()
    return times


def _files(place: Path) -> list[Path]:
    return sorted(place.glob("day=*/*.parquet"))


def _range(path: Path) -> tuple[int, int, int]:
    partition, first, end = path.stem.split("-")
    return int(partition), int(first), int(end)


def _save(path: Path, table: pa.Table) -> None:
    aside = path.with_suffix(".writing")
    pq.write_table(table, aside, compression="zstd")
    aside.replace(path)

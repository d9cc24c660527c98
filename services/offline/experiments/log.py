"""Open exposures and interactions as two DuckDB tables, each from the archive's files and its topic's newer records.

`exposures` has the columns of `archive.exposures.SCHEMA` from `user_key` on. `interactions` has user_key (the same
pseudonym), item_id, type, value, event_time and exposure_id. Neither table has
undone interactions, or records of forgotten users from before they were forgotten.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.forgets import Forget
from services.offline.archive.exposures import SCHEMA, archived_ends, exposure_files, exposures_table
from services.offline.archive.files import Archive, is_archive
from services.platform.errors import PreconditionFailed
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.records import DeadLetter, SourceRecord
from services.user_state.merging import read_arrival

_TIME = pa.timestamp("ms", "UTC")
_INTERACTIONS = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
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


@contextmanager
def opened_log(
    archive: Path | None,
    *,
    exposures: Reader | None,
    interactions: Reader | None,
    forgets: Sequence[Forget],
    key: bytes,
    memory: str = "800MB",
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the two tables. Without a reader, a table has the archive's records alone.

    key: makes the pseudonyms. Raises: PreconditionFailed, DependencyUnavailable.
    """
    connection = duckdb.connect(config={"memory_limit": memory, "preserve_insertion_order": False})
    try:
        _open_exposures(connection, archive, exposures, forgets, key)
        _open_interactions(connection, archive, interactions, forgets, key)
        yield connection
    finally:
        connection.close()


def _open_exposures(
    connection: duckdb.DuckDBPyConnection,
    archive: Path | None,
    log: Reader | None,
    forgets: Sequence[Forget],
    key: bytes,
) -> None:
    files = [] if archive is None else exposure_files(archive)
    ends = {} if archive is None else archived_ends(archive)
    tail = pa.Table.from_pylist([], schema=SCHEMA)
    if log is not None:
        tail = pa.concat_tables([tail, *(exposures_table(some) for some in _since(log, ends))])
    connection.register("exposure_tail", tail)
    forgotten = [{"user_key": pseudonym_of(one.user_id, key), "until": one.requested_ms} for one in forgets]
    schema = pa.schema([("user_key", pa.string()), ("until", _TIME)])
    connection.register("forgotten", pa.Table.from_pylist(forgotten, schema=schema))
    columns = ", ".join(SCHEMA.names[2:])
    parts = [f"SELECT {columns} FROM exposure_tail"]
    if files:
        named = ", ".join(quoted(str(path)) for path in files)
        parts.append(f"SELECT {columns} FROM read_parquet([{named}], hive_partitioning=false, union_by_name=true)")
    connection.execute(
        f"CREATE VIEW exposures AS SELECT e.* FROM ({' UNION ALL '.join(parts)}) e "
        "WHERE NOT EXISTS (SELECT 1 FROM forgotten f WHERE f.user_key = e.user_key AND e.shown <= f.until)"
    )


def _open_interactions(
    connection: duckdb.DuckDBPyConnection,
    folder: Path | None,
    log: Reader | None,
    forgets: Sequence[Forget],
    key: bytes,
) -> None:
    archive = Archive.open(folder) if folder is not None and is_archive(folder) else None
    files = [] if archive is None else archive.files
    ends = {} if archive is None else {number: part.end for number, part in archive.partitions.items()}
    tail = pa.Table.from_pylist([], schema=_INTERACTIONS)
    if log is not None:
        tail = pa.concat_tables([tail, *(_interactions(some) for some in _since(log, ends))])
    connection.register("interaction_tail", tail)
    columns = ", ".join(f'"{name}"' for name in _INTERACTIONS.names)
    parts = [f"SELECT {columns} FROM interaction_tail"]
    if archive is not None and files:
        named = ", ".join(quoted(str(archive.folder / file.name)) for file in files)
        parts.append(f"SELECT {columns} FROM read_parquet([{named}]) WHERE user_id IS NOT NULL")
    void = [
        {"user_id": one.user_id, "partition": partition, "up_to": offset}
        for one in forgets
        for partition, offset in one.up_to.items()
    ]
    schema = pa.schema([("user_id", pa.string()), ("partition", pa.int32()), ("up_to", pa.int64())])
    connection.register("void", pa.Table.from_pylist(void, schema=schema))
    connection.execute(
        f"CREATE VIEW all_records AS SELECT r.* FROM ({' UNION ALL '.join(parts)}) r WHERE NOT EXISTS (SELECT 1 FROM "
        'void v WHERE v.user_id = r.user_id AND v."partition" = r."partition" AND r."offset" <= v.up_to)'
    )
    users = connection.execute("SELECT DISTINCT user_id FROM all_records").fetchall()
    connection.register(
        "people",
        pa.table(
            {
                "user_id": pa.array([one for (one,) in users], pa.string()),
                "user_key": pa.array([pseudonym_of(one, key) for (one,) in users], pa.string()),
            }
        ),
    )
    connection.execute(
        "CREATE TABLE interactions AS "
        "WITH first AS (SELECT DISTINCT ON (user_id, event_id) * FROM all_records WHERE undoes_event_id = '') "
        "SELECT p.user_key, f.item_id, f.type, f.value, f.event_time, f.exposure_id "
        "FROM first f JOIN people p USING (user_id) "
        "WHERE NOT EXISTS (SELECT 1 FROM all_records u WHERE u.user_id = f.user_id AND u.undoes_event_id = f.event_id)"
    )


def _since(log: Reader, ends: Offsets) -> Iterator[list[SourceRecord]]:
    """Yield one list of the topic's records from these offsets on. Raises: PreconditionFailed for a gap."""
    bounds = log.bounds(log.partitions())
    begin = {partition: max(first, ends.get(partition, first)) for partition, (first, _) in bounds.items()}
    for partition, (first, end) in bounds.items():
        if ends.get(partition, first) < first or begin[partition] > end:
            raise PreconditionFailed(
                f"partition {partition} goes from offset {first} to {end}, and the archive ends at {ends[partition]}: "
                "archive more often than retention takes records, or name the archive of this topic"
            )
    log.seek(begin)
    yield log.read_to_end()


def _interactions(records: Sequence[SourceRecord]) -> pa.Table:
    rows, names = [], set(_INTERACTIONS.names) - {"partition", "offset", "event_time"}
    for record in records:
        arrival = read_arrival(record)
        if isinstance(arrival, DeadLetter):
            continue
        one = arrival.interaction
        row = {"partition": record.partition, "offset": record.offset, "event_time": one.event_time_ms}
        rows.append(row | {name: getattr(one, name) for name in names})
    return pa.Table.from_pylist(rows, schema=_INTERACTIONS)


def quoted(text: str) -> str:
    """Return an SQL literal."""
    return "'" + text.replace("'", "''") + "'"

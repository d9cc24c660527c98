"""An archive holds what the topic held, whenever a run ends; what is not what was written is refused."""

import fcntl
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.streams import NOW_MS, append, forget, interaction
from fakes.encoder import MemoryForgetLog, MemoryStream
from fakes.stream import MemoryTopics

from services.contracts.topics.interactions import INTERACTIONS, encode_interaction
from services.offline.archive import files
from services.offline.archive.files import MANIFEST, Archive, open_whole, read_chunks
from services.offline.archive.writing import ArchiveInteractions, ArchiveReport
from services.offline.datasets import load_dataset
from services.platform.errors import FreshetError, PreconditionFailed
from services.platform.stream.records import SourceRecord

PARTITIONS = 3


def fill(stream: MemoryStream, count: int, seed: int = 1) -> None:
    """Interactions, undos, and what nobody can read."""
    random = np.random.default_rng(seed)
    first = len(stream.log[0])
    for number in range(count):
        user = int(random.integers(0, 9))
        partition, event_id = user % PARTITIONS, f"{seed}-{first + number}"
        at = NOW_MS + 1_000 * (first + number)
        match number % 12:
            case 5:
                event = interaction(user, item_id="", event_id=event_id, undoes_event_id=f"{seed}-{first + number - 3}")
            case _:
                event = interaction(user, int(random.integers(0, 60)), event_id=event_id, event_time_ms=at - number % 5)
        stream.append(partition, event.user_id.encode(), encode_interaction(event), at)
        match number % 12:
            case 3:
                stream.append(partition, f"user-{user}".encode(), b"\xff", at, [("content-type", b"?"), ("null", None)])
            case 7:
                stream.append(partition, None, None, at)
            case 9:
                value = json.dumps({"user_id": f"user-{user}", "item_id": 7, "value": number}).encode()
                stream.append(
                    partition, f"user-{user}".encode(), value, at, [("content-type", b"application/json"), ("x", b"")]
                )


def full(count: int = 100) -> MemoryStream:
    stream = MemoryStream(PARTITIONS)
    fill(stream, count)
    stream.per_poll = 7
    return stream


def run(folder: Path, stream: MemoryStream, forgets: MemoryForgetLog | None = None, **options: Any) -> ArchiveReport:
    """file_bytes: small, so that there are several files."""
    log, forgets = stream.reader(), MemoryForgetLog() if forgets is None else forgets.reader()
    return ArchiveInteractions(folder, log=log, forgets=forgets, **({"file_bytes": 3_000} | options)).run()


def plain(record: SourceRecord) -> tuple[Any, ...]:
    sides = tuple(record.headers)
    return record.partition, record.offset, record.written_ms, record.key, record.value, sides


def archived(folder: Path) -> list[tuple[Any, ...]]:
    """Every record of a whole archive."""
    archive = open_whole(folder)
    return [plain(one) for number in range(PARTITIONS) for some in archive.records(number) for one in some]


def logged(stream: MemoryStream, kept: Callable[[SourceRecord], bool] = lambda record: True) -> list[tuple[Any, ...]]:
    return [plain(record) for log in stream.log for record in log if kept(record)]


def contents(folder: Path) -> dict[str, bytes]:
    """The folder's files, but for the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def refused(folder: Path, stream: MemoryStream, match: str, **options: Any) -> None:
    """The run is refused, and changes nothing."""
    before = contents(folder)
    with pytest.raises(PreconditionFailed, match=match):
        run(folder, stream, **options)
    assert contents(folder) == before


# -- what it holds -----------------------------------------------------------------------------------------------------


def test_every_record_is_there_as_it_lay(tmp_path: Path) -> None:
    stream = full()
    report = run(tmp_path, stream)
    assert archived(tmp_path) == logged(stream)
    assert (report.records, report.copied, report.forgotten) == (len(logged(stream)),) * 2 + (0,)
    assert report.partitions == {number: (0, len(log)) for number, log in enumerate(stream.log)}
    assert report.files > 2 * PARTITIONS


def test_another_program_reads_columns_of_what_can_be_read(tmp_path: Path) -> None:
    stream = MemoryStream(PARTITIONS)
    append(stream, interaction(0, 5, event_id="", event_time_ms=NOW_MS - 7, value=2.5))
    stream.append(0, b"user-0", b"\xff", NOW_MS)
    run(tmp_path, stream)
    (path,) = tmp_path.glob("*.parquet")
    columns = ["user_id", "item_id", "type", "value", "event_id", "undoes_event_id"]
    assert pq.read_table(path, columns=columns).to_pylist() == [
        dict(zip(columns, ("user-0", "item-5", "click", 2.5, "0-0", ""), strict=True)),
        dict.fromkeys(columns),
    ]
    times = [
        [one.timestamp() * 1000 for one in pq.read_table(path)[name].to_pylist() if one] for name in ("timestamp",)
    ]
    assert times == [[NOW_MS, NOW_MS]]
    assert pq.read_table(path)["event_time"].cast("int64").to_pylist() == [NOW_MS - 7, None]


def test_a_second_run_goes_on_where_the_archive_ends(tmp_path: Path) -> None:
    stream = full(60)
    run(tmp_path, stream)
    before = contents(tmp_path)
    assert run(tmp_path, stream).copied == 0
    assert contents(tmp_path) == before
    fill(stream, 60, seed=2)
    report = run(tmp_path, stream)
    assert archived(tmp_path) == logged(stream)
    assert report.copied < report.records
    assert before.items() - contents(tmp_path).items() == {(MANIFEST, before[MANIFEST])}


def test_a_time_bounds_what_is_archived(tmp_path: Path) -> None:
    stream = MemoryStream(1)
    for written in (1, 2, 3, 9, 4):
        stream.append(0, b"user-0", b"\xff", written)
    assert run(tmp_path, stream, before_ms=4).partitions == {0: (0, 3)}
    assert run(tmp_path, stream, before_ms=9).partitions == {0: (0, 3)}
    assert run(tmp_path, stream).partitions == {0: (0, 5)}


def test_offsets_that_no_reader_is_given_leave_no_gap(tmp_path: Path) -> None:
    stream = full()
    for partition in range(PARTITIONS):
        stream.append(partition, None, b"last", NOW_MS)
    stream.compact(INTERACTIONS)
    run(tmp_path, stream)
    assert len(archived(tmp_path)) == sum(len({one.key for one in log}) for log in stream.log)
    fill(stream, 5)
    run(tmp_path, stream)


# -- forgetting --------------------------------------------------------------------------------------------------------


def test_a_run_takes_forgotten_users_out(tmp_path: Path) -> None:
    stream, forgets = full(), MemoryForgetLog()
    run(tmp_path, stream, forgets)
    before = contents(tmp_path)
    last = max(record.offset for record in stream.log[1] if record.key == b"user-4") - 3
    forgets.append(forget(4, p1=last))
    fill(stream, 30, seed=3)
    forgets.append(forget(2, p2=len(stream.log[2]) - 1))
    report = run(tmp_path, stream, forgets)

    def kept(record: SourceRecord) -> bool:
        return record.key != b"user-2" and (record.key != b"user-4" or record.offset > last)

    assert archived(tmp_path) == logged(stream, kept)
    assert b"user-4" in {record[3] for record in archived(tmp_path)}
    assert report.forgotten == len(logged(stream)) - len(logged(stream, kept)) > 0
    after = contents(tmp_path)
    assert {name for name in before if f"{INTERACTIONS}-0-" in name} < after.keys()
    assert not any(b"user-2" in data for data in after.values())
    assert run(tmp_path, stream, forgets).forgotten == 0
    assert contents(tmp_path) == after


def test_a_partition_of_the_forgotten_alone_still_goes_on(tmp_path: Path) -> None:
    stream, forgets = MemoryStream(1), MemoryForgetLog()
    for number in range(20):
        append(stream, interaction(1, number, event_id=f"e{number}"))
    run(tmp_path, stream, forgets)
    forgets.append(forget(1, p0=19))
    assert run(tmp_path, stream, forgets).records == 0
    append(stream, interaction(1, 3, event_id="again"))
    assert run(tmp_path, stream, forgets).records == 1


# -- ended anywhere ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["half", "before", "after"])
def test_killed_anywhere_it_is_whole_and_goes_on(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every file that is written, half of it on the disk or all, renamed or not."""
    original = files.put_durably
    moments, kill_at = 0, 0

    def put(path: Path, data: Any) -> None:
        nonlocal moments
        moments += 1
        if moments == kill_at and when != "after":
            path.with_name(path.name + ".writing").write_bytes(
                bytes(data)[: len(bytes(data)) // (2 - (when == "before"))]
            )
            raise Killed
        original(path, data)
        if moments == kill_at:
            raise Killed

    monkeypatch.setattr(files, "put_durably", put)
    stream, forgets = full(40), MemoryForgetLog()
    expected = logged(stream, lambda record: record.key != b"user-2")
    for kill_at in range(1, 60):
        folder = tmp_path / str(kill_at)
        moments = -1_000
        run(folder, stream, before_ms=NOW_MS + 20_000, file_bytes=1_500)
        forgets = MemoryForgetLog()
        forgets.append(forget(2, p2=len(stream.log[2]) - 1))
        before, moments = logged(stream), 0
        try:
            run(folder, stream, forgets, file_bytes=1_500)
            break
        except Killed:
            assert set(archived(folder)) <= set(before)
        moments = -1_000
        run(folder, stream, forgets)
        assert archived(folder) == expected
        assert {path.name for path in folder.iterdir()} == {MANIFEST, ".lock"} | {
            one.name for one in open_whole(folder).files
        }
    assert 15 < kill_at < 59


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_refused_with_what_and_where(tmp_path: Path) -> None:
    stream = full(20)
    run(tmp_path, stream, file_bytes=1 << 20)
    fill(stream, 3)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for at in range(0, len(data), 1 if path.name == MANIFEST else 41):
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
            with pytest.raises(PreconditionFailed, match=path.name):
                open_whole(tmp_path)
        path.write_bytes(data)
    assert archived(tmp_path) == logged(stream)[: len(archived(tmp_path))] or run(tmp_path, stream).copied


def one_file(folder: Path) -> Path:
    return min(folder.glob("*.parquet"))


MUTATIONS: dict[str, Callable[[Path], str]] = {
    "truncated": lambda path: (
        path.write_bytes(path.read_bytes()[:-9]) and f"{path.name} has .* bytes and sha256 .* says"
    ),
    "missing": lambda path: path.unlink() or f"{path.name} cannot be read .*lists it",
    "another one's": lambda path: path.write_bytes(max(path.parent.glob("*.parquet")).read_bytes()) and path.name,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutated_file_is_refused_and_everything_stays(tmp_path: Path, mutate: Callable[[Path], str]) -> None:
    stream = full()
    run(tmp_path, stream)
    fill(stream, 20)
    match = mutate(one_file(tmp_path))
    refused(tmp_path, stream, match)
    with pytest.raises(FreshetError, match=match):
        load_dataset(tmp_path)


def test_a_range_that_is_missing_is_refused(tmp_path: Path) -> None:
    run(tmp_path, full())
    archive = Archive.open(tmp_path)
    part = archive.partitions[0]
    without = files.replace(part, files=(*part.files[:1], *part.files[2:]))
    archive.with_partition(0, without).save()
    with pytest.raises(PreconditionFailed, match=f"partition 0 goes on at offset {part.files[2].first}, not at"):
        open_whole(tmp_path)


def test_what_retention_took_before_it_was_archived_is_named(tmp_path: Path) -> None:
    stream = full()
    run(tmp_path, stream)
    end = len(stream.log[1])
    fill(stream, 60)
    stream.expire(INTERACTIONS, 1, end + 1)
    refused(tmp_path, stream, f"partition 1 .* begins at offset {end + 1}, .* ends at {end}: retention took")
    stream.expire(INTERACTIONS, 1, end)
    run(tmp_path, stream)
    assert archived(tmp_path) == logged(stream)


def test_retention_that_overtakes_a_run_is_noticed(tmp_path: Path) -> None:
    stream = full()

    def overtake(what: str, done: int, total: int) -> None:
        stream.expire(INTERACTIONS, 2, len(stream.log[2]) - 1)

    with pytest.raises(PreconditionFailed, match="retention took records from 0 on while they were read"):
        run(tmp_path, stream, progress=overtake)
    assert archived(tmp_path) == [record for record in logged(stream) if record[0] < 2]


def test_another_log_is_refused(tmp_path: Path) -> None:
    stream = full()
    run(tmp_path, stream)
    refused(tmp_path, full(20), "ends at offset .*recreated")
    other = MemoryStream(PARTITIONS)
    fill(other, 200, seed=7)
    refused(tmp_path, other, "holds other records")
    refused(tmp_path, MemoryStream(4), r"has partitions \[0, 1, 2, 3\], .* has \[0, 1, 2\]")


def test_a_forget_of_another_log_is_refused(tmp_path: Path) -> None:
    stream, forgets = full(), MemoryForgetLog()
    run(tmp_path, stream)
    forgets.append(forget(2, p2=10**6))
    refused(tmp_path, stream, "voids a user up to 1000000", forgets=forgets)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    refused(tmp_path, full(5), f"has no {MANIFEST} and holds thesis.tex")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PreconditionFailed, match="file cannot be written"):
        run(tmp_path / "file", full(5))


def test_without_its_manifest_nothing_is_taken_for_garbage(tmp_path: Path) -> None:
    run(tmp_path, full())
    (tmp_path / MANIFEST).unlink()
    refused(tmp_path, full(), f"has no {MANIFEST} and holds {INTERACTIONS}-0-")


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(tmp_path, full(5), "another `freshet archive` writes")


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_counts_what_the_stream_counts(tmp_path: Path) -> None:
    stream, forgets = MemoryStream(2), MemoryForgetLog()
    for number, (user, item) in enumerate([(0, 1), (0, 2), (2, 3), (4, 4), (0, 5)]):
        append(
            stream, interaction(user, item, event_id=f"e{number}", event_time_ms=NOW_MS - 1000 * number, value=1e300)
        )
    append(stream, interaction(0, 5, event_id="e4"))  # a second delivery
    append(stream, interaction(0, item_id="", event_id="u1", undoes_event_id="e1"))
    append(stream, interaction(2, item_id="", event_id="u2", undoes_event_id="e0"))  # another user's
    stream.append(0, b"user-0", b"\xff", NOW_MS)
    forgets.append(forget(4, p0=3))
    run(tmp_path / "past", stream, forgets)
    data = load_dataset(tmp_path / "past")
    rows = zip(data.users, data.items, data.timestamps.tolist(), strict=True)
    found = [(data.user_ids[user], data.item_ids[item], time) for user, item, time in rows]
    seconds = NOW_MS // 1000
    assert found == [
        ("user-0", "item-5", seconds - 4),
        ("user-2", "item-3", seconds - 2),
        ("user-0", "item-1", seconds),
    ]
    assert (data.name, data.type_names) == ("past", ["click"])
    assert np.isfinite(data.values).all()


def test_an_archive_of_nothing_says_so(tmp_path: Path) -> None:
    run(tmp_path, MemoryStream(1))
    with pytest.raises(ValueError, match="holds no interaction that counts"):
        load_dataset(tmp_path)


@pytest.mark.parametrize("what", ["no table", "without a column", "of another type", "with nulls", "half of one"])
def test_a_listed_file_that_holds_no_records_is_refused_by_name(tmp_path: Path, what: str) -> None:
    run(tmp_path, full(40))
    data = one_file(tmp_path).read_bytes()
    table, sink = pq.read_table(one_file(tmp_path)), pa.BufferOutputStream()
    offsets, at = table.column("offset"), table.column_names.index("offset")
    match what:
        case "no table":
            replaced(tmp_path, b"PAR1" + data[4:-40] + b"\xff" * 40)
        case "half of one":
            replaced(tmp_path, data[: len(data) // 2] + data[-len(data) // 4 :])
        case _:
            other = {
                "without a column": table.drop_columns(["record_key"]),
                "of another type": table.set_column(at, "offset", offsets.cast(pa.float64())),
                "with nulls": table.set_column(at, "offset", pa.nulls(len(table), pa.int64())),
            }[what]
            pq.write_table(other, sink)
            replaced(tmp_path, bytes(sink.getvalue()))
    with pytest.raises(PreconditionFailed, match=r"interactions-.*\.parquet"):
        archived(tmp_path)


@pytest.mark.parametrize("change", [{"first": "0"}, {"records": None}, {"partition": -1}, {"sha256": 7}, {"end": 1.5}])
def test_a_listed_file_of_other_types_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    run(tmp_path, full(40))
    said = json.loads((tmp_path / MANIFEST).read_text())
    next(part for part in said["partitions"].values() if part["files"])["files"][0] |= change
    (tmp_path / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(PreconditionFailed, match="not what `freshet archive` writes"):
        Archive.open(tmp_path)


def replaced(folder: Path, data: bytes) -> None:
    """Put a file with this content in the place of one, under the name and the checksums that it has then."""
    archive = Archive.open(folder)
    old = next(file for file in archive.files if (folder / file.name) == one_file(folder))
    new = replace(old, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / old.name).rename(folder / new.name)
    (folder / new.name).write_bytes(data)
    part = archive.partitions[old.partition]
    files_of_part = [new if one == old else one for one in part.files]
    archive.with_partition(old.partition, replace(part, files=files_of_part)).save()


def test_files_have_about_so_many_bytes_and_cover_the_offsets_without_records() -> None:
    topics = MemoryTopics({"topic": 1}, per_poll=2)
    for key in (*"abcdefgh", "h", "h"):
        topics.write("topic", key.encode(), b"x" * 100)
    topics.compact("topic")  # offsets 7 and 8 have no record
    chunks = list(read_chunks(topics, 0, 1, 9, max_bytes=1_000))
    assert [([record.offset for record in records], end) for records, end in chunks] == [([1, 2, 3, 4], 5), ([5, 6], 9)]
    assert list(read_chunks(topics, 0, 7, 9, max_bytes=1)) == [([], 9)]
    assert list(read_chunks(topics, 0, 1, 9, max_bytes=1, before_ms=0)) == []  # no file without an offset

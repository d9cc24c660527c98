"""Anybody's CSV or Parquet becomes Interactions, or a message that says which row and what is allowed."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.offline.datasets import Interactions, TableOptions, read_table


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def read(path: Path, columns: Mapping[str, str] | None = None) -> Interactions:
    return read_table(path, TableOptions(columns=columns or {})).accepted()


def test_a_full_csv_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "user_id,item_id,timestamp,type,value,title,genres\n"
        'u1,b,1700000100,click,2.5,"Letters, The",Drama|War\n'
        "u2,a,1700000000,buy,,,\n",
    )
    data = read(path)
    assert [data.user_ids[user] for user in data.users] == ["u2", "u1"]
    assert [data.type_names[code] for code in data.types] == ["buy", "click"]
    assert data.values.tolist() == [1.0, 2.5]
    assert data.titles == ["", "Letters, The"]
    assert data.categories == [(), ("Drama", "War")]
    assert "times read as s" in data.source


def test_ids_keep_leading_zeros(tmp_path: Path) -> None:
    data = read(write(tmp_path / "t.csv", "user,item,timestamp\n007,01,1700000000\n7,1,1700000001\n"))
    assert data.user_ids == ["007", "7"]


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "who,what,when\na,x,1700000000\n")
    data = read(path, {"user": "who", "item": "what", "timestamp": "when"})
    assert data.item_ids == ["x"]


def test_gzip_and_tabs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv.gz"
    path.write_bytes(gzip.compress(b"user\titem\ttimestamp\na\tx\t1700000000\n"))
    assert len(read(path)) == 1


def test_parquet_with_float_ids_loses_the_point_zero(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"user": [1.0, 2.0], "item": [10, 11], "timestamp": [1700000000, 1700000001]}), path)
    assert read(path).user_ids == ["1", "2"]


def test_parquet_with_category_lists_and_dictionaries_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table(
        {
            "user": pa.array(["a", "b"]).dictionary_encode(),
            "item": ["x", "y"],
            "timestamp": pa.array([1_700_000_000_000, 1_700_000_001_000], pa.timestamp("ms")),
            "categories": [["Drama", "War"], None],
        }
    )
    pq.write_table(table, path)
    data = read(path)
    assert data.timestamps.tolist() == [1_700_000_000, 1_700_000_001]
    assert data.categories == [("Drama", "War"), ()]


@pytest.mark.parametrize(
    ("text", "seconds", "unit"),
    [
        ("1700000000", 1_700_000_000, "s"),
        ("1700000000.75", 1_700_000_000, "s"),
        ("1700000000123", 1_700_000_000, "ms"),
        ("1700000000123456", 1_700_000_000, "us"),
        ("1700000000123456789", 1_700_000_000, "ns"),
        ("2023-11-14T22:13:20Z", 1_700_000_000, "iso"),
        ("2023-11-14 22:13:20", 1_700_000_000, "iso"),
        ("2023-11-15T00:13:20.5+02:00", 1_700_000_000, "iso"),
        ("2023-11-14", 1_699_920_000, "iso"),
    ],
)
def test_times_are_read_in_their_unit(tmp_path: Path, text: str, seconds: int, unit: str) -> None:
    data = read(write(tmp_path / "t.csv", f"user,item,timestamp\na,x,{text}\n"))
    assert data.timestamps.tolist() == [seconds]
    assert f"times read as {unit}" in data.source


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (("17", "18"), r"not a unix time \(first: 17\): 2 of 2, 100.0% \(rows 2, 3\)"),
        (
            ("1700000000", "1700000001", "1700000000123"),
            r"outside 1973 to 2100 in s, the unit of most rows \(first: 1700000000123\): 1 of 3, 33.3% \(rows 4\)",
        ),
        (("2021-05-03", "03/05/2021"), r"not ISO 8601 \(first: 03/05/2021\): 1 of 2, 50.0% \(rows 3\)"),
        (("2021-05-03", "2021-02-29"), r"not ISO 8601 \(first: 2021-02-29\): 1 of 2, 50.0% \(rows 3\)"),
        (("1700000000", "2021-05-03"), r"not ISO 8601 \(first: 1700000000\): .* \(rows 2\): .*may not be mixed"),
        (
            ("1700000000", "1700000000", "soon"),
            r"not a number, though most rows are \(first: soon\): 1 of 3, 33.3% \(rows 4\)",
        ),
        (("1700000000", ""), r"timestamp is missing: 1 of 2, 50.0% \(rows 3\)"),
        (("1700000000", "-5"), r"negative, NaN or infinite \(first: -5\): 1 of 2, 50.0% \(rows 3\)"),
        (("1700000000", "nan"), r"negative, NaN or infinite \(first: nan\): 1 of 2, 50.0% \(rows 3\)"),
    ],
)
def test_doubtful_times_are_refused_with_their_row(tmp_path: Path, times: tuple[str, str], message: str) -> None:
    rows = "".join(f"a,x,{text}\n" for text in times)
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "t.csv", "user,item,timestamp\n" + rows))


def test_a_named_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'who' for user; it has: user"):
        read(write(tmp_path / "t.csv", "user,item,timestamp\na,x,1\n"), {"user": "who"})


def test_a_ragged_csv_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"another number of cells than the header: 1 of 1, 100.0% \(rows 2\)"):
        read(write(tmp_path / "t.csv", "user,item,timestamp\na,x\n"))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        read(write(tmp_path / "t.parquet", "hello"))

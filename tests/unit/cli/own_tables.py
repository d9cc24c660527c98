"""Small tables as people have them: what the file holds, what is understood of it, and what is named.

Every table is written by the test. Where a library is named that the project does not depend on (pandas, polars, Spark,
DuckDB), pyarrow writes the file with that library's types and metadata ("..., by pyarrow").
"""

import bz2
import gzip
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

START = 1_700_000_000
USERS = ["a"] * 4 + ["b"] * 4
ITEMS = ["x", "y", "z", "x", "z", "y", "x", "y"]
TIMES = [START + 60 * row for row in range(8)]
Event = tuple[str, str, int, str, float]


def events(*, types: Any = "interaction", values: Any = 1.0, users: Any = USERS, items: Any = ITEMS) -> list[Event]:
    """The eight events with these types and values, each one for all or a list."""
    kinds = types if isinstance(types, list) else [types] * 8
    numbers = values if isinstance(values, list) else [values] * 8
    return list(zip(users, items, TIMES, kinds, numbers, strict=True))


@dataclass(frozen=True, kw_only=True)
class Own:
    """One table.

    write: into a folder, giving the path to name. rows: in the file. understood: its events by time, None where the
    table is refused. named: the beginning of each finding that is no "info". left_out: rows that training does not use,
    by reason; kept: those of them that enter histories at the import nevertheless.
    """

    name: str
    write: Callable[[Path], Path]
    rows: int = 8
    understood: list[Event] | None = field(default_factory=events)
    named: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    only_training: bool = False
    categories: Mapping[str, tuple[str, ...]] | None = None


def text(content: str | bytes, name: str = "mine.csv") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def lines(columns: Mapping[str, Any] | None = None, separator: str = ",", times: Any = TIMES) -> str:
    """The eight rows as CSV, with further columns: a list of cells, or one cell for all."""
    more = {name: cells if isinstance(cells, list) else [cells] * 8 for name, cells in (columns or {}).items()}
    rows = zip(USERS, ITEMS, map(str, times), *more.values(), strict=True)
    return "".join(separator.join(row) + "\n" for row in [("user", "item", "timestamp", *more), *rows])


def csv(columns: Mapping[str, Any]) -> Callable[[Path], Path]:
    return text(lines(columns))


def timed(times: Any) -> Callable[[Path], Path]:
    return text(lines(times=times))


def parquet(
    columns: Mapping[str, Any] | None = None, metadata: Mapping[str, str] | None = None, **options: Any
) -> Callable[[Path], Path]:
    """The eight rows; `columns` replaces some of theirs or adds to them."""

    def write(folder: Path) -> Path:
        table = pa.table({"user": USERS, "item": ITEMS, "timestamp": TIMES} | dict(columns or {}))
        pq.write_table(table.replace_schema_metadata(metadata), folder / "mine.parquet", **options)
        return folder / "mine.parquet"

    return write


def spark_folder(folder: Path) -> Path:
    part, parts = parquet()(folder), folder / "events.parquet"
    parts.mkdir()
    part.rename(parts / "part-00000-c000.snappy.parquet")
    (parts / "_SUCCESS").touch()
    return parts


def own(name: str, write: Callable[[Path], Path], *named: str, **more: Any) -> Own:
    return Own(name=name, write=write, named=named, **more)


def refused(name: str, write: Callable[[Path], Path], *named: str, rows: int = 8, blank: int = 0) -> Own:
    left_out = {reason: count for reason, count in {"refused": rows - blank, "blank": blank}.items() if count}
    return Own(name=name, write=write, rows=rows, understood=None, named=named, left_out=left_out)


PANDAS = {"pandas": json.dumps({"index_columns": ["__index_level_0__"], "columns": [], "pandas_version": "2.2.3"})}
SPARK = {"org.apache.spark.version": "3.5.1"}
MOMENTS = [datetime.fromtimestamp(second, UTC).replace(tzinfo=None) for second in TIMES]
ISO = [moment.isoformat() for moment in MOMENTS]
ROWS = [
    {"user": user, "item": item, "timestamp": second} for user, item, second in zip(USERS, ITEMS, TIMES, strict=True)
]
NUMBERS = [{"x": 1, "y": 2, "z": 3}[item] for item in ITEMS]
NUMBERED = events(items=[str(number) for number in NUMBERS])
DAY = START // 86_400
# Two seconds, the rows of each in reverse; by time they are BACKWARDS and REVERSED.
SECONDS = [ISO[0]] * 4 + [ISO[1]] * 4
BACKWARDS = [(user, item, START + (user == "b")) for user, item in zip("aaaabbbb", "xyzxyxyz", strict=True)]
REVERSED = [(user, item, START + 60 * (user == "b")) for user, item in zip("aaaabbbb", "xzyxyxyz", strict=True)]
HALVES = ["0.5", "5", "4.5", "3", "1", "2", "4", "0.5"]
UNKNOWN = "types that the event schema does not name"
NONE_READ = "no row is of a type that an encoder reads"
IN_BRACKETS = "categories with , or ; or brackets are read as one category: 8 of 8, 100.0%"


def rated(*stars: str) -> dict[str, Any]:
    return {"type": "rating", "rating": list(stars)}


def rated_events(*stars: float) -> list[Event]:
    return events(types="rating", values=list(stars))


def clicks(**others: str) -> list[str]:
    """Eight clicks, but for `row_<number of the row in the file>`."""
    return [others.get(f"row_{row}", "click") for row in range(2, 10)]


TABLES = [
    # Encodings, separators, quotes
    own("plain", text(lines())),
    own("byte order mark", text(b"\xef\xbb\xbf" + lines().encode())),
    own("CRLF", text(lines().replace("\n", "\r\n"))),
    own("CR alone", text(lines().replace("\n", "\r"))),
    own("no newline at the end", text(lines().rstrip("\n"))),
    refused(
        "Latin-1",
        text(lines({"title": ["caf\xe9", "T", "T", "T"] * 2}).encode("latin-1")),
        "mine.csv: 2 of 9 lines are not UTF-8, 22.2% (first: line 2, b'a,x,1700000000,caf\\xe9')",
        rows=0,
    ),
    refused(
        "Latin-1 in a row of another length",
        text(lines().encode() + b"caf\xe9,x\n"),
        "mine.csv: 1 of 10 lines are not UTF-8, 10.0% (first: line 10, b'caf\\xe9,x')",
        rows=0,
    ),
    refused("UTF-16", text(lines().encode("utf-16")), "lines are not UTF-8, ", rows=0),
    own("blank lines", text(lines().replace("b,", "\nb,", 1) + "\n\n"), rows=11, left_out={"blank": 3}),
    own("rows of commas from a spreadsheet", text(lines() + ",,\n,,\n"), rows=10, left_out={"blank": 2}),
    refused(
        "a bad row behind a blank line keeps its number",
        text(lines().replace("b,", "\nb,", 1) + ",x,1700001000\n"),
        "user id is missing: 1 of 9, 11.1% (rows 11)",
        rows=10,
        blank=1,
    ),
    own("semicolons", text(lines(separator=";"))),
    own(
        "semicolons and decimal commas",
        text(lines({"type": "rating", "value": ["4,5", "1"] * 4}, ";")),
        understood=rated_events(*[4.5, 1.0] * 4),
    ),
    own("tabs in a .csv", text(lines(separator="\t"))),
    own("tabs", text(lines(separator="\t"), "mine.tsv")),
    own("tabs, gzip", text(gzip.compress(lines(separator="\t").encode()), "mine.tsv.gz")),
    own("bzip2", text(bz2.compress(lines().encode()), "mine.csv.bz2")),
    own("commas in quotes", csv({"title": '"Letters, The"'})),
    own("line breaks in quotes", csv({"title": '"A\nB"'}), "a cell holds a line break: 8 of 8, 100.0%"),
    refused(
        "a quote that is never closed",
        csv({"title": ["T", "T", '"T', "T", "T", "T", "T", "T"]}),
        "a cell holds whole rows: 1 of 3, 33.3% (rows 4)",
        rows=3,
    ),
    refused(
        "a quote that is never closed, in a column that is not read",
        csv({"note": ["N", "N", "N", '"N', "N", "N", "N", "N"]}),
        "a cell holds whole rows: 1 of 4, 25.0% (rows 5)",
        rows=4,
    ),
    own(
        "a blank behind every comma",
        text(lines().replace(",", ", ")),
        "item id begins or ends with a blank: 8 of 8, 100.0%",
        understood=events(items=[f" {item}" for item in ITEMS]),
    ),
    refused("no header", text(lines().split("\n", 1)[1]), "mine.csv has no user column", rows=0),
    refused(
        "two files in one, with both headers",
        text(lines() + lines()),
        "timestamp is not a number, though most rows are (first: timestamp): 1 of 17, 5.9% (rows 10)",
        rows=17,
    ),
    refused(
        "rows of other lengths",
        text(lines() + "b,x\nb,x,1700000900,4\n"),
        "a row has another number of cells than the header: 2 of 10, 20.0% (rows 10, 11)",
        rows=10,
    ),
    refused(
        "a column twice",
        text(lines({"again": USERS}).replace("again", "user", 1)),
        "mine.csv has 2 columns 'user'; allowed: one",
        rows=0,
    ),
    own("names in capitals", text(lines().replace("user,item,timestamp", "User_ID,Item Id,Timestamp", 1))),
    own(
        "names that are not read",
        csv({"action": "cart", "name": "T", "product_category": "shoes"}),
        "columns are not read: 3 of 6, 50.0% (action, name, product_category)",
    ),
    refused("a header alone", text("user,item,timestamp\n"), "no events", rows=0),
    refused("nothing", text(""), "mine.csv cannot be read as CSV", rows=0),
    own("JSON lines", text("".join(json.dumps(row) + "\n" for row in ROWS), "mine.jsonl")),
    refused("JSON that is no lines", text("[1, 2", "mine.jsonl"), "mine.jsonl cannot be read as JSON lines", rows=0),
    refused("a spreadsheet", text(b"PK\x03\x04", "mine.xlsx"), "mine.xlsx is a spreadsheet (.xlsx)", rows=0),
    # Types
    own("types that are known", csv({"type": "click"}), understood=events(types="click")),
    refused(
        "a type that nobody knows", csv({"type": "cart"}), f"{UNKNOWN}: cart 8 (100.0%): 8 of 8, 100.0%", NONE_READ
    ),
    own(
        "some types that nobody knows",
        csv({"type": clicks(row_6="cart", row_9="cart")}),
        f"{UNKNOWN}: cart 2 (25.0%): 2 of 8, 25.0% (rows 6, 9)",
        understood=events(types=clicks(row_6="cart", row_9="cart")),
        left_out={"type cart": 2},
    ),
    own(
        "types in capitals and misspelt",
        csv({"type": clicks(row_6="Click", row_8="favori")}),
        f"{UNKNOWN}: Click 1 (12.5%), favori 1 (12.5%): 2 of 8, 25.0% (rows 6, 8)",
        understood=events(types=clicks(row_6="Click", row_8="favori")),
        left_out={"type Click": 1, "type favori": 1},
    ),
    own(
        "shown and turned down",
        csv({"type": clicks(row_6="impression", row_7="dislike", row_8="impression")}),
        understood=events(types=clicks(row_6="impression", row_7="dislike", row_8="impression")),
        left_out={"type impression": 2, "type dislike": 1},
        kept=("type dislike",),
    ),
    own(
        "types that are missing",
        csv({"type": clicks(row_6="")}),
        "type is missing: 1 of 8, 12.5% (rows 6)",
        understood=events(types=clicks(row_6="interaction")),
    ),
    refused(
        "clicks on what was searched",
        csv({"type": clicks(row_2="search_click")}),
        "type is search_click: 1 of 8, 12.5% (rows 2)",
    ),
    refused(
        "types as numbers",
        csv({"type": ["1", "2"] * 4}),
        f"{UNKNOWN}: 1 4 (50.0%), 2 4 (50.0%): 8 of 8, 100.0%",
        NONE_READ,
    ),
    # Scales
    own(
        "half stars without a type",
        text(lines({"rating": HALVES}).replace("user,item", "userId,movieId", 1)),
        "rating has values outside 1 to 5: 2 of 8, 25.0% (rows 2, 9)",
        understood=rated_events(*map(float, HALVES)),
    ),
    own(
        "half stars",
        csv(rated(*HALVES)),
        "rating has values outside 1 to 5: 2 of 8, 25.0% (rows 2, 9)",
        understood=rated_events(*map(float, HALVES)),
    ),
    own("stars", csv(rated(*"51432551")), understood=rated_events(5, 1, 4, 3, 2, 5, 5, 1)),
    own(
        "one to ten",
        csv(rated("1", "10", "9", "5", "6", "7", "2", "8")),
        "rating goes from 1 to 10, which the event schema does not expect: 8 of 8, 100.0%",
        understood=rated_events(1, 10, 9, 5, 6, 7, 2, 8),
    ),
    own(
        "per cent",
        csv(rated("0", "100", "50", "4", "90", "35", "70", "80")),
        "rating goes from 0 to 100, which the event schema does not expect: 8 of 8, 100.0%",
        understood=rated_events(0, 100, 50, 4, 90, 35, 70, 80),
    ),
    own(
        "zero to one",
        csv(rated(*"01101101")),
        "rating goes from 0 to 1, which the event schema does not expect: 8 of 8, 100.0%",
        understood=rated_events(0, 1, 1, 0, 1, 1, 0, 1),
    ),
    refused(
        "a rating without a value",
        csv(rated("5", "", "4", "3", "2", "5", "5", "1")),
        "rating without a value: 1 of 8, 12.5% (rows 3)",
    ),
    refused("ratings without values", csv({"type": "rating"}), "rating without a value: 8 of 8, 100.0%"),
    refused("decimal commas", csv(rated(*['"4,5"'] * 8)), "value is no number ('4,5'): 8 of 8, 100.0%"),
    refused(
        "a value that is NaN",
        csv({"value": ["1", "nan", "1", "1", "1", "1", "1", "2"]}),
        "value is NaN, infinite or beyond single precision: 1 of 8, 12.5% (rows 3)",
    ),
    # Times
    own(
        "milliseconds inside one second",
        timed([START * 1000 + milliseconds for milliseconds in (30, 10, 20, 0, 1090, 1080, 1070, 1060)]),
        "duplicate events: 2 of 8, 25.0%",
        understood=[(user, item, second, "interaction", 1.0) for user, item, second in BACKWARDS],
    ),
    own(
        "nanoseconds inside one second, with a zone",
        timed([f"{SECONDS[row]}.{10 - row:09}Z" for row in range(8)]),
        "duplicate events: 2 of 8, 25.0%",
        understood=[(user, item, second, "interaction", 1.0) for user, item, second in REVERSED],
    ),
    own("numbers with blanks around them", timed([f" {second} " for second in TIMES])),
    own("dates with a blank between and one behind", timed([f"{moment.replace('T', ' ')} " for moment in ISO])),
    own(
        "zones of several kinds",
        timed(map(str.__add__, ISO, ["Z", "+00", "+0000", "+00:00", "", "Z", "-00:00", ".5Z"])),
    ),
    refused(
        "day before month", timed(["14/11/2023"] * 8), "timestamp is not ISO 8601 (first: 14/11/2023): 8 of 8, 100.0%"
    ),
    refused(
        "a time in the future",
        text(lines() + "b,z,4000000000\n"),
        "timestamp lies in the future: 1 of 9, 11.1% (rows 10)",
        rows=9,
    ),
    refused(
        "milliseconds among seconds",
        text(lines() + "b,z,1700000900000\n"),
        "timestamp is outside 1973 to 2100 in s, the unit of most rows (first: 1700000900000): 1 of 9, 11.1% (rows 10)",
        rows=9,
    ),
    refused("a counter", timed(range(8)), "timestamp is not a unix time (first: 0): 8 of 8, 100.0%"),
    # Amounts: what can be imported and not be learned from
    own(
        "one user",
        text(lines().replace("b,", "a,")),
        "user column is constant ('a'): 8 of 8, 100.0%",
        understood=events(users=["a"] * 8),
        only_training=True,
    ),
    own(
        "one moment",
        timed([START] * 8),
        "all timestamps are equal: 8 of 8, 100.0%",
        "duplicate events: 2 of 8, 25.0%",
        understood=[(user, item, START, "interaction", 1.0) for user, item in zip(USERS, ITEMS, strict=True)],
        only_training=True,
    ),
    own(
        "a few events of many",
        text("user,item,timestamp\na,x,1700000000\nb,y,1700000060\n"),
        "no user has 4 events that an encoder reads: 2 of 2, 100.0% (rows 2, 3)",
        "users with too few events: 2 of 2, 100.0% (ids a, b)",
        rows=2,
        understood=[("a", "x", START, "interaction", 1.0), ("b", "y", START + 60, "interaction", 1.0)],
        only_training=True,
    ),
    # Categories
    own("categories with |", csv({"genres": "Drama|War"}), categories={"x": ("Drama", "War")}),
    own("categories with ;", csv({"genres": "Drama;War"}), IN_BRACKETS, categories={"x": ("Drama;War",)}),
    own("categories with ,", csv({"genres": '"Drama, War"'}), IN_BRACKETS, categories={"x": ("Drama, War",)}),
    own("a list as Python writes it", csv({"genres": "['Drama']"}), IN_BRACKETS, categories={"x": ("['Drama']",)}),
    own(
        "categories as lists, some with a null",
        parquet({"categories": [["Drama", None, "War"], None, [], ["Action"], [None], ["War, Cold"], [], []]}),
        categories={"x": ("Drama", "War"), "y": ("War, Cold",), "z": ()},
    ),
    refused(
        "categories as structs",
        parquet({"categories": [{"id": 1}] * 8}),
        "categories has type struct<id: int64>: 8 of 8, 100.0%",
    ),
    refused("titles as lists", parquet({"title": [["T"]] * 8}), "title has type list<element: string>: 8 of 8, 100.0%"),
    refused(
        "ids as structs",
        parquet({"item": [{"id": item} for item in ITEMS]}),
        "item has type struct<id: string>: 8 of 8, 100.0%",
    ),
    refused(
        "ids as lists",
        parquet({"user": [[user] for user in USERS]}),
        "user has type list<element: string>: 8 of 8, 100.0%",
    ),
    # Parquet as several libraries write it
    own(
        "pandas: ids that became floats, and its index, by pyarrow",
        parquet({"item": list(map(float, NUMBERS)), "__index_level_0__": list(range(8))}, PANDAS),
        "columns are not read: 1 of 4, 25.0% (__index_level_0__)",
        understood=NUMBERED,
    ),
    refused(
        "pandas: an id that is NaN, by pyarrow",
        parquet({"item": [1.0, float("nan"), *map(float, NUMBERS[2:])]}, PANDAS),
        "item id is missing: 1 of 8, 12.5% (rows 2)",
    ),
    own(
        "pandas: categorical ids, nanoseconds with a zone, by pyarrow",
        parquet(
            {
                "user": pa.array(USERS).dictionary_encode(),
                "timestamp": pa.array([second * 10**9 for second in TIMES], pa.timestamp("ns", "Europe/Rome")),
            },
            PANDAS,
        ),
    ),
    own("pandas: strings with nulls, by pyarrow", parquet({"title": [None, "T"] * 4}, PANDAS)),
    own(
        "polars: large strings and lists, by pyarrow",
        parquet(
            {
                "user": pa.array(USERS, pa.large_string()),
                "categories": pa.array([["Drama"]] * 8, pa.large_list(pa.large_string())),
            }
        ),
        categories={"x": ("Drama",)},
    ),
    own(
        "polars: string views, microseconds, by pyarrow",
        parquet({"user": pa.array(USERS, pa.string_view()), "timestamp": pa.array(MOMENTS, pa.timestamp("us"))}),
    ),
    own(
        "polars: an enum and unsigned ids, by pyarrow",
        parquet({"type": pa.array(["click"] * 8).dictionary_encode(), "item": pa.array(NUMBERS, pa.uint64())}),
        understood=events(types="click", items=[str(number) for number in NUMBERS]),
    ),
    refused(
        "polars: a value that is NaN and not null, by pyarrow",
        parquet({"value": [1.0, float("nan")] + [2.0] * 6}),
        "value is NaN, infinite or beyond single precision: 1 of 8, 12.5% (rows 2)",
    ),
    own(
        "Spark: INT96 times, by pyarrow",
        parquet({"timestamp": pa.array(MOMENTS, pa.timestamp("ns"))}, SPARK, use_deprecated_int96_timestamps=True),
    ),
    own("Spark: strings as bytes, by pyarrow", parquet({"user": [user.encode() for user in USERS]}, SPARK)),
    own(
        "Spark: decimals as ids, by pyarrow",
        parquet({"item": pa.array(list(map(Decimal, NUMBERS)), pa.decimal128(20, 2))}, SPARK),
        understood=NUMBERED,
    ),
    refused("Spark: a folder of parts, by pyarrow", spark_folder, "events.parquet is a folder without", rows=0),
    refused(
        "DuckDB: a HUGEINT that became a double, by pyarrow",
        parquet({"item": [float(2**60 + number) for number in NUMBERS]}),
        "item id is a float that has lost digits: 8 of 8, 100.0%",
    ),
    refused(
        "DuckDB: ids of type UUID, by pyarrow",
        parquet({"user": pa.array([uuid.UUID(int=2**127 + 7).bytes] * 8, pa.uuid())}),
        "user is not UTF-8",
    ),
    own(
        "DuckDB: dates, an enum and a list, by pyarrow",
        parquet(
            {
                "timestamp": pa.array([DAY + row for row in range(8)], pa.date32()),
                "type": pa.array(["view"] * 8).dictionary_encode(),
                "categories": [["Drama", "War"]] * 8,
            }
        ),
        "timestamps are whole days: 8 of 8, 100.0%",
        understood=[(USERS[row], ITEMS[row], (DAY + row) * 86_400, "view", 1.0) for row in range(8)],
        categories={"x": ("Drama", "War")},
    ),
    own(
        "a Parquet row without a cell",
        parquet({"user": [*USERS, None], "item": [*ITEMS, None], "timestamp": [*TIMES, None]}),
        rows=9,
        left_out={"blank": 1},
    ),
    own(
        "polars: views in columns that are not read, by pyarrow",
        parquet({"note": pa.array(["N"] * 8, pa.string_view()), "user": pa.array(USERS, pa.binary_view())}),
        "columns are not read: 1 of 4, 25.0% (note)",
    ),
    refused("times as booleans", parquet({"timestamp": [True] * 8}), "timestamp has type bool: 8 of 8, 100.0%"),
    refused("CSV that is called Parquet", text(lines(), "mine.parquet"), "mine.parquet cannot be read as Par", rows=0),
]

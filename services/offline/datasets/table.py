"""Anybody's interactions: a CSV or Parquet file with a user, an item and a time per row becomes Interactions.

Optional columns are type, value, title and categories; every name can be set. The raw columns are read apart from
the checks, so that validation.py can report on a file that this module would refuse. It repairs nothing silently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from .interactions import Interactions, from_columns
from .timestamps import parse_timestamps

MAX_ID_BYTES = 128
# Names that people's files use, tried in turn when a column is not named by the caller.
_COMMON_NAMES = {
    "user": ("user", "user_id", "userId", "userid", "reviewerID"),
    "item": ("item", "item_id", "itemId", "itemid", "movieId", "parent_asin", "asin", "product_id"),
    "timestamp": ("timestamp", "time", "ts", "event_time", "unixReviewTime", "datetime", "date"),
    "type": ("type", "event_type", "event"),
    "value": ("value", "rating", "overall"),
    "title": ("title",),
    "categories": ("categories", "category", "genres"),
}
REQUIRED_COLUMNS = ("user", "item", "timestamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnNames:
    """What each column is called in the file; "" means: look for a usual name."""

    user: str = ""
    item: str = ""
    timestamp: str = ""
    type: str = ""
    value: str = ""
    title: str = ""
    categories: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawTable:
    """The file's columns as they are: `columns` by role ("user", "item", ...), and the file row of the first event."""

    path: Path
    columns: dict[str, pa.ChunkedArray]
    first_row: int

    @property
    def num_rows(self) -> int:
        return len(self.columns["user"])


def read_table(
    path: str | Path,
    columns: ColumnNames | None = None,
    *,
    timestamp_unit: str = "auto",
    header: Sequence[str] | None = None,
    name: str = "",
) -> Interactions:
    """Read a CSV (.csv, .tsv, .txt, also .gz) or Parquet file.

    `columns` names columns whose names differ from the usual ones; `header` gives the column names of a CSV that has no
    header line; `timestamp_unit` is "auto", "s", "ms", "us", "ns" or "iso". A missing value is 1, a missing type
    "interaction".
    Raises: ValueError naming column, row, value and what is allowed. `freshet data validate` lists all such rows.
    """
    raw = read_raw_table(path, columns, header=header)
    if raw.num_rows == 0:
        raise ValueError(f"{raw.path} has no rows")
    users, items = (coded_ids(raw.columns[role], role, lambda row: row + raw.first_row) for role in ("user", "item"))
    times = parse_timestamps(raw.columns["timestamp"], unit=timestamp_unit, first_row=raw.first_row)
    title_of = _first_text(raw, "title", items)
    category_of = {item: _split_categories(text) for item, text in _first_text(raw, "categories", items).items()}
    found = f"{raw.num_rows:,} events of {len(users[1]):,} users with {len(items[1]):,} items"
    return from_columns(
        users=users,
        items=items,
        timestamps=times.seconds,
        values=_values(raw),
        types=_types(raw),
        titles=title_of,
        categories=category_of,
        name=name or raw.path.stem,
        source=f"{raw.path}: {found}; times read as {times.unit}",
    )


def read_raw_table(
    path: str | Path, columns: ColumnNames | None = None, *, header: Sequence[str] | None = None
) -> RawTable:
    """Read the columns without judging their contents.

    Raises: ValueError when the file can't be parsed, a required column is missing, or a named column does not exist.
    """
    path = Path(path)
    is_parquet = path.suffix.lower() in (".parquet", ".pq")
    try:
        table = pq.read_table(path) if is_parquet else _read_csv(path, header)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path} cannot be read as {'Parquet' if is_parquet else 'CSV'}: {exc}") from exc
    chosen = _choose_columns(path, table.column_names, columns or ColumnNames())
    first_row = 1 if is_parquet or header is not None else 2
    return RawTable(path=path, columns={role: table[column] for role, column in chosen.items()}, first_row=first_row)


def coded_ids(
    column: pa.ChunkedArray, what: str, row_of: Callable[[int], int]
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Codes (N,) and vocabulary of an id column, ids checked against what the wire allows.

    `what` is the column in messages, `row_of` the row of the file in which a value stands.
    """
    encoded = id_texts(column).dictionary_encode().combine_chunks()
    refuse_nulls(encoded, what, row_of)
    ids: list[str] = encoded.dictionary.to_pylist()
    codes = encoded.indices.to_numpy().astype(np.int64)
    for code, text in enumerate(ids):
        problem = id_problem(text)
        if problem:
            row = row_of(int(np.argmax(codes == code)))
            raise ValueError(
                f"{what}={text[:40]!r} in row {row} {problem}; allowed: 1 to {MAX_ID_BYTES} bytes of UTF-8"
            )
    return codes, ids


def refuse_nulls(column: pa.Array | pa.ChunkedArray, what: str, row_of: Callable[[int], int]) -> None:
    """Raises: ValueError naming the first row where a value of the column is missing."""
    if column.null_count:
        row = row_of(int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]))
        raise ValueError(f"{what} is missing in {column.null_count} rows (first: row {row}); fill or remove them")


def id_problem(text: str) -> str:
    """What is wrong with an id, or "": ids are UTF-8, 1 to 128 bytes, without control characters."""
    if not text:
        return "is empty"
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_ID_BYTES:
        return f"has {size} bytes"
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text):
        return "holds a control character"
    return ""


def id_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """An id column as text; whole floats (ids that passed through a table with gaps) lose their ".0"."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        finite = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
        if pc.all(pc.equal(finite, pc.floor(finite))).as_py() in (True, None):
            column = finite.cast(pa.int64())
    return column.cast(pa.string())


def _read_csv(path: Path, header: Sequence[str] | None) -> pa.Table:
    parts = [suffix.lower() for suffix in path.suffixes]
    delimiter = "\t" if ".tsv" in parts or ".inter" in parts else ","
    # Ids stay text ("007"), times are judged later, and only an empty cell is missing: "nan" must stay visible.
    names = list(header) if header is not None else _csv_header(path, delimiter)
    return pa_csv.read_csv(
        path,
        read_options=pa_csv.ReadOptions(column_names=names, skip_rows=0 if header is not None else 1),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
        ),
    )


def _csv_header(path: Path, delimiter: str) -> list[str]:
    options = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with pa_csv.open_csv(path, parse_options=options) as reader:
        return [name.strip() for name in reader.schema.names]


def _choose_columns(path: Path, present: Sequence[str], wanted: ColumnNames) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for role in (entry.name for entry in fields(ColumnNames)):
        asked = getattr(wanted, role)
        if asked:
            if asked not in present:
                raise ValueError(f"{path} has no column {asked!r} for {role}; it has: {', '.join(present)}")
            chosen[role] = asked
            continue
        usual = next((name for name in _COMMON_NAMES[role] if name in present), None)
        if usual is not None:
            chosen[role] = usual
        elif role in REQUIRED_COLUMNS:
            raise ValueError(
                f"{path} has no {role} column (looked for {', '.join(_COMMON_NAMES[role])}); it has: "
                f"{', '.join(present)}. Say which column is the {role}"
            )
    return chosen


def values_of(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """A value column as float64, missing cells as 1. Raises: ValueError when a cell is no number."""
    try:
        numbers = column.cast(pa.float64())
    except pa.ArrowInvalid as exc:
        raise ValueError(f"value is not a number somewhere: {exc}") from exc
    filled: npt.NDArray[np.float64] = numbers.fill_null(1.0).to_numpy()
    return filled


def _values(raw: RawTable) -> npt.NDArray[np.float64] | None:
    if "value" not in raw.columns:
        return None
    values = values_of(raw.columns["value"])
    bad = np.flatnonzero(~np.isfinite(values) | (np.abs(values) > np.finfo(np.float32).max))
    if len(bad):
        raise ValueError(
            f"value={values[bad[0]]} in row {int(bad[0]) + raw.first_row} ({len(bad)} such rows); allowed: finite "
            "single-precision numbers"
        )
    return values


def _types(raw: RawTable) -> tuple[npt.NDArray[np.int64], list[str]] | None:
    if "type" not in raw.columns:
        return None
    encoded = raw.columns["type"].cast(pa.string()).fill_null("interaction").dictionary_encode().combine_chunks()
    names: list[str] = encoded.dictionary.to_pylist()
    for name in names:
        if not 1 <= len(name.encode()) <= 64:
            raise ValueError(f"type={name[:40]!r} has {len(name.encode())} bytes; allowed: 1 to 64")
    if len(names) > np.iinfo(np.int16).max:
        raise ValueError(f"type has {len(names)} different values; allowed: at most {np.iinfo(np.int16).max}")
    return encoded.indices.to_numpy().astype(np.int64), names


def _first_text(raw: RawTable, role: str, items: tuple[npt.NDArray[np.int64], list[str]]) -> dict[str, str]:
    if role not in raw.columns:
        return {}
    column = raw.columns[role]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.binary_join(column.cast(pa.list_(pa.string())), "|")
    column = column.cast(pa.string()).combine_chunks()
    codes, ids = items
    present = np.flatnonzero(~column.is_null().to_numpy(zero_copy_only=False))
    _, first = np.unique(codes[present], return_index=True)
    rows = present[first]
    return dict(zip((ids[code] for code in codes[rows]), column.take(pa.array(rows)).to_pylist(), strict=True))


def _split_categories(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())

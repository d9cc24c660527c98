"""Read any CSV, JSON lines or Parquet file with a user, an item and a time per row as Interactions.

Optional columns are type, value, title and categories. `freshet data validate`, `train` and `import` share this reader.
The reader reports problems of single cells; validation.py checks the data as a whole.

Letters: N rows.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from services.algorithms.bundles.event_schema import EventSchema

from .catalogue_file import JSON_LINES, header_separator, split_categories
from .columns import TableOptions, choose_columns, is_rating, usual_names
from .interactions import from_columns
from .timestamps import BoolArray, IntArray, TimestampError, parse_timestamps
from .validation import MAX_ID_BYTES, Finding, Reading, Rows, Severity, check, id_problem, unreadable, worst_first

# Matches a line with as many separators as the header.
_A_ROW = r"\n[^\n]*([,;|\t][^\n]*){%d}"
# From this value on, a float64 cannot represent every integer.
_EXACT_FLOATS = 2.0**53
_MAX_TYPES = int(np.iinfo(np.int16).max)
_AS_USUAL = TableOptions()
Coded = tuple[npt.NDArray[np.int64], list[str]]


def read_table(
    path: str | Path,
    options: TableOptions = _AS_USUAL,
    *,
    schema: EventSchema | None = None,
    now_s: float | None = None,
) -> Reading:
    """Read a CSV (.csv, .tsv, .txt), JSON lines (.jsonl; also .gz) or Parquet file, and report its findings.

    A CSV's separator is the most frequent comma, semicolon, tab or bar of the header; a .tsv has tabs. A missing value
    is 1. A missing type is "interaction". Without a column of types, a row with a rating has the type "rating" if
    the schema has that type.
    `schema`, `now_s`: see `check`.
    """
    path = Path(path)
    try:
        cells = _Cells(path, options)
    except ValueError as exc:
        return unreadable(str(path), str(exc))
    users, items, types = cells.ids("user"), cells.ids("item"), cells.types(schema)
    values, titles, categories = cells.values(), cells.titles(items[0]), cells.categories()
    seconds, order, unit = cells.times(users[0])
    has_value = ~cells.is_missing("value")
    # The rows are sorted by time at the file's resolution.
    order = order[~cells.bad[order]]
    data = from_columns(
        users=(users[0][order], users[1]),
        items=(items[0][order], items[1]),
        timestamps=seconds[order],
        values=values[order],
        types=(types[0][order], types[1]),
        titles=_first_cells(items, titles),
        categories={
            item: split_categories(cell, options.separator) for item, cell in _first_cells(items, categories).items()
        },
        name=path.stem,
        source="",
    )
    counts = f"{len(data):,} events of {data.num_users:,} users with {data.num_items:,} items"
    data = replace(data, source=f"{path}: {counts}; times read as {unit}")
    findings = cells.findings
    if len(data) or not findings:
        named = Rows(cells.numbers[order])
        findings += check(data, schema=schema, now_s=now_s, rows=named, has_value=has_value[order])
    is_refused = any(one.severity == "error" and not one.only_training for one in findings)
    return Reading(
        source=str(path),
        findings=worst_first(findings),
        interactions=None if is_refused else data,
        num_rows=cells.num_rows,
        num_blank=cells.num_blank,
        read_as=cells.read_as(unit),
    )


class _Cells:
    """The rows that have the header's number of cells and are not empty. numbers (N,): row numbers in the file.
    bad (N,): whether a row has an error. num_rows: number of rows in the file. num_blank: number of empty rows.
    """

    def __init__(self, path: Path, options: TableOptions) -> None:
        """Read the file. Raises: ValueError if it can't be parsed, or if a required role has no or two columns."""
        self._options = options
        kinds = {suffix.lower() for suffix in path.suffixes}
        if found := kinds & {".xlsx", ".xls", ".ods"}:
            raise ValueError(f"{path} is a spreadsheet ({min(found)}); allowed: save its sheet as CSV in UTF-8")
        is_json, is_parquet = bool(kinds & JSON_LINES), bool(kinds & {".parquet", ".pq"})
        ragged, separator = list[int](), ""
        try:
            if is_json:
                table = pa_json.read_json(pa.input_stream(str(path)))
            elif is_parquet:
                table = pq.ParquetFile(path).read()
            else:
                table, separator = _read_csv(path, ragged)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as exc:
            form = "JSON lines" if is_json else "Parquet" if is_parquet else "CSV in UTF-8"
            raise ValueError(f"{path} cannot be read as {form}: {exc}") from exc
        self.names, self._separator = choose_columns(path, table.column_names, options.columns), separator
        first_row = 1 if is_parquet or is_json else 2
        numbers = np.arange(first_row, first_row + len(table) + len(ragged))
        advice = "quote a cell that holds the separator, and close every quote"
        what, is_ragged = "a row has another number of cells than the header", np.isin(numbers, ragged)
        self.findings = list(Rows(numbers).finding(is_ragged, "error", what, advice))
        blank = np.logical_and.reduce([cells.is_null().to_numpy() for cells in table.columns])
        self.num_rows, self.num_blank = len(numbers), int(np.count_nonzero(blank))
        self.numbers = numbers[~is_ragged][~blank]
        self.bad = np.zeros(len(self.numbers), dtype=bool)
        filled = pa.array(np.flatnonzero(~blank))
        self._columns = {role: _plain(table[name]).take(filled) for role, name in self.names.items()}
        if separator:
            broken = _matches(table, "\n")[~blank]
            self.found(broken, "a cell holds a line break", "check for a stray quote", "warning")
            if broken.any():
                swallowed = _matches(table, _A_ROW % min(table.num_columns - 1, 99))[~blank]
                self.found(swallowed, "a cell holds whole rows", "close the quote that begins it")
        if unread := [name for name in table.column_names if name not in self.names.values()]:
            usual = usual_names(self.names)
            self.findings.append(
                Finding(
                    severity="warning",
                    what="columns are not read",
                    where=", ".join(unread[:20]),
                    count=len(unread),
                    of=table.num_columns,
                    advice=f"name or rename those that should be ({'; '.join(usual) or 'all roles are taken'})",
                )
            )

    def read_as(self, unit: str) -> str:
        names = {"session": "session, where the user is missing", "timestamp": f"timestamp ({unit})"}
        taken = ", ".join(f"{name} is {names.get(role, role)}" for role, name in self.names.items())
        return f"columns: {taken}" + (f"; separated by {self._separator!r}" if self._separator not in ("", ",") else "")

    def found(self, rows: BoolArray, what: str, advice: str, severity: Severity = "error") -> None:
        self.findings.extend(Rows(self.numbers).finding(rows, severity, what, advice))
        if severity == "error":
            self.bad |= rows

    def is_missing(self, role: str) -> BoolArray:
        """Return which of a role's cells are missing, (N,)."""
        if role not in self.names:
            return np.ones(len(self.numbers), dtype=bool)
        missing: BoolArray = self._columns[role].is_null().to_numpy()
        return missing

    def text(self, role: str) -> pa.ChunkedArray:
        """Return texts (N,), null if missing; whole numbers lose their ".0"."""
        column = self._columns.get(role, pa.chunked_array([pa.nulls(len(self.numbers))]))
        if pa.types.is_nested(column.type):
            self.found(~self.is_missing(role), f"{role} has type {column.type}", "give text or numbers")
            return pa.chunked_array([pa.nulls(len(column), pa.string())])
        try:
            return id_texts(column)
        except pa.ArrowInvalid:
            texts = [None if cell is None else bytes(cell).decode(errors="replace") for cell in column.to_pylist()]
            cells = pa.chunked_array([pa.array(texts, pa.string())])
            wrong = pc.not_equal(cells.cast(pa.binary()), column.cast(pa.binary())).fill_null(False).to_numpy()
            self.found(wrong, f"{role} is not UTF-8 ({texts[int(np.argmax(wrong))]!r})", "save the file as UTF-8")
            return cells

    def ids(self, role: str) -> Coded:
        """Return codes (N,), -1 for a missing id, and the vocabulary. The session id replaces a missing user id."""
        column = self._columns.get(role, pa.chunked_array([pa.nulls(len(self.numbers), pa.string())]))
        if pa.types.is_floating(column.type):
            large = pc.greater_equal(pc.abs(column), _EXACT_FLOATS).fill_null(False).to_numpy()
            self.found(large, f"{role} id is a float that has lost digits", "write ids as text or 64-bit integers")
        text = self.text(role)
        if role == "user" and "session" in self.names:
            text = pc.coalesce(text, self.text("session"))
        codes, ids = coded(text)
        self.found(codes < 0, f"{role} id is missing", "fill the cell or remove the row")
        problems = {code: problem for code, text in enumerate(ids) if (problem := id_problem(text))}
        advice = f"ids are 1 to {MAX_ID_BYTES} bytes of UTF-8 without control characters; map or remove them"
        what = f"{role} id out of range ({', '.join(sorted(set(problems.values()))[:3])})"
        self.found(np.isin(codes, list(problems)), what, advice)
        padded = [code for code, text in enumerate(ids) if text != text.strip()]
        advice = "the blank is a part of the id; remove it if the catalogue has none"
        self.found(np.isin(codes, padded), f"{role} id begins or ends with a blank", advice, "warning")
        return codes, ids

    def types(self, schema: EventSchema | None) -> Coded:
        """Return codes (N,) and names; without a column of types, an event with a rating has the type "rating"."""
        if "type" not in self.names and is_rating(self.names.get("value", "")):
            has_value = ~self.is_missing("value")
            if schema is None or "rating" in schema.types:
                what, advice = "values are read as events of type rating", "add a column of types if they are others"
                self.found(has_value, what, advice, "info")
                return has_value.astype(np.int64), ["interaction", "rating"]
            advice = "the event schema has no type rating, so half a star teaches like five: name it there"
            self.found(has_value, "ratings are read as interactions", advice, "warning")
        if "type" in self.names:
            advice = "such a row is read as an 'interaction'; give every row its type"
            self.found(self.is_missing("type"), "type is missing", advice, "warning")
        codes, names = coded(self.text("type").fill_null("interaction"))
        what, advice = f"type has {len(names):,} different values", f"allowed: {_MAX_TYPES:,}; is it the right column?"
        self.found(codes >= _MAX_TYPES, what, advice)
        return codes, names

    def times(self, users: IntArray) -> tuple[IntArray, IntArray, str]:
        """Return seconds (N,), the rows with readable times sorted by time, and the unit."""
        missing = self.is_missing("timestamp")
        self.found(missing, "timestamp is missing", "fill the cell or remove the row")
        column, rows = self._columns["timestamp"], np.flatnonzero(~missing)
        column = self.text("timestamp") if _is_text(column.type) else column
        while True:
            try:
                parsed = parse_timestamps(column.take(pa.array(rows)))
                break
            except TimestampError as exc:
                self.found(np.isin(np.arange(len(missing)), rows[exc.rows]), str(exc), exc.advice)
                rows = rows[~exc.rows]
        seconds = np.zeros(len(missing), dtype=np.int64)
        seconds[rows] = parsed.seconds
        by_user = rows[np.argsort(users[rows], kind="stable")]
        going_back = np.zeros(len(missing), dtype=bool)
        going_back[by_user[1:]] = (np.diff(users[by_user]) == 0) & (np.diff(seconds[by_user]) < 0)
        advice = "nothing to do: the reader sorts by time. Check that rows were not shuffled if their order mattered"
        self.found(going_back, "times go back inside a user's rows", advice, "warning")
        return seconds, rows[parsed.order], parsed.unit

    def values(self) -> npt.NDArray[np.float32]:
        """Return values (N,); 1 if missing or not a number."""
        column = self._columns.get("value", pa.chunked_array([pa.nulls(len(self.numbers))]))
        try:
            if _is_text(column.type):
                codes, texts = coded(self.text("value").fill_null("1"))
                read = [_number(text, decimal_comma=self._separator == ";") for text in texts]
                wrong = np.array([number is None for number in read], dtype=bool)[codes]
                what = f"value is no number ({texts[codes[np.argmax(wrong)]]!r})" if wrong.any() else ""
                self.found(wrong, what, "write numbers as 4.5, or leave the cell empty")
                numbers = np.array([1.0 if number is None else number for number in read])[codes]
            else:
                numbers = column.cast(pa.float64()).fill_null(1.0).to_numpy()
        except pa.ArrowException:
            self.found(~self.is_missing("value"), f"value has type {column.type}", "give numbers")
            return np.ones(len(column), dtype=np.float32)
        with np.errstate(over="ignore"):
            values: npt.NDArray[np.float32] = numbers.astype(np.float32)
        advice = "give a finite number, or leave the cell empty"
        self.found(~np.isfinite(values), "value is NaN, infinite or beyond single precision", advice)
        return values

    def titles(self, items: IntArray) -> pa.ChunkedArray:
        text = self.text("title")
        titles = coded(text)[0]
        rows = np.flatnonzero((titles >= 0) & (items >= 0))
        _, first, group = np.unique(items[rows], return_index=True, return_inverse=True)
        other = np.zeros(len(items), dtype=bool)
        other[rows] = titles[rows] != titles[rows[first[group]]]
        advice = "the first title of an item is used; check that ids are not reused"
        self.found(other, "an item has several titles", advice, "warning")
        return text

    def categories(self) -> pa.ChunkedArray:
        """Return texts or lists of texts (N,)."""
        column = self._columns.get("categories")
        if column is not None and pa.types.is_nested(column.type):
            try:
                return column.cast(pa.list_(pa.string()))
            except pa.ArrowException:
                what, advice = f"categories has type {column.type}", "give lists of text, or text separated by |"
                self.found(~self.is_missing("categories"), what, advice)
                return pa.chunked_array([pa.nulls(len(column), pa.string())])
        text = self.text("categories")
        if self._options.separator == "|":
            one = pc.match_substring_regex(text, r"^[^|]*[,;][^|]*$|^\s*\[.*\]\s*$").fill_null(False).to_numpy()
            what, advice = "categories with , or ; or brackets are read as one category", "separate categories by |"
            self.found(one, what, f"{advice}, or name what separates them: --category-separator", "warning")
        return text


def id_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column as text; whole floats and decimals lose their ".0".

    Raises: ValueError for lists and structs; pa.ArrowInvalid for bytes that are not UTF-8.
    """
    column = _plain(column)
    if pa.types.is_nested(column.type):
        raise ValueError(f"ids have type {column.type}; allowed: text or numbers")
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
    is_fraction = pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
    if is_fraction and pc.all(pc.equal(column, pc.floor(column))).as_py() in (True, None):
        with suppress(pa.ArrowInvalid):  # numbers that need more than 64 bits stay as they are
            column = column.cast(pa.int64())
    return column.cast(pa.string())


def coded(text: pa.ChunkedArray) -> Coded:
    """Return codes (N,), -1 for a missing text, and vocabulary."""
    encoded = text.dictionary_encode().combine_chunks()
    return encoded.indices.fill_null(-1).to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    if pa.types.is_float16(column.type):
        return column.cast(pa.float32())
    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        return column.cast(pa.large_binary())
    return column.cast(column.type.storage_type) if isinstance(column.type, pa.BaseExtensionType) else column


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return not (types.is_primitive(kind) or types.is_decimal(kind) or types.is_null(kind) or types.is_nested(kind))


def _number(text: str, *, decimal_comma: bool) -> float | None:
    try:
        return float(text.replace(",", ".") if decimal_comma else text)
    except ValueError:
        return None


def _read_csv(path: Path, ragged: list[int]) -> tuple[pa.Table, str]:
    """Return columns of bytes, and the separator. `ragged` gets the numbers of rows with too many or too few cells."""

    def skip(row: pa_csv.InvalidRow) -> str:
        ragged.append(row.number)
        return "skip"

    data = pa.input_stream(str(path)).read()
    separator = header_separator(path, data)
    parse = pa_csv.ParseOptions(
        delimiter=separator,
        newlines_in_values=True,
        ignore_empty_lines=False,
        invalid_row_handler=skip,
    )
    try:
        pa.array([data], pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        lines = data.splitlines()
        wrong = [number for number, line in enumerate(lines) if line != line.decode(errors="ignore").encode()]
        share = f"{len(wrong):,} of {len(lines):,} lines are not UTF-8, {len(wrong) / len(lines):.1%}"
        raise ValueError(f"{path}: {share} (first: line {wrong[0] + 1}, {lines[wrong[0]][:80]!r})") from None
    with pa_csv.open_csv(pa.BufferReader(data), parse_options=parse) as reader:
        names = reader.schema.names
    ragged.clear()
    # Arrow reports the number of an invalid row only with one thread. Ids stay text ("007") and times are parsed later.
    # Only an empty cell is missing, so that "nan" is reported.
    table = pa_csv.read_csv(
        pa.BufferReader(data),
        read_options=pa_csv.ReadOptions(use_threads=False),
        parse_options=parse,
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()), null_values=[""], strings_can_be_null=True
        ),
    )
    return table.rename_columns([name.strip() for name in table.column_names]), separator


def _matches(table: pa.Table, pattern: str) -> BoolArray:
    """Return which rows have a cell that matches the pattern, (N,)."""
    found = [pc.match_substring_regex(cells, pattern).fill_null(False).to_numpy() for cells in table.columns]
    matches: BoolArray = np.logical_or.reduce(found)
    return matches


def _first_cells(items: Coded, cells: pa.ChunkedArray) -> dict[str, Any]:
    codes, ids = items
    present = np.flatnonzero(cells.is_valid().to_numpy() & (codes >= 0))
    _, first = np.unique(codes[present], return_index=True)
    rows = present[first]
    return dict(zip((ids[code] for code in codes[rows]), cells.take(pa.array(rows)).to_pylist(), strict=True))

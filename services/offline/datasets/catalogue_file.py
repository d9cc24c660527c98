"""Read a file of items: ids, titles, categories, and typed attributes for filters.

Columns of ids, titles and categories are found by name. Every other column with values is an attribute, except columns
of long texts or URLs, which are reported. A value that filters cannot use is an error.

Letters: X items.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from services.algorithms.rules.attributes import ARROW_TYPES, Kind, arrow_kinds

from .columns import plain

MAX_TAG_BYTES = 128
_ITEM = ("itemid", "item", "id", "movieid", "parentasin", "asin", "productid", "product", "sku", "articleid", "article")
_TITLE = ("title", "name", "productname", "itemname")
_CATEGORIES = ("categories", "category", "genres", "genre")
JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
_URL = r"^https?://"


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """The file's items. rows: row number by id. attributes: a table with one row per item, if the file has attributes.
    texts: names of the omitted columns. read_as: a sentence with each column's role.
    """

    rows: Mapping[str, int]
    titles: Sequence[str] = ()
    categories: Sequence[tuple[str, ...]] = ()
    attributes: pa.Table | None
    texts: tuple[str, ...] = ()
    read_as: str = ""

    def attributes_of(self, item_ids: Sequence[str]) -> pa.Table | None:
        """Return these items' attributes in order; items that the file lacks have nulls."""
        if self.attributes is None:
            return None
        return self.attributes.take(pa.array([self.rows.get(item_id) for item_id in item_ids], type=pa.int64()))


def read_catalogue(path: Path, separator: str = "|") -> Catalogue:
    """Read a file of items: .csv, .tsv, .txt, .jsonl, .ndjson or .json (each also as .gz), or Parquet.

    separator: text between a cell's categories.
    Raises: ValueError naming file, column or row, the value, and what is allowed.
    """
    table = _read(path)
    names = {role: _named(table, usual) for role, usual in (("id", _ITEM), ("title", _TITLE), ("cat", _CATEGORIES))}
    if names["id"] is None:
        raise ValueError(f"{path} has columns {table.column_names}; missing: item_id")
    ids = ["" if one is None else one for one in _texts(path, table, names["id"])]
    rows: dict[str, int] = {}
    for row, item_id in enumerate(ids):
        if not item_id:
            raise ValueError(f"{path} row {row}: {names['id']} is missing; allowed: an id in each row")
        if rows.setdefault(item_id, row) != row:
            raise ValueError(f"{path} row {row}: {names['id']}={item_id!r} again, first in row {rows[item_id]}")
    others = [name for name in table.column_names if name not in names.values()]
    texts = tuple(name for name in others if _is_long_text(table.column(name)))
    kept = table.select([name for name in others if name not in texts and not pa.types.is_null(table[name].type)])
    cells = [None] * len(ids) if names["cat"] is None else table.column(names["cat"]).to_pylist()
    taken = [f"{names[role]} is {meaning}" for role, meaning in _MEANINGS.items() if names[role]]
    taken += [f"{name} is an attribute" for name in kept.column_names]
    return Catalogue(
        rows=rows,
        titles=[""] * len(ids)
        if names["title"] is None
        else [one or "" for one in _texts(path, table, names["title"])],
        categories=[split_categories("" if cell is None else cell, separator) for cell in cells],
        attributes=attribute_columns(path, kept, without=()) if kept.column_names else None,
        texts=texts,
        read_as=f"columns of {path.name}: {', '.join(taken)}",
    )


_MEANINGS = {"id": "item", "title": "title", "cat": "categories"}


def split_categories(cell: str | Sequence[str | None], separator: str = "|") -> tuple[str, ...]:
    """Return the categories of a separated text, or of a list of texts."""
    parts = cell.split(separator) if isinstance(cell, str) else ("" if part is None else str(part) for part in cell)
    return tuple(part.strip() for part in parts if part.strip())


def _read(path: Path) -> pa.Table:
    kinds = {suffix.lower() for suffix in path.suffixes}
    try:
        if kinds & {".csv", ".tsv", ".txt"}:
            return _read_csv(path)
        if kinds & JSON_LINES:
            return pa_json.read_json(pa.input_stream(str(path)))
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as exc:
        what = "CSV or JSON lines" if kinds & (JSON_LINES | {".csv", ".tsv", ".txt"}) else "Parquet"
        raise ValueError(f"{path}: not a {what} table ({exc})") from exc


def _read_csv(path: Path) -> pa.Table:
    data = pa.input_stream(str(path)).read()
    parse = pa_csv.ParseOptions(delimiter=header_separator(path, data), newlines_in_values=True)
    with pa_csv.open_csv(pa.BufferReader(data), parse_options=parse) as reader:
        ids = [name for name in reader.schema.names if plain(name) in (*_ITEM, *_TITLE, *_CATEGORIES)]
    # "007" stays "007"; an empty cell is a null.
    convert = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(ids, pa.string()), null_values=[""], strings_can_be_null=True
    )
    return pa_csv.read_csv(pa.BufferReader(data), parse_options=parse, convert_options=convert)


def header_separator(path: Path, data: bytes) -> str:
    """Return a CSV's separator: a tab in a .tsv or .inter file, else the most frequent separator of the header."""
    if any(suffix.lower() in (".tsv", ".inter") for suffix in path.suffixes):
        return "\t"
    return max((",", ";", "\t", "|"), key=data.lstrip().split(b"\n", 1)[0].decode(errors="replace").count)


def _named(table: pa.Table, usual: Sequence[str]) -> str | None:
    return next((name for one in usual for name in table.column_names if plain(name) == one), None)


def _texts(path: Path, table: pa.Table, name: str) -> list[str | None]:
    try:
        texts: list[str | None] = table.column(name).cast(pa.string()).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ValueError(f"{path}: column {name} is of {table.column(name).type}; allowed: text or numbers") from None
    return texts


def _is_long_text(column: pa.ChunkedArray) -> bool:
    """Whether all values are URLs, or a value is longer than a tag may be."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) or column.null_count == len(
        column
    ):
        return False
    urls = pc.all(pc.match_substring_regex(column, _URL)).as_py()
    return bool(urls or pc.any(pc.greater(pc.binary_length(column), MAX_TAG_BYTES)).as_py())


def attribute_columns(path: Path, table: pa.Table, *, without: Collection[str]) -> pa.Table:
    """Return a table's columns, except `without`, as a bundle's attributes. Raises: as `read_catalogue`."""
    columns = {
        name: _column(path, name, table.column(name).combine_chunks())
        for name in table.column_names
        if name not in without
    }
    attributes = pa.table(columns)
    try:
        arrow_kinds(attributes.schema)
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc
    return attributes


def _column(path: Path, name: str, column: pa.Array) -> pa.Array:
    types, of = pa.types, column.type
    if types.is_dictionary(of):
        column = column.cast(of.value_type)
        of = column.type
    if types.is_integer(of) or types.is_floating(of) or types.is_decimal(of):
        number = column.cast(ARROW_TYPES[Kind.NUMBER], safe=False)
        _refuse(path, name, number, pc.invert(pc.is_finite(number)), "a finite number, or null")
        return number
    if types.is_date(of) or types.is_timestamp(of):
        return column.cast(pa.timestamp("ms")).cast(ARROW_TYPES[Kind.TIME], safe=False)
    if types.is_boolean(of) or types.is_string(of) or types.is_large_string(of):
        tags = column.cast(ARROW_TYPES[Kind.TAG])
        sizes = pc.binary_length(tags)
        wrong = pc.or_(pc.equal(sizes, 0), pc.greater(sizes, MAX_TAG_BYTES))
        _refuse(path, name, tags, wrong, f"1-{MAX_TAG_BYTES} bytes of UTF-8, or null")
        return tags
    raise ValueError(
        f"{path}: column {name} is of {of}; allowed: numbers, dates or timestamps, and strings or booleans (tags)"
    )


def _refuse(path: Path, name: str, column: pa.Array, wrong: pa.Array, allowed: str) -> None:
    rows = np.flatnonzero(pc.fill_null(wrong, False).to_numpy(zero_copy_only=False))
    if len(rows):
        raise ValueError(f"{path} row {rows[0]}: {name}={str(column[int(rows[0])])[:80]!r} allowed: {allowed}")

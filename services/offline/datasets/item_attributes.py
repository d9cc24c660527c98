"""Typed attributes of items, read from a Parquet table with an id per row and a column per attribute.

The table's types say what each attribute is; they are brought to the types that a bundle holds. What a filter could
not use later is refused here, naming column, row and what is allowed.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.algorithms.rules.attributes import ARROW_TYPES, Kind, arrow_kinds

MAX_TAG_BYTES = 128


def read_item_attributes(path: Path, item_ids: Sequence[str]) -> pa.Table:
    """The attributes of these items, in their order, nulls where the table (column `item_id`) lacks an item.

    Raises: ValueError naming column or row, the value, and what is allowed.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as exc:
        raise ValueError(f"{path}: not a Parquet table ({exc})") from exc
    if "item_id" not in table.column_names:
        raise ValueError(f"{path} has columns {table.column_names}; missing: item_id")
    rows: dict[str, int] = {}
    for row, item_id in enumerate(map(str, table.column("item_id").to_pylist())):
        if rows.setdefault(item_id, row) != row:
            raise ValueError(f"{path} row {row}: item_id={item_id!r} again, first in row {rows[item_id]}")
    attributes = attribute_columns(path, table, without={"item_id"})
    return attributes.take(pa.array([rows.get(item_id) for item_id in item_ids], type=pa.int64()))


def attribute_columns(path: Path, table: pa.Table, *, without: Collection[str]) -> pa.Table:
    """The other columns of a table as a bundle's attributes. Raises: as `read_item_attributes`."""
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
    if types.is_string(of) or types.is_large_string(of):
        tags = column.cast(ARROW_TYPES[Kind.TAG])
        sizes = pc.binary_length(tags)
        wrong = pc.or_(pc.equal(sizes, 0), pc.greater(sizes, MAX_TAG_BYTES))
        _refuse(path, name, tags, wrong, f"1-{MAX_TAG_BYTES} bytes of UTF-8, or null")
        return tags
    raise ValueError(f"{path}: column {name} is of {of}; allowed: numbers, dates or timestamps, and strings (tags)")


def _refuse(path: Path, name: str, column: pa.Array, wrong: pa.Array, allowed: str) -> None:
    rows = np.flatnonzero(pc.fill_null(wrong, False).to_numpy(zero_copy_only=False))
    if len(rows):
        raise ValueError(f"{path} row {rows[0]}: {name}={str(column[int(rows[0])])[:80]!r} allowed: {allowed}")

"""Item attributes as columns: an immutable table, possibly in mapped memory, and rows for items that change.

Tags are stored as codes per attribute. `rules.attributes` defines the entry for a missing value.

Letters: n items, m requested rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.algorithms.rules.attributes import (
    DTYPES,
    Column,
    Columns,
    Condition,
    Kind,
    Kinds,
    Mask,
    Value,
    Values,
    absent,
    arrow_kinds,
    check_values,
    is_absent,
    mask_of,
)

Rows = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributeTable:
    """n items' attributes; a tag's code is its index in its attribute's `tags`."""

    kinds: Kinds
    columns: Columns
    tags: Mapping[str, Sequence[str]]
    num_items: int

    @classmethod
    def of(cls, kinds: Kinds, items: Sequence[Values]) -> Self:
        """Make a table of a few items. Raises: ValueError as `check_values`."""
        for one in items:
            check_values(one, kinds)
        codes: dict[str, dict[str, int]] = {name: {} for name, kind in kinds.items() if kind is Kind.TAG}
        rows = np.array([encoded(one, kinds, codes) for one in items], row_type(kinds))
        return cls(
            kinds=kinds,
            columns={name: rows[name] for name in kinds},
            tags={name: list(of) for name, of in codes.items()},
            num_items=len(items),
        )

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Self:
        """Make a table from columns that `stored` made, without a copy. Raises: ValueError with the column."""
        kinds, columns, tags = arrow_kinds(table.schema), dict[str, Column](), dict[str, list[str]]()
        for name, kind in kinds.items():
            array = _whole(table.column(name))
            if kind is Kind.TAG:
                tags[name] = array.dictionary.to_pylist()
                if len({*tags[name]}) < len(tags[name]) or None in tags[name]:
                    raise ValueError(f"{name} has tags {tags[name]!r:.80}; allowed: each once, none null")
                array = array.indices
            columns[name] = _column(name, array, DTYPES[kind])
        return cls(kinds=kinds, columns=columns, tags=tags, num_items=len(table))

    def of_row(self, row: int) -> dict[str, Value]:
        return _decoded({name: column[row].item() for name, column in self.columns.items()}, self.kinds, self.tags)

    def take(self, rows: Sequence[int] | Rows) -> Self:
        """Copies of some rows, in order; -1 is a row without attributes."""
        wanted = np.asarray(rows, np.int64)
        columns = {name: taken(column, wanted) for name, column in self.columns.items()}
        return type(self)(kinds=self.kinds, columns=columns, tags=self.tags, num_items=len(wanted))

    def recoded(self, codes: dict[str, dict[str, int]]) -> Columns:
        """The columns, copied if needed, with tag codes from `codes`. Missing tags are added to `codes`."""
        columns = dict(self.columns)
        for name, tags in self.tags.items():
            known = codes.setdefault(name, {})
            moved = np.array([known.setdefault(tag, len(known)) for tag in tags], np.int32)
            if (moved != np.arange(len(moved))).any():
                columns[name] = columns[name].copy()
                has = ~is_absent(columns[name])
                columns[name][has] = moved[columns[name][has]]
        return columns


def no_attributes(num_items: int) -> AttributeTable:
    return AttributeTable(kinds={}, columns={}, tags={}, num_items=num_items)


class AttributeRows:
    """Attributes of changing items, by row: an uncopied table and later changes. It allows one writer and any number of
    readers.
    """

    def __init__(self, table: AttributeTable, items: Rows) -> None:
        """Start from a table. items: the table's row for each row, -1 for none."""
        self.kinds, self._table, self._items = table.kinds, table, items
        self._codes = {name: {tag: code for code, tag in enumerate(tags)} for name, tags in table.tags.items()}
        self._is_table = bool(np.array_equal(items, np.arange(table.num_items)))
        # The written entries, and the index of each row's entry, -1 for none.
        self._put, self._num_put = np.empty(0, row_type(table.kinds)), 0
        self._places = np.full(len(items) if table.kinds else 0, -1, np.int32)
        self._num_rows = len(items)

    def put(self, row: int, values: Values) -> None:
        """Replace an item's attributes; the row after the last is a new item."""
        if not self.kinds:
            return
        if row >= len(self._places):
            self._places = np.concatenate([self._places, np.full(max(16, row), -1, np.int32)])
        place = int(self._places[row])
        if place < 0:
            if row < len(self._items) and self._of_table(row) == values:
                return
            place = self._num_put
            if place == len(self._put):
                self._put = np.concatenate([self._put, np.empty(max(16, place), self._put.dtype)])
            self._num_put += 1
        self._put[place] = encoded(values, self.kinds, self._codes)
        self._places[row] = place
        self._num_rows = max(self._num_rows, row + 1)

    def mask(self, where: Sequence[Condition], rows: Rows | None = None) -> Mask:
        """Which of all rows, or of `rows` (m,), meet all conditions.

        There must be at least one condition. A row out of range meets none. Raises: ValueError as `Condition.check`.
        """
        for one in where:
            one.check(self.kinds)
        num_rows, places, put = self._num_rows, self._places, self._put  # in reverse order of `put`'s writes
        columns, codes, items = self._table.columns, self._codes, self._items
        of_nothing = all(one.holds(None) for one in where)
        if rows is None:
            of_items = mask_of(where, columns, codes)
            passes = np.zeros(num_rows, dtype=bool)
            passes[: len(items)] = of_items if self._is_table else np.append(of_items, of_nothing)[items]
            if len(put):
                changed = np.flatnonzero(places[:num_rows] >= 0)
                passes[changed] = mask_of(where, put[places[changed]], codes)
            return passes
        passes = np.full(len(rows), of_nothing)
        if len(items) and self._table.num_items:
            left, wanted = np.arange(len(rows)), items.take(rows, mode="clip").astype(np.int64)
            passes[wanted >= 0] = False
            left, wanted = left[wanted >= 0], wanted[wanted >= 0]
            for one in where:
                meets = one.mask(columns[one.name].take(wanted, mode="clip"), codes.get(one.name, {}))
                left, wanted = left[meets], wanted[meets]
            passes[left] = True
        if len(put):
            found = places.take(rows, mode="clip")
            passes[found >= 0] = mask_of(where, put[found[found >= 0]], codes)
        passes[(rows < 0) | (rows >= num_rows)] = False
        return passes

    def of_row(self, row: int) -> Values:
        place, put = int(self._places[row]) if row < len(self._places) else -1, self._put
        if place < 0:
            return self._of_table(row) if row < len(self._items) else {}
        tags = {name: list(codes) for name, codes in self._codes.items()}
        return _decoded(dict(zip(self.kinds, put[place].item(), strict=True)), self.kinds, tags)

    def _of_table(self, row: int) -> Values:
        item = int(self._items[row])
        return {} if item < 0 else self._table.of_row(item)


def row_type(kinds: Kinds) -> np.dtype[Any]:
    return np.dtype([(name, DTYPES[kind]) for name, kind in kinds.items()])


def encoded(values: Values, kinds: Kinds, codes: dict[str, dict[str, int]]) -> tuple[float, ...]:
    """An item's row; a new tag gets its attribute's next code."""
    entries: list[float] = []
    for name, kind in kinds.items():
        value = values.get(name, absent(DTYPES[kind]))
        entries.append(codes[name].setdefault(value, len(codes[name])) if isinstance(value, str) else value)
    return tuple(entries)


def _decoded(entries: Values, kinds: Kinds, tags: Mapping[str, Sequence[str]]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, value in entries.items():
        if value == value and value != absent(DTYPES[kinds[name]]):  # NaN is not itself
            found[name] = tags[name][int(value)] if name in tags else value
    return found


def taken(column: Column, rows: Rows) -> Column:
    """Copies of a column's entries of m rows, absent for row -1: (m,)."""
    out = column[rows] if len(column) else np.empty(len(rows), column.dtype)
    out[rows < 0] = absent(column.dtype)
    return out


def stored(table: pa.Table) -> dict[str, pa.Array]:
    """Convert columns of `ARROW_TYPES` to the items file's format: tags become codes, nulls have the absent value."""
    columns = {}
    for name in table.column_names:
        array = _whole(table.column(name))
        if pa.types.is_string(array.type):
            array = array.dictionary_encode()
            columns[name] = pa.DictionaryArray.from_arrays(_filled(array.indices), array.dictionary)
        else:
            columns[name] = _filled(array)
    return columns


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _filled(array: pa.Array) -> pa.Array:
    dtype = np.dtype(np.int64) if pa.types.is_timestamp(array.type) else np.dtype(array.type.to_pandas_dtype())
    is_null = array.is_null().to_numpy(zero_copy_only=False)
    entries = np.array(array.view(pa.from_numpy_dtype(dtype)).fill_null(0))
    entries[is_null] = absent(dtype)
    return pa.array(entries, mask=is_null, from_pandas=False).view(array.type)


def _column(name: str, array: pa.Array, dtype: np.dtype[Any]) -> Column:
    """An array's entries without a copy. Raises: ValueError unless nulls, and only nulls, have the absent value."""
    validity, data = array.buffers()
    column = np.frombuffer(data, dtype)[array.offset : array.offset + len(array)]
    is_null = np.zeros(len(array), dtype=bool)
    if validity is not None:
        bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
        is_null = bits[array.offset : array.offset + len(array)] == 0
    if dtype.kind == "f" and (np.isinf(column) | (np.isnan(column) & ~is_null)).any():
        raise ValueError(f"{name} holds NaN or infinite numbers; allowed: finite ones, or null")
    if (wrong := np.flatnonzero(is_absent(column) != is_null)).size:
        found = f"{name} row {wrong[0]} holds {column[wrong[0]]}"
        raise ValueError(f"{found}; allowed: {absent(dtype)} at nulls, and only there")
    return column

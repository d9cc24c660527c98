"""A catalogue's items as an Arrow file: a bundle's item columns except the states.

item_id: string   title: string   categories: list<dictionary<string>>   count: int64
id_hash, id_hash_row: int64, int32   the ids' xxh3 hashes in ascending order, and their rows
popular_row, popularity_rank: int32   rows by descending count, then id, and each row's position in this order
attributes.NAME: double, timestamp[ms, UTC] or dictionary<string>, one per declared attribute

One batch of uncompressed columns. A large file is mapped, so that processes share its pages. Any Arrow library reads
it: pandas.read_feather(path), pyarrow.ipc.open_file(path).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.algorithms.bundles.model_manifest import BundleError, errors_of
from services.algorithms.bundles.tensor_file import mapped_or_read
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.categories import Categories, CategoryLists
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings

Rows = npt.NDArray[np.int32]

_CATEGORY = pa.dictionary(pa.int32(), pa.string())
ATTRIBUTE_PREFIX = "attributes."
_CHECKED = 1 << 20  # rows checked at a time, so that checking a large mapped column takes little memory


@dataclass(frozen=True, slots=True)
class ByPopularity:
    """rows (n,): by descending count, then id. rank (n,): each row's position there."""

    rows: Rows
    rank: Rows

    @classmethod
    def of(cls, ids: Strings, counts: npt.NDArray[np.int64]) -> "ByPopularity":
        by_id = ids.order()
        rows = by_id[np.argsort(-counts[by_id], kind="stable")].astype(np.int32)
        rank = np.empty_like(rows)
        rank[rows] = np.arange(len(rows), dtype=np.int32)
        return cls(rows, rank)

    def check(self) -> None:
        """Raise ValueError unless each array is the other's inverse."""
        for start in range(0, len(self.rows), _CHECKED):
            rows = self.rows[start : start + _CHECKED]
            in_range = 0 <= rows.min() <= rows.max() < len(self.rank)
            if not in_range or (self.rank[rows] != np.arange(start, start + len(rows))).any():
                raise ValueError("popularity_rank is not the inverse of popular_row")


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemColumns:
    """n items: ids, titles, categories, counts of training interactions (n,), order by count, and attributes."""

    ids: ItemIds
    titles: Strings
    categories: Categories
    counts: npt.NDArray[np.int64]
    by_popularity: ByPopularity
    attributes: AttributeTable

    def __len__(self) -> int:
        return len(self.ids)


def read_items(path: Path, num_items: int) -> ItemColumns:
    """Read an items file. Raises: BundleError if columns or the number of rows differ from those expected, or ids are
    not distinct or not of 1-128 bytes.
    """
    try:
        table = pa.ipc.open_file(mapped_or_read(path)).read_all().combine_chunks()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise BundleError(f"{path}: not an Arrow file of items ({exc})") from exc
    wanted = {
        "item_id": _is_text,
        "title": _is_text,
        "categories": _is_categories,
        "count": pa.types.is_int64,
        "id_hash": pa.types.is_int64,
        "id_hash_row": pa.types.is_int32,
        "popular_row": pa.types.is_int32,
        "popularity_rank": pa.types.is_int32,
    }
    own, others = table.column_names[: len(wanted)], table.column_names[len(wanted) :]
    is_right = (
        own == list(wanted)
        and all(test(table.schema.field(name).type) for name, test in wanted.items())
        and all(name.startswith(ATTRIBUTE_PREFIX) for name in others)
    )
    if not is_right or len(table) != num_items:
        found = dict(zip(table.column_names, map(str, table.schema.types), strict=True))
        raise BundleError(
            f"{path} has {len(table)} rows of {found}; expected {num_items} rows of item_id and title (string), "
            "categories (list of dictionary-coded strings), count and id_hash (int64), id_hash_row, popular_row and "
            f"popularity_rank (int32) and columns named {ATTRIBUTE_PREFIX}NAME"
        )
    columns: dict[str, Any] = {name: _single_chunk(table.column(name)) for name in wanted}
    for name, column in columns.items():
        inner = column.values if name == "categories" else column
        if column.null_count or inner.null_count:
            raise BundleError(f"{path}: column {name} holds nulls; allowed: none")
    codes = columns["categories"].values
    with errors_of(path):
        found_items = ItemColumns(
            ids=ItemIds(
                strings_of(columns["item_id"]),
                by_hash=(columns["id_hash"].to_numpy(), columns["id_hash_row"].to_numpy()),
            ),
            titles=strings_of(columns["title"]),
            categories=Categories(
                CategoryLists(columns["categories"].offsets.to_numpy(), codes.indices.to_numpy()),
                codes.dictionary.to_pylist(),
            ),
            counts=columns["count"].to_numpy(),
            by_popularity=ByPopularity(columns["popular_row"].to_numpy(), columns["popularity_rank"].to_numpy()),
            attributes=AttributeTable.from_arrow(attributes_in(table)),
        )
        found_items.ids.check_hashes("item_id")
        found_items.ids.check("item_id")
        found_items.by_popularity.check()
    return found_items


def attributes_in(table: pa.Table) -> pa.Table:
    """An items file's attribute columns, named without the prefix."""
    found = table.select([name for name in table.column_names if name.startswith(ATTRIBUTE_PREFIX)])
    return found.rename_columns([name.removeprefix(ATTRIBUTE_PREFIX) for name in found.column_names])


def strings_of(array: pa.Array) -> Strings:
    """A column that shares the array's memory. Raises: ValueError as `Strings`."""
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1]
    bytes_ = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return Strings(bytes_[: int(ends[-1])], ends[1:])


def _single_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_categories(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and kind.value_type == _CATEGORY)

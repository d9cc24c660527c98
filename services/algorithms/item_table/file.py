"""A catalogue's items as an Arrow file: a bundle's item columns except the states.

item_id: string   title: string   categories: list<dictionary<string>>   count: int64
attributes.NAME: double, timestamp[ms, UTC] or dictionary<string>, one per declared attribute

One batch of uncompressed columns, mapped if large, so that processes share its pages. Any Arrow library reads it:
pandas.read_feather(path), pyarrow.ipc.open_file(path).
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

_CATEGORY = pa.dictionary(pa.int32(), pa.string())
ATTRIBUTE_PREFIX = "attributes."


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemColumns:
    """n items: ids, titles, categories, training interactions (n,), and attributes."""

    ids: ItemIds
    titles: Strings
    categories: Categories
    counts: npt.NDArray[np.int64]
    attributes: AttributeTable

    def __len__(self) -> int:
        return len(self.ids)


def read_items(path: Path, num_items: int) -> ItemColumns:
    """Read an items' file. Raises: BundleError with the column for other columns or rows, or ids that are not distinct
    or not of 1-128 bytes.
    """
    try:
        table = pa.ipc.open_file(mapped_or_read(path)).read_all().combine_chunks()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise BundleError(f"{path}: not an Arrow file of items ({exc})") from exc
    wanted = {"item_id": _is_text, "title": _is_text, "categories": _is_categories, "count": pa.types.is_int64}
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
            f"categories (list of dictionary-coded strings), count (int64) and columns named {ATTRIBUTE_PREFIX}NAME"
        )
    columns: dict[str, Any] = {name: _single_chunk(table.column(name)) for name in wanted}
    for name, column in columns.items():
        inner = column.values if name == "categories" else column
        if column.null_count or inner.null_count:
            raise BundleError(f"{path}: column {name} holds nulls; allowed: none")
    codes = columns["categories"].values
    with errors_of(path):
        found_items = ItemColumns(
            ids=ItemIds(strings_of(columns["item_id"])),
            titles=strings_of(columns["title"]),
            categories=Categories(
                CategoryLists(columns["categories"].offsets.to_numpy(), codes.indices.to_numpy()),
                codes.dictionary.to_pylist(),
            ),
            counts=columns["count"].to_numpy(),
            attributes=AttributeTable.from_arrow(attributes_in(table)),
        )
        found_items.ids.check("item_id")
    return found_items


def attributes_in(table: pa.Table) -> pa.Table:
    """An items file's attributes under their own names."""
    found = table.select([name for name in table.column_names if name.startswith(ATTRIBUTE_PREFIX)])
    return found.rename_columns([name.removeprefix(ATTRIBUTE_PREFIX) for name in found.column_names])


def strings_of(array: pa.Array) -> Strings:
    """A column over an array's memory. Raises: ValueError as `Strings`."""
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

"""External item embeddings: a Parquet table with an id and a vector per row."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.algorithms.pefa.refresh import unit
from services.algorithms.scoring.states import MAX_OWN_LENGTH
from services.offline.datasets.catalogue_file import attribute_columns, split_categories

MAX_ID_BYTES = 128
_OWN = frozenset({"item_id", "vector", "title", "categories"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemVectors:
    """Ids and vectors (X, d) float32 of X items. In a table without titles, the ids are used; without categories, each
    item has none. attributes: the table's other columns, if any.
    """

    item_ids: list[str]
    vectors: npt.NDArray[np.float32]
    titles: list[str]
    categories: list[list[str]]
    attributes: pa.Table | None


def read_item_vectors(path: Path, *, normalize: bool = False) -> ItemVectors:
    """Read columns `item_id` and `vector`, optional `title` and `categories`, and all others as attributes.

    normalize: scale vectors to length 1; otherwise a vector's length may be at most MAX_OWN_LENGTH.
    Raises: ValueError naming column or row, the value, and what is allowed.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as exc:
        raise ValueError(f"{path}: not a Parquet table ({exc})") from exc
    missing = [name for name in ("item_id", "vector") if name not in table.column_names]
    if missing:
        raise ValueError(f"{path} has columns {table.column_names}; missing: {missing}")
    item_ids = ["" if value is None else str(value) for value in table.column("item_id").to_pylist()]
    return ItemVectors(
        item_ids=_check_ids(path, item_ids),
        vectors=_scaled(path, _vectors(path, table.column("vector").combine_chunks()), normalize=normalize),
        titles=["" if title is None else str(title) for title in table.column("title").to_pylist()]
        if "title" in table.column_names
        else item_ids,
        categories=[list(split_categories(names or "")) for names in table.column("categories").to_pylist()]
        if "categories" in table.column_names
        else [[] for _ in item_ids],
        attributes=attribute_columns(path, table, without=_OWN) if set(table.column_names) - _OWN else None,
    )


def _check_ids(path: Path, item_ids: list[str]) -> list[str]:
    if not item_ids:
        raise ValueError(f"{path} has 0 rows; allowed: at least 1 item")
    first_row: dict[str, int] = {}
    for row, item_id in enumerate(item_ids):
        if not 1 <= len(item_id.encode()) <= MAX_ID_BYTES:
            raise ValueError(f"{path} row {row}: item_id={item_id[:40]!r}; allowed: 1-{MAX_ID_BYTES} bytes of UTF-8")
        if first_row.setdefault(item_id, row) != row:
            raise ValueError(f"{path} row {row}: item_id={item_id!r} again, first in row {first_row[item_id]}")
    return item_ids


def _scaled(path: Path, vectors: npt.NDArray[np.float32], *, normalize: bool) -> npt.NDArray[np.float32]:
    if normalize:
        if len(zeros := np.flatnonzero(~vectors.any(axis=1))):
            raise ValueError(f"{path} row {zeros[0]}: a vector of zeros has no direction to normalize")
        return unit(vectors).astype(np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    if len(long := np.flatnonzero(~(lengths <= MAX_OWN_LENGTH))):
        allowed = f"at most {MAX_OWN_LENGTH:.0f}, or any with --normalize"
        raise ValueError(f"{path} row {long[0]}: vector has length {lengths[long[0]]:.6g}; allowed: {allowed}")
    return vectors


def _vectors(path: Path, column: pa.Array) -> npt.NDArray[np.float32]:
    if not (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    ):
        raise ValueError(f"{path}: column vector has type {column.type}; expected a list of numbers")
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    width = int(lengths[0])
    if width < 1 or (lengths != width).any():
        row = int(np.argmax(lengths != max(width, 1)))
        raise ValueError(
            f"{path} row {row}: vector has {lengths[row]} values; expected {width or 'at least 1'} as in row 0"
        )
    values = column.flatten()
    if values.null_count:
        raise ValueError(
            f"{path}: {values.null_count} of the vectors' values are missing; every value must be a number"
        )
    vectors = np.ascontiguousarray(values.to_numpy(zero_copy_only=False), dtype=np.float32).reshape(-1, width)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ValueError(f"{path} row {bad[0]}: vector holds NaN or infinite values; every value must be finite")
    return vectors

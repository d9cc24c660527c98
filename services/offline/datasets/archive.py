"""Read an archive of `interactions` (`freshet archive`) as training data, as the stream's consumers read it.

Unreadable records, undos, undone events and repeated event ids are omitted.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.offline.archive.files import open_whole

from .interactions import Interactions, from_columns

_COLUMNS = ["user_id", "item_id", "type", "value", "event_time", "event_id", "undoes_event_id"]
_MAX_VALUE = float(np.finfo(np.float32).max)


def read_archive(folder: str | Path, *, name: str = "") -> Interactions:
    """Read a whole archive after verifying every file's checksum.

    Raises: PreconditionFailed if a file was altered; ValueError if no interaction is left.
    """
    folder = Path(folder)
    archive = open_whole(folder)
    table = pa.concat_tables(archive.table(file, _COLUMNS) for file in archive.files) if archive.files else None
    if table is not None:
        table = _counting(table.filter(pc.is_valid(table["user_id"])))
    if table is None or not len(table):
        raise ValueError(f"{folder} holds no interaction that counts; run `freshet archive` once there are some")
    # Rows are sorted by milliseconds here, because `from_columns` has seconds and keeps the order within a second.
    table = table.take(pc.sort_indices(table, sort_keys=[("event_time", "ascending")]))
    users, items, types = (table[column].dictionary_encode().combine_chunks() for column in _COLUMNS[:3])
    return from_columns(
        users=(users.indices.to_numpy(), users.dictionary.to_pylist()),
        items=(items.indices.to_numpy(), items.dictionary.to_pylist()),
        types=(types.indices.to_numpy(), types.dictionary.to_pylist()),
        timestamps=table["event_time"].cast(pa.int64()).to_numpy() // 1000,
        values=np.clip(table["value"].to_numpy(), -_MAX_VALUE, _MAX_VALUE),
        name=name or folder.resolve().name,
        source=f"{folder}: {len(table):,} interactions of {len(users.dictionary):,} users with "
        f"{len(items.dictionary):,} items",
    )


def _counting(table: pa.Table) -> pa.Table:
    ids = pc.binary_join_element_wise(table["user_id"], table["event_id"], "\n")
    undoes = pc.binary_join_element_wise(table["user_id"], table["undoes_event_id"], "\n")
    is_undo = pc.not_equal(table["undoes_event_id"], "")
    counts = pc.invert(pc.or_(is_undo, pc.is_in(ids, value_set=undoes.filter(is_undo))))
    table, ids = table.filter(counts), ids.filter(counts)
    _, firsts = np.unique(ids.dictionary_encode().combine_chunks().indices.to_numpy(), return_index=True)
    return table.take(np.sort(firsts))

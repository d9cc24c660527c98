"""Write a model bundle, or add derived files to one."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from services.algorithms.bundles.event_schema import EVENTS_YAML
from services.algorithms.bundles.model_bundle import (
    CODEBOOKS,
    ITEM_STATES,
    ITEMS,
    NEIGHBOURS,
    PAIR_GATE,
    USER_SCHEMA,
    USERS,
    WEIGHTS,
    Bundle,
    content_files,
    load_bundle,
    model_version_of,
)
from services.algorithms.bundles.model_manifest import AbsenceShape, EncoderShape, HeadShape, Manifest
from services.algorithms.bundles.sealed_files import MANIFEST, file_entry
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.item_table.attributes import stored
from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.file import ATTRIBUTE_PREFIX, ByPopularity
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.algorithms.scoring.states import ItemStates, PairGate
from services.offline.bundles.folders import folder_aside, put_file, save_pair_gate, save_states, save_tensors, swap

_LONG = 2**31 - 1  # columns with more bytes need 64-bit offsets


@dataclass(frozen=True, kw_only=True)
class BundleContent:
    """Shapes, arrays and columns of a bundle, in dense-index order.

    For imported embeddings, encoder is None and weights is empty. events_yaml: the event schema; None means the
    default schema.
    attributes: columns of `attributes.ARROW_TYPES`.
    """

    encoder: EncoderShape | None
    head: HeadShape
    weights: Mapping[str, npt.NDArray[Any]]
    item_states: ItemStates
    pair_gate: PairGate | None
    item_ids: Sequence[str]
    titles: Sequence[str]
    categories: Sequence[Sequence[str]]
    counts: npt.NDArray[np.int64]
    user_ids: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    new_item_length: float | None = None
    neighbours: ItemNeighbours | None = None
    absence: AbsenceShape | None = None
    events_yaml: bytes | None = None
    attributes: pa.Table | None = None
    codebooks: Codebooks | None = None


def write_bundle(path: Path | str, content: BundleContent) -> Bundle:
    """Write a bundle, rename it into place, and return it loaded.

    Raises: BundleError if `path` exists and is not a bundle, or if the content's shapes disagree.
    """
    target = Path(path)
    aside = folder_aside(target)
    try:
        _write_content(aside, content)
        load_bundle(aside)
        swap(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return load_bundle(target, verify=False)


def add_files(path: Path | str, sources: Mapping[str, Path]) -> Bundle:
    """Add derived files (exported encoder, inference server's folder) to a bundle, which keeps its version."""
    root = Path(path)
    manifest = Manifest.read(root / MANIFEST)
    files = dict(manifest.files)
    for name, source in sources.items():
        files[name] = put_file(root, name, source)
    replace(manifest, files=files).write(root / MANIFEST)
    return load_bundle(root, verify=False)


def write_items(
    path: Path,
    item_ids: Sequence[str],
    titles: Sequence[str],
    categories: Sequence[Sequence[str]],
    counts: npt.NDArray[np.int64],
    attributes: pa.Table | None = None,
) -> None:
    """Write an items' file. attributes: columns of `rules.attributes.ARROW_TYPES`.

    Raises: ValueError for columns of unequal length.
    """
    ids, counts = ItemIds(Strings.of(item_ids)), np.asarray(counts, np.int64)
    hashes, hash_rows = ids.by_hash
    by_popularity = ByPopularity.of(ids.strings, counts)
    lists = Categories.of(categories)
    codes = pa.DictionaryArray.from_arrays(pa.array(lists.lists.codes), pa.array(lists.names, pa.string()))
    columns = {
        "item_id": _as_arrow(ids.strings),
        "title": _as_arrow(Strings.of(titles)),
        "categories": pa.ListArray.from_arrays(pa.array(lists.lists.offsets.astype(np.int32)), codes),
        "count": pa.array(counts),
        "id_hash": pa.array(hashes),
        "id_hash_row": pa.array(hash_rows),
        "popular_row": pa.array(by_popularity.rows),
        "popularity_rank": pa.array(by_popularity.rank),
    }
    if attributes is not None:
        columns |= {ATTRIBUTE_PREFIX + name: column for name, column in stored(attributes).items()}
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _write_content(root: Path, content: BundleContent) -> None:
    save_tensors({name: np.ascontiguousarray(array) for name, array in content.weights.items()}, root / WEIGHTS)
    save_states(content.item_states, root / ITEM_STATES)
    if content.pair_gate is not None:
        save_pair_gate(content.pair_gate, root / PAIR_GATE)
    near = None if content.neighbours is None else content.neighbours.shape
    if content.neighbours is not None:
        save_tensors({"items": content.neighbours.items, "weights": content.neighbours.weights}, root / NEIGHBOURS)
    items = content.item_ids, content.titles, content.categories, content.counts
    write_items(root / ITEMS, *items, content.attributes)
    pq.write_table(pa.table({"user_id": list(content.user_ids)}, schema=USER_SCHEMA), root / USERS)
    if content.events_yaml is not None:
        (root / EVENTS_YAML).write_bytes(content.events_yaml)
    if content.codebooks is not None:
        save_tensors(
            {name: np.ascontiguousarray(array) for name, array in content.codebooks.arrays.items()}, root / CODEBOOKS
        )
    names = (*content_files(content.head, near), EVENTS_YAML, CODEBOOKS)
    files = {name: file_entry(root / name) for name in names if (root / name).is_file()}
    manifest = Manifest(
        model_version="",
        encoder=content.encoder,
        head=content.head,
        num_items=len(content.item_ids),
        num_users=len(content.user_ids),
        data=dict(content.data),
        metrics=dict(content.metrics),
        files=files,
        new_item_length=content.new_item_length,
        neighbours=near,
        absence=content.absence,
    )
    replace(manifest, model_version=model_version_of(manifest, root)).write(root / MANIFEST)


def _as_arrow(column: Strings) -> pa.Array:
    """Return an array that shares the column's memory."""
    is_long = len(column.data) > _LONG
    ends = column.ends.astype(np.int64 if is_long else np.int32)
    offsets = pa.py_buffer(np.concatenate([np.zeros(1, ends.dtype), ends]))
    kind = pa.large_string() if is_long else pa.string()
    return pa.Array.from_buffers(kind, len(column), [None, offsets, pa.py_buffer(column.data)])

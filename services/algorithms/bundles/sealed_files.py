"""Check files against a manifest's sizes and checksums; check and read tables, gates and item states."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.algorithms.bundles.model_manifest import BundleError, FileEntry, HeadShape, errors_of
from services.algorithms.bundles.tensor_file import read_tensors, tensor_places
from services.algorithms.item_table.strings import Indices
from services.algorithms.scoring.states import MAX_LENGTH, ItemStates, PairGate, check_sizes

MANIFEST = "manifest.json"
PAIR_GATE_ARRAYS = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")


def check_file(root: Path, name: str, entry: FileEntry, *, verify: bool) -> None:
    """Raise BundleError unless the file exists with the entry's size and, with `verify`, its checksum."""
    path = root / name
    try:
        found = path.stat().st_size if path.is_file() else None
    except OSError as exc:  # such as a name that is too long
        raise BundleError(f"{path}, which {MANIFEST} lists, cannot be opened: {exc.strerror}") from exc
    if found is None:
        raise BundleError(f"{path} is missing; {MANIFEST} lists it with {entry.bytes} bytes")
    if found != entry.bytes:
        raise BundleError(f"{path} holds {found} bytes; {MANIFEST} says {entry.bytes}")
    if verify and (checksum := _sha256(path)) != entry.sha256:
        raise BundleError(f"{path} has sha256 {checksum}; {MANIFEST} says {entry.sha256}")


def file_entry(path: Path) -> FileEntry:
    return FileEntry(sha256=_sha256(path), bytes=path.stat().st_size)


def check_tensors(path: Path, expected: Mapping[str, tuple[int, ...]], *, indices: str = "") -> None:
    """Raise BundleError unless the file has exactly these float32 arrays; the one named by `indices` is int32."""
    found = {name: (dtype.name, shape) for name, (dtype, shape, _) in tensor_places(path).items()}
    wanted = {name: ("int32" if name == indices else "float32", shape) for name, shape in expected.items()}
    if found != wanted:
        raise BundleError(f"{path} holds {found}; {MANIFEST} says {wanted}")


def check_table(path: Path, schema: pa.Schema, rows: int) -> None:
    """Raise BundleError unless the file is a Parquet table of these columns and rows."""
    try:
        metadata = pq.read_metadata(path)
        found = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as exc:
        raise BundleError(f"{path}: not a Parquet file ({exc})") from exc
    if metadata.num_rows != rows or found.names != schema.names or found.types != schema.types:
        columns, wanted = (dict(zip(one.names, map(str, one.types), strict=True)) for one in (found, schema))
        raise BundleError(f"{path} has {metadata.num_rows} rows of {columns}; expected {rows} rows of {wanted}")


def read_table(path: Path) -> pa.Table:
    """Return a table. Raises: BundleError if it is unreadable or a column has a null."""
    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as exc:
        raise BundleError(f"{path} cannot be read ({exc})") from exc
    for name in table.column_names:
        column = table.column(name)
        # No pyarrow.compute: importing it takes 10 MB in every process.
        inner = [chunk.values for chunk in column.chunks] if pa.types.is_list(column.type) else []
        if column.null_count or any(chunk.null_count for chunk in inner):
            raise BundleError(f"{path}: column {name} holds nulls; allowed: none")
    return table


def read_pair_gate(path: Path) -> PairGate:
    """Return a gate. Raises: BundleError for invalid values."""
    tensors = read_tensors(path)
    with errors_of(path):
        return PairGate(**{name: tensors[name] for name in PAIR_GATE_ARRAYS})


def check_pair_gate(path: Path, head: HeadShape) -> None:
    """Raise BundleError unless the file has a gate of this head's shape."""
    hidden, pairs = head.gate_hidden, head.num_pairs
    shapes = ((hidden, pairs), (hidden,), (pairs, hidden), (pairs,))
    check_tensors(path, dict(zip(PAIR_GATE_ARRAYS, shapes, strict=True)))


def read_item_states(path: Path, *, longest: float = MAX_LENGTH, rows: Indices | None = None) -> ItemStates:
    """Return item states, with gates if the file has them. A large file is memory-mapped unless `rows` is given.

    longest: allowed length of a component. Raises: BundleError for invalid values.
    """
    tensors = read_tensors(path)
    if rows is not None:
        tensors = {name: array[rows] for name, array in tensors.items()}
    with errors_of(path):
        states = ItemStates(components=tensors["components"], gate=tensors.get("gate"))
        check_sizes(states.components, states.gate, longest=longest)
    return states


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

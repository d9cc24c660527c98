"""Snapshots of a mutable index: one directory each, checksummed, renamed into place, memory-mapped on load.

    snapshot-<number of earlier snapshots>/   manifest.json   items.safetensors
                                              item_states.safetensors, unless they are the bundle's
                                              codes.safetensors, if the main segment has codes

A directory is written under a temporary name, flushed to disk, then renamed. A crash leaves the older snapshots, and a
temporary directory that the next write removes. Items are in order of ids; with codes, the main segment's items come
first, then the delta's. The pair gate is in the bundle; attributes come from the bundle and the topic `items`.

Codes are one array <key>:<field> per key and field. With ten million items at preset `quick`, computing them takes 76 s
on two cores; checking and mapping them takes 1 s.

Letters: P_x item components, P pairs, d component width.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import (
    WHOLE,
    BundleError,
    FileEntry,
    build_part,
    check_names,
    read_fields,
)
from services.algorithms.bundles.sealed_files import MANIFEST, check_file
from services.algorithms.bundles.tensor_file import read_tensors, tensor_places
from services.algorithms.bundles.tensor_writer import SlicedTensor, write_tensors
from services.algorithms.indexes.mutable.index import MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.segment_merge import (
    Order,
    gather_categories,
    gather_hashes,
    gather_ids,
    state_slices,
)
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.ops.quantized_scan import Codes, Coding, RowCodes, codes_key
from services.algorithms.ops.quantized_scan.cells import FloatMatrix
from services.algorithms.scoring.states import ItemShape, ItemStates

Arrays = Mapping[str, npt.NDArray[Any]]


def code_arrays(codes: Mapping[str, RowCodes], num_rows: int) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {"num_rows": np.array([num_rows])}
    for key, one in codes.items():
        for part in fields(one):  # type: ignore[arg-type]
            value = getattr(one, part.name)
            if value is not None:
                arrays[f"{key}:{part.name}"] = np.array([value]) if isinstance(value, int) else value
    return arrays


@dataclass(kw_only=True, slots=True)
class HeldCodes:
    """The stored codes of a snapshot's first `num_rows` rows. A call computes codes if the stored ones are missing,
    malformed or of another method, size or width.

    made: whether a call computed codes. report: called with an event, `path`, `part` and, after a rejection, `reason`.
    """

    path: Path | None = None
    arrays: Arrays = field(default_factory=dict)
    made: bool = False
    report: Callable[..., object] = lambda event, **said: None

    @property
    def num_rows(self) -> int:
        return int(self.arrays["num_rows"][0]) if self.arrays else 0

    def __call__(
        self,
        part: str,
        vectors: Callable[[], FloatMatrix],
        shape: tuple[int, int],
        /,
        *,
        cells: Coding[Codes],
        seed: int,
    ) -> Codes:
        """Codes of `part`, stored or computed from its vectors."""
        try:
            codes = self._codes_of(part, codes_key(part, cells, seed), cells.kind)
            if codes is not None:
                codes.check_fits(*shape)
                self.report("codes_taken", path=str(self.path), part=part)
                return codes
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            self.report("codes_refused", path=str(self.path), part=part, reason=str(error))
        self.made = True
        return cells.coded(vectors(), seed=seed)

    def _codes_of(self, part: str, key: str, kind: type[Codes]) -> Codes | None:
        """Return the stored codes, if any. Raises: ValueError for codes of another method; for malformed arrays, any
        error that `__call__` catches.
        """
        found = {
            name.rpartition(":")[2]: array for name, array in self.arrays.items() if name.rpartition(":")[0] == key
        }
        if found:
            values = {
                one.name: int(found[one.name][0]) if one.type is int else found.get(one.name)
                for one in fields(kind)  # type: ignore[arg-type]
            }
            return kind(**values)
        others = {known for name in self.arrays if (known := name.rpartition(":")[0]).startswith(f"{part}, ")}
        if others:
            raise ValueError(f"codes of {', '.join(sorted(others))}; allowed: {key}")
        return None


ITEMS = "items.safetensors"
ITEM_STATES = "item_states.safetensors"
CODES = "codes.safetensors"
FORMAT = 4
KEPT = 2  # the newest and one older

_PREFIX, _ASIDE = "snapshot-", ".aside-"


class SnapshotError(BundleError):
    """A snapshot contradicts its manifest or has another model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotManifest:
    """`manifest.json`, whose field `checksum` covers all other fields."""

    model_version: str
    index_version: str
    number: int
    digest: str
    num_items: int
    shape: ItemShape
    files: dict[str, FileEntry]
    said: dict[str, Any]
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A checked snapshot with memory-mapped states."""

    path: Path
    manifest: SnapshotManifest
    items: ItemBatch
    columns: dict[str, npt.NDArray[Any]]
    codes: HeldCodes

    @property
    def index_version(self) -> str:
        return self.manifest.index_version


def write_snapshot(
    root: Path,
    index: MutableIndex,
    *,
    version: Version | None = None,
    said: Mapping[str, Any] = MappingProxyType({}),
    columns: Callable[[Strings], Mapping[str, npt.NDArray[Any]]] = lambda ids: {},
    with_states: bool = True,
) -> Path:
    """Write a version of an index (None: the newest) below `root`, keep the newest `KEPT`, return the path.

    said: JSON values; columns: arrays in the order of the written ids. Both are loaded unchanged. with_states: False if
    the items and states are the bundle's, in its order. Searches and changes continue; only one process at a time may
    write below a root.
    """
    version, shape = version or index.version, index.shape
    root.mkdir(parents=True, exist_ok=True)
    for abandoned in root.glob(f"{_ASIDE}*"):
        shutil.rmtree(abandoned)
    older = snapshots(root)
    name = f"{1 + (_sequence(older[0]) if older else 0):012d}"
    aside, target = root / f"{_ASIDE}{name}", root / f"{_PREFIX}{name}"
    aside.mkdir()
    coded, codes = version.main, {} if version.main is None else version.main.segment.codes
    order = version.main_first() if codes else version.in_order()
    ids, categories = gather_ids(order), gather_categories(order)
    arrays = {
        **columns(ids),
        **ids.tensors("ids"),
        **Categories(categories, list(index.category_codes)).tensors(),
    }
    if with_states:
        arrays["id_hashes"] = gather_hashes(order)
    files = {ITEMS: write_tensors(aside / ITEMS, {name: SlicedTensor.whole(array) for name, array in arrays.items()})}
    if with_states:
        files[ITEM_STATES] = write_tensors(aside / ITEM_STATES, _sliced_states(order, shape))
    if coded is not None and codes:
        rows = order.row[: coded.num_living]
        code_columns = code_arrays({key: one.take(rows) for key, one in codes.items()}, len(rows))
        tensors = {name: SlicedTensor.whole(np.ascontiguousarray(array)) for name, array in code_columns.items()}
        files[CODES] = write_tensors(aside / CODES, tensors)
    manifest = SnapshotManifest(
        model_version=index.model_version,
        index_version=version.name,
        number=version.number,
        digest=version.digest,
        num_items=len(order),
        shape=shape,
        files=files,
        said=dict(said),
    )
    _write_manifest(aside / MANIFEST, manifest)
    _flush(aside)
    aside.rename(target)
    _flush(root)
    for old in older[KEPT - 1 :]:
        gone = root / f"{_ASIDE}{_sequence(old):012d}"
        old.rename(gone)  # a reader sees a whole snapshot or none
        shutil.rmtree(gone)
    return target


def _sliced_states(order: Order, shape: ItemShape) -> dict[str, SlicedTensor]:
    components = (len(order), shape.num_components, shape.width)
    states = {"components": SlicedTensor(np.float32, components, state_slices(order, "components"))}
    if shape.gated:
        states["gate"] = SlicedTensor(np.float32, (len(order), shape.num_pairs), state_slices(order, "gate"))
    return states


def snapshots(root: Path) -> list[Path]:
    """The snapshots below a root, newest first."""
    return sorted(root.glob(f"{_PREFIX}*"), key=_sequence, reverse=True)


def load_snapshot(path: Path, *, model_version: str, base: ItemBatch | None = None) -> Snapshot:
    """Open a snapshot of this model. base: the bundle's items, for a snapshot written without their states.

    Raises: SnapshotError with file, found and expected value, for another model, torn or altered files and wrong
    shapes.
    """
    manifest = _read_manifest(path / MANIFEST)
    if manifest.model_version != model_version:
        raise SnapshotError(f"{path}: model_version={manifest.model_version!r}; this process serves {model_version!r}")
    try:
        for name, entry in manifest.files.items():
            check_file(path, name, entry, verify=True)
    except BundleError as exc:
        raise SnapshotError(str(exc)) from exc
    num_items = manifest.num_items
    try:
        columns = read_tensors(path / ITEMS)
        strings = Strings.from_tensors(columns, "ids")
        if ITEM_STATES in manifest.files:
            if (hashes := columns["id_hashes"]).shape != (num_items,):
                raise ValueError(f"id_hashes has shape {hashes.shape}; allowed: {(num_items,)}")
            ids = ItemIds(strings, hashes)
            ids.check_hashes("ids")
            states = _read_states(path, manifest)
        elif base is None or base.ids.strings != strings:
            raise SnapshotError(f"{path}: the bundle's states of {len(strings)} items; this process has other items")
        else:
            ids, states = base.ids, base.states
        codes = HeldCodes(path=path / CODES, arrays=read_tensors(path / CODES) if CODES in manifest.files else {})
        if not 0 <= codes.num_rows <= num_items:
            raise SnapshotError(f"{path / CODES} holds codes of {codes.num_rows} items; allowed: 0-{num_items}")
        items = ItemBatch(
            item_ids=ids,
            states=states,
            categories=Categories.from_tensors(columns),
        )
    except SnapshotError:
        raise
    except BundleError as exc:  # it names the file
        raise SnapshotError(str(exc)) from exc
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        raise SnapshotError(f"{path}: {exc!r}") from exc
    return Snapshot(path=path, manifest=manifest, items=items, columns=columns, codes=codes)


def _read_states(path: Path, manifest: SnapshotManifest) -> ItemStates:
    shape, num_items = manifest.shape, manifest.num_items
    wanted: dict[str, tuple[int, ...]] = {"components": (num_items, shape.num_components, shape.width)}
    if shape.gated:
        wanted["gate"] = (num_items, shape.num_pairs)
    found = {name: place[1] for name, place in tensor_places(path / ITEM_STATES).items()}
    if found != wanted:
        raise SnapshotError(f"{path / ITEM_STATES} holds {found}; {MANIFEST} says {wanted}")
    states = read_tensors(path / ITEM_STATES)
    return ItemStates(components=states["components"], gate=states.get("gate"))


def _sequence(path: Path) -> int:
    number = path.name.removeprefix(_PREFIX)
    return int(number) if number.isdigit() else -1


def _write_manifest(path: Path, manifest: SnapshotManifest) -> None:
    content = asdict(manifest)
    content["checksum"] = _checksum(content)
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True))
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> SnapshotManifest:
    try:
        content = read_fields(path, "a snapshot")
        if content.get("format") != FORMAT:
            raise SnapshotError(f"{path}: format={content.get('format')!r:.80}; this program reads format {FORMAT}")
        if "checksum" not in content:
            raise SnapshotError(f"{path} has no checksum")
        expected = content.pop("checksum")
        check_names(path, WHOLE, content, SnapshotManifest)
        if (found := _checksum(content)) != expected:
            raise SnapshotError(f"{path}: its fields have sha256 {found}; it says {expected}")
        return build_part(path, WHOLE, content, SnapshotManifest)
    except BundleError as exc:
        raise SnapshotError(str(exc)) from exc


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flush(folder: Path) -> None:
    """Make a directory's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The model bundle: one directory that training writes and every process loads.

Loading needs no PyTorch. Arrays are read on first use; large ones are memory-mapped.

Letters: X items, P_x item components, P pairs, d component width.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.algorithms.bundles.event_schema import EVENTS_YAML, EventSchema, SchemaError, default_schema
from services.algorithms.bundles.model_manifest import (
    AbsenceShape,
    BundleError,
    EncoderShape,
    HeadShape,
    Manifest,
    NeighbourShape,
    errors_of,
)
from services.algorithms.bundles.sealed_files import (
    MANIFEST,
    check_file,
    check_pair_gate,
    check_table,
    check_tensors,
    read_item_states,
    read_pair_gate,
    read_table,
)
from services.algorithms.bundles.tensor_file import read_tensors
from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.file import ByPopularity, ItemColumns, read_items
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Indices, Strings
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.algorithms.scoring.states import MAX_LENGTH, MAX_OWN_LENGTH, ItemStates, PairGate

__all__ = [
    "AbsenceShape",
    "Bundle",
    "BundleError",
    "EncoderShape",
    "HeadShape",
    "Manifest",
    "NeighbourShape",
    "load_bundle",
]

WEIGHTS = "weights.safetensors"
ITEM_STATES = "item_states.safetensors"
PAIR_GATE = "pair_gate.safetensors"
NEIGHBOURS = "neighbours.safetensors"
CODEBOOKS = "codebooks.safetensors"
ITEMS = "items.arrow"
USERS = "users.parquet"
ENCODER_ONNX = "encoder.onnx"
ENCODER_STEP_ONNX = "encoder_step.onnx"
INFERENCE_SERVER_MODEL = "inference_server/encoder"

USER_SCHEMA = pa.schema([("user_id", pa.string())])


@dataclass(frozen=True)
class Bundle:
    """A bundle with matching checksums and shapes."""

    path: Path
    manifest: Manifest

    @property
    def model_version(self) -> str:
        return self.manifest.model_version

    @property
    def encoder(self) -> EncoderShape:
        """The encoder's shape. Raises: BundleError for imported embeddings."""
        if self.manifest.encoder is None:
            raise BundleError(
                f"bundle {self.path} holds embeddings brought from elsewhere and no encoder: candidates and reranker "
                "can serve it, and callers bring their query vectors"
            )
        return self.manifest.encoder

    @property
    def max_history(self) -> int:
        return self.encoder.max_history

    @property
    def num_items(self) -> int:
        return self.manifest.num_items

    @property
    def num_query_components(self) -> int:
        return self.manifest.head.num_query_components

    @property
    def tau(self) -> float:
        return self.manifest.head.tau

    @cached_property
    def _items(self) -> ItemColumns:
        return read_items(self.path / ITEMS, self.num_items)

    @property
    def item_ids(self) -> Strings:
        return self._items.ids.strings

    @property
    def item_index(self) -> ItemIds:
        return self._items.ids

    @property
    def titles(self) -> Strings:
        return self._items.titles

    @property
    def categories(self) -> Categories:
        return self._items.categories

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return self._items.counts

    @property
    def by_popularity(self) -> ByPopularity:
        """Items by descending training count."""
        return self._items.by_popularity

    @cached_property
    def untrained(self) -> frozenset[str]:
        """Items without training interactions: their states are meaningless. Empty if the bundle has no counts."""
        counts = self.counts
        return frozenset(self.item_ids.take(np.flatnonzero(counts == 0))) if counts.any() else frozenset()

    @cached_property
    def user_index(self) -> dict[str, int]:
        """Dense indexes by user id, for users with a user-id component."""
        user_ids = read_table(self.path / USERS).column("user_id").to_pylist()
        return {user_id: index for index, user_id in enumerate(user_ids)}

    @cached_property
    def item_states(self) -> ItemStates:
        """Components (X, P_x, d) and gate (X, P) or None, memory-mapped. Raises: BundleError for invalid values."""
        return self.item_states_of(None)

    def item_states_of(self, rows: Indices | None) -> ItemStates:
        """Copies of the states at `rows`; only these are checked. None means all states."""
        longest = MAX_OWN_LENGTH if self.manifest.encoder is None else MAX_LENGTH
        return read_item_states(self.path / ITEM_STATES, longest=longest, rows=rows)

    @property
    def items_digest(self) -> str:
        """Digest of the items file and the states (8 hex digits)."""
        files = self.manifest.files
        return hashlib.sha256(f"{files[ITEMS].sha256} {files[ITEM_STATES].sha256}".encode()).hexdigest()[:8]

    @cached_property
    def pair_gate(self) -> PairGate | None:
        return read_pair_gate(self.path / PAIR_GATE) if self.manifest.head.is_mixture else None

    @cached_property
    def neighbours(self) -> ItemNeighbours | None:
        """Item neighbours, memory-mapped, if any. Raises: BundleError for invalid values."""
        shape = self.manifest.neighbours
        if shape is None:
            return None
        with errors_of(self.path / NEIGHBOURS, TypeError):
            return ItemNeighbours(shape=shape, **read_tensors(self.path / NEIGHBOURS))

    @cached_property
    def codebooks(self) -> Codebooks | None:
        """Codebooks of the index `anisotropic`. Raises: BundleError for invalid arrays, or a width other than the item
        vectors'.
        """
        if CODEBOOKS not in self.manifest.files:
            return None
        path, head = self.path / CODEBOOKS, self.manifest.head
        with errors_of(path, TypeError):
            codebooks = Codebooks(**read_tensors(path))
            scale = None if codebooks.gate_scale is None else codebooks.gate_scale.shape
            wanted = (head.num_pairs,) if head.is_mixture else None
            if scale != wanted:
                raise ValueError(f"gate_scale has shape {scale}; {MANIFEST} says {wanted}")
            codebooks.check_width(head.num_item_components * head.component_width + sum(wanted or ()))
        return codebooks

    @cached_property
    def absence(self) -> AbsenceRows | None:
        """The effect of the time since the last event. Raises: BundleError for missing or invalid weights."""
        shape, head = self.manifest.absence, self.manifest.head
        if shape is None:
            return None
        wanted: dict[str, tuple[int, ...]]
        wanted = {"absence_components": (shape.num_buckets, head.num_query_components, head.component_width)}
        if head.is_mixture:
            wanted["absence_gate"] = (shape.num_buckets, head.num_pairs)
        rows = read_tensors(self.path / WEIGHTS, only=wanted)
        found = {name: array.shape for name, array in rows.items()}
        if found != wanted or any(array.dtype != np.float32 for array in rows.values()):
            raise BundleError(f"{self.path / WEIGHTS} holds {found}; {MANIFEST} says {wanted} of float32")
        with errors_of(self.path / WEIGHTS):
            return AbsenceRows(
                floor_seconds=shape.floor_seconds,
                components=rows["absence_components"],
                gate=rows.get("absence_gate"),
            )

    @property
    def attributes(self) -> AttributeTable:
        return self._items.attributes

    @cached_property
    def event_schema(self) -> EventSchema:
        """The bundle's event schema, else the default. Raises: BundleError."""
        if EVENTS_YAML not in self.manifest.files:
            return default_schema()
        try:
            return EventSchema.read(self.path / EVENTS_YAML)
        except SchemaError as exc:
            raise BundleError(str(exc)) from exc

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """The model's weights by name, memory-mapped."""
        return read_tensors(self.path / WEIGHTS)

    def file(self, name: str) -> Path:
        """The path of a listed file. Raises: BundleError for an unlisted name."""
        if name not in self.manifest.files:
            made = f"; `freshet export --bundle {self.path}` makes it" if name == ENCODER_ONNX else ""
            raise BundleError(
                f"bundle {self.path}: {name} is not in the manifest; files: {sorted(self.manifest.files)}{made}"
            )
        return self.path / name


def load_bundle(path: Path | str, *, verify: bool = True) -> Bundle:
    """Open a bundle; check format, content hash, shapes, and every listed file's size and, with `verify`, SHA-256.

    Raises: BundleError with file, found and expected value.
    """
    root = Path(path)
    manifest = Manifest.read(root / MANIFEST)
    for name, entry in sorted(manifest.files.items()):
        check_file(root, name, entry, verify=verify)
    bundle = Bundle(path=root, manifest=manifest)
    version = model_version_of(manifest, root)
    if version != manifest.model_version:
        raise BundleError(f"{root / MANIFEST}: model_version={manifest.model_version}; the content hashes to {version}")
    _check_shapes(bundle)
    return bundle


def _check_shapes(bundle: Bundle) -> None:
    root, manifest, head = bundle.path, bundle.manifest, bundle.manifest.head
    for name in content_files(head, manifest.neighbours):
        bundle.file(name)
    if manifest.neighbours is not None:
        near = (manifest.num_items, manifest.neighbours.num_neighbours)
        check_tensors(root / NEIGHBOURS, {"items": near, "weights": near}, indices="items")
    components = (manifest.num_items, head.num_item_components, head.component_width)
    expected: dict[str, tuple[int, ...]] = {"components": components}
    if head.is_mixture:
        expected["gate"] = (manifest.num_items, head.num_pairs)
        check_pair_gate(root / PAIR_GATE, head)
    check_tensors(root / ITEM_STATES, expected)
    bundle.item_ids  # noqa: B018
    check_table(root / USERS, USER_SCHEMA, manifest.num_users)
    bundle.absence  # noqa: B018
    bundle.event_schema  # noqa: B018
    bundle.codebooks  # noqa: B018


def content_files(head: HeadShape, neighbours: NeighbourShape | None) -> tuple[str, ...]:
    optional = (*((PAIR_GATE,) if head.is_mixture else ()), *((NEIGHBOURS,) if neighbours is not None else ()))
    return (WEIGHTS, ITEM_STATES, *optional, ITEMS, USERS)


def model_version_of(manifest: Manifest, root: Path) -> str:
    files, encoder, near, away = manifest.files, manifest.encoder, manifest.neighbours, manifest.absence
    names = (*content_files(manifest.head, near), *(name for name in (EVENTS_YAML,) if name in files))
    missing = [name for name in names if name not in files]
    if missing:
        raise BundleError(f"{root / MANIFEST} lists {sorted(files)}; missing: {missing}")
    content = {
        "files": [[name, files[name].sha256] for name in sorted(names)],
        "encoder": None if encoder is None else asdict(encoder),
        "head": asdict(manifest.head),
        "neighbours": None if near is None else asdict(near),
        "absence": None if away is None else asdict(away),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

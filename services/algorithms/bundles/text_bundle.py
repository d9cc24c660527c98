"""The text bundle: one directory with everything for text queries.

Parts: the documents (item ids and texts), the word list, `text_mol/` (text encoder, document states, pair gate),
`phrases/` (phrase encoder, vocabulary, output layer, shortlist, trie, identifiers, read by their own modules). Loading
checks files, checksums and whether the parts match; a mismatch is an error with both values. It needs no PyTorch.

Letters: X documents, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.algorithms.bundles.model_manifest import BundleError, HeadShape
from services.algorithms.bundles.sealed_files import (
    MANIFEST,
    check_file,
    check_pair_gate,
    check_table,
    check_tensors,
    file_entry,
    folder_aside,
    put_file,
    read_item_states,
    read_pair_gate,
    read_table,
    save_pair_gate,
    save_tensors,
    swap,
)
from services.algorithms.bundles.text_manifest import PhrasesPart, TextManifest, TextMolPart
from services.algorithms.item_table.file import strings_of
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings, joined
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate
from services.algorithms.text.word_pieces import WordPieces

__all__ = [
    "BundleError",
    "HeadShape",
    "PhrasesPart",
    "TextBundle",
    "TextBundleWriter",
    "TextManifest",
    "TextMolPart",
    "add_text_files",
    "load_text_bundle",
]

DOCUMENTS = "documents.parquet"
WORD_LIST = "tokenizer/vocab.txt"
TEXT_MOL = "text_mol"
PHRASES = "phrases"
TEXT_ENCODER = f"{TEXT_MOL}/encoder.onnx"
TEXT_STATES = f"{TEXT_MOL}/item_states.safetensors"
TEXT_PAIR_GATE = f"{TEXT_MOL}/pair_gate.safetensors"
PHRASE_ENCODER = f"{PHRASES}/encoder.onnx"
# Derived from the parts, so not part of the version: the inference server's model folders, and both encoders' graphs
# with int8 matrices (`int8/<part>.onnx`, or one for both).
INFERENCE_SERVER = "inference_server"
INT8 = "int8"
SHARED_INT8 = f"{INT8}/shared.onnx"
_DERIVED = (f"{INFERENCE_SERVER}/", f"{INT8}/")

_DOCUMENT_SCHEMA = pa.schema([("item_id", pa.string()), ("text", pa.string())])


@dataclass(frozen=True)
class TextBundle:
    """A text bundle with matching checksums and shapes. Columns and arrays are read on first use."""

    path: Path
    manifest: TextManifest

    @property
    def text_version(self) -> str:
        return self.manifest.text_version

    @property
    def num_items(self) -> int:
        return self.manifest.num_items

    @cached_property
    def _documents(self) -> tuple[ItemIds, Strings]:
        path = self.path / DOCUMENTS
        table = read_table(path)
        ids, texts = (
            joined([strings_of(chunk) for chunk in table.column(name).chunks]) for name in ("item_id", "text")
        )
        try:
            ids.check()
            texts.check()
            found = ItemIds(ids)
            found.check("item_id")
        except ValueError as exc:
            raise BundleError(f"{path}: {exc}") from exc
        return found, texts

    @property
    def item_ids(self) -> Strings:
        """The item id of each document row."""
        return self.item_index.strings

    @property
    def item_index(self) -> ItemIds:
        """The document row of each id. Raises: BundleError for ids that are not distinct or not of 1-128 bytes."""
        return self._documents[0]

    @property
    def texts(self) -> Strings:
        return self._documents[1]

    @cached_property
    def word_pieces(self) -> WordPieces:
        """The tokenizer of queries, for both encoders. Raises: BundleError for an invalid list."""
        try:
            return WordPieces.read(self.file(WORD_LIST))
        except BundleError:
            raise
        except ValueError as exc:
            raise BundleError(str(exc)) from exc

    @property
    def text_mol(self) -> TextMolPart:
        """The text MoL part. Raises: BundleError if the bundle has none."""
        if self.manifest.text_mol is None:
            raise BundleError(f"text bundle {self.path} has no part {TEXT_MOL}; parts: {self.parts}")
        return self.manifest.text_mol

    @property
    def phrases(self) -> PhrasesPart:
        """The phrases part. Raises: BundleError if the bundle has none."""
        if self.manifest.phrases is None:
            raise BundleError(f"text bundle {self.path} has no part {PHRASES}; parts: {self.parts}")
        return self.manifest.phrases

    @property
    def parts(self) -> tuple[str, ...]:
        found = {TEXT_MOL: self.manifest.text_mol, PHRASES: self.manifest.phrases}
        return tuple(name for name, part in found.items() if part is not None)

    @cached_property
    def item_states(self) -> ItemStates:
        """The text MoL's document states, memory-mapped: components (X, P_x, d), without an item gate."""
        self.text_mol  # noqa: B018 - raises BundleError if there is none
        return read_item_states(self.path / TEXT_STATES)

    @cached_property
    def pair_gate(self) -> PairGate | None:
        """The text MoL's gate, a function of the P cosines only; None for a dot product."""
        return read_pair_gate(self.path / TEXT_PAIR_GATE) if self.text_mol.head.is_mixture else None

    def file(self, name: str) -> Path:
        """Return the path of a listed file. Raises: BundleError for an unlisted name."""
        if name not in self.manifest.files:
            raise BundleError(
                f"text bundle {self.path}: {name} is not in the manifest; files: {sorted(self.manifest.files)}"
            )
        return self.path / name

    def int8_graph(self, part: str) -> Path | None:
        """Return the int8 encoder of a part, None if the bundle has none."""
        return self._derived(f"{INT8}/{part}.onnx")

    @property
    def shared_int8_graph(self) -> Path | None:
        """The int8 graph of both encoders, with one output named after each part; None if the bundle has none."""
        return self._derived(SHARED_INT8)

    def _derived(self, name: str) -> Path | None:
        return self.path / name if name in self.manifest.files else None


def load_text_bundle(path: Path | str, *, verify: bool = True) -> TextBundle:
    """Open a text bundle; check format, every file's size and SHA-256, the content hash, shapes and fingerprints.

    verify=False: skip the checksums (for a reader that opened the same bundle before).
    Raises: BundleError with the file, what was found and what was expected.
    """
    root = Path(path)
    manifest = TextManifest.read(root / MANIFEST)
    for name, entry in sorted(manifest.files.items()):
        check_file(root, name, entry, verify=verify)
    version = _text_version(manifest)
    if version != manifest.text_version:
        raise BundleError(f"{root / MANIFEST}: text_version={manifest.text_version}; the content hashes to {version}")
    bundle = TextBundle(path=root, manifest=manifest)
    check_table(bundle.file(DOCUMENTS), _DOCUMENT_SCHEMA, bundle.num_items)
    bundle.item_index  # noqa: B018
    _check_tokenizers(bundle)
    _check_text_mol(bundle)
    if manifest.phrases is not None:
        bundle.file(PHRASE_ENCODER)
    return bundle


def add_text_files(
    path: Path | str, sources: Mapping[str, Path], *, metrics: Mapping[str, Any] | None = None
) -> TextBundle:
    """Add derived files (the inference server's model folders, int8 graphs) to a text bundle; its version stays.

    metrics: added to the bundle's metrics.
    Raises: BundleError for a file that is not derived, since it would change the version.
    """
    root = Path(path)
    manifest = TextManifest.read(root / MANIFEST)
    files = dict(manifest.files)
    for name, source in sources.items():
        if not name.startswith(_DERIVED):
            allowed = ", ".join(f"{prefix}..." for prefix in _DERIVED)
            raise BundleError(f"text bundle {root}: file {name!r} is content; allowed: {allowed}")
        files[name] = put_file(root, name, source)
    replace(manifest, files=files, metrics={**manifest.metrics, **(metrics or {})}).write(root / MANIFEST)
    return load_text_bundle(root, verify=False)


class TextBundleWriter:
    """Collects parts in a temporary folder; sealing renames it into place. Without sealing nothing changes.

    If `path` has a text bundle of the same documents and word list, its parts are copied, so the two models may be
    trained one after the other. A bundle of other documents is replaced.
    """

    def __init__(
        self, path: Path | str, *, item_ids: Sequence[str], texts: Sequence[str], words: Sequence[str]
    ) -> None:
        """words: the word list of queries.

        Raises: ValueError for no documents, unequal columns, or a repeated item id; BundleError if `path` exists and is
        not a text bundle.
        """
        if not item_ids or len(item_ids) != len(texts):
            raise ValueError(f"{len(item_ids)} item ids and {len(texts)} texts; allowed: equally many, at least 1")
        if len(set(item_ids)) != len(item_ids):
            raise ValueError(f"{len(item_ids)} item ids, {len(set(item_ids))} different; allowed: each once")
        self._target = Path(path)
        self._tokenizer = WordPieces(words).fingerprint
        self._manifest = TextManifest(text_version="", num_items=len(item_ids))
        self._aside = folder_aside(self._target)
        columns = {"item_id": list(item_ids), "text": list(texts)}
        pq.write_table(pa.table(columns, schema=_DOCUMENT_SCHEMA), self._aside / DOCUMENTS)
        (self._aside / WORD_LIST).parent.mkdir()
        (self._aside / WORD_LIST).write_text("\n".join(words) + "\n", encoding="utf-8")
        try:
            self._keep_parts()
        except BundleError:
            shutil.rmtree(self._aside)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)

    def add_text_mol(
        self, encoder: Path, states: ItemStates, pair_gate: PairGate | None, *, head: HeadShape, max_tokens: int
    ) -> None:
        """Add the text MoL: its exported encoder, the documents' states in order, and the gate (None: dot)."""
        self._fresh(TEXT_MOL)
        shutil.copyfile(encoder, self._aside / TEXT_ENCODER)
        arrays: dict[str, FloatArray] = {"components": np.ascontiguousarray(states.components, np.float32)}
        save_tensors(arrays, self._aside / TEXT_STATES)
        if pair_gate is not None:
            save_pair_gate(pair_gate, self._aside / TEXT_PAIR_GATE)
        part = TextMolPart(head=head, tokenizer=self._tokenizer, max_tokens=max_tokens)
        self._manifest = replace(self._manifest, text_mol=part)

    def add_phrases(
        self,
        files: Mapping[str, Path],
        *,
        vocabulary: str,
        vocabulary_size: int,
        positions: int,
        width: int,
        max_tokens: int,
    ) -> None:
        """Add the phrase model. files: by name below `phrases/`, with `encoder.onnx`. The rest: see PhrasesPart.

        Raises: ValueError if `encoder.onnx` is missing.
        """
        if Path(PHRASE_ENCODER).name not in files:
            raise ValueError(f"files={sorted(files)}; {Path(PHRASE_ENCODER).name} must be among them")
        self._fresh(PHRASES)
        for name, source in files.items():
            put_file(self._aside, f"{PHRASES}/{name}", source)
        part = PhrasesPart(
            tokenizer=self._tokenizer,
            vocabulary=vocabulary,
            vocabulary_size=vocabulary_size,
            positions=positions,
            width=width,
            max_tokens=max_tokens,
        )
        self._manifest = replace(self._manifest, phrases=part)

    def seal(self, *, data: Mapping[str, Any] | None = None, metrics: Mapping[str, Any] | None = None) -> TextBundle:
        """Write the manifest, check everything like a reader, rename into place; return the loaded bundle.

        data, metrics: added to those of the existing parts. Raises: BundleError if parts disagree.
        """
        files = {
            path.relative_to(self._aside).as_posix(): file_entry(path)
            for path in sorted(self._aside.rglob("*"))
            if path.is_file() and path.name != MANIFEST
        }
        manifest = replace(
            self._manifest,
            files=files,
            data={**self._manifest.data, **(data or {})},
            metrics={**self._manifest.metrics, **(metrics or {})},
        )
        replace(manifest, text_version=_text_version(manifest)).write(self._aside / MANIFEST)
        load_text_bundle(self._aside)
        swap(self._aside, self._target)
        return load_text_bundle(self._target, verify=False)

    def _fresh(self, part: str) -> None:
        """Make an empty folder for a part; remove an older one."""
        folder = self._aside / part
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()

    def _keep_parts(self) -> None:
        if not (self._target / MANIFEST).is_file():
            return
        older = load_text_bundle(self._target)
        for name in (DOCUMENTS, WORD_LIST):
            if file_entry(self._aside / name) != older.manifest.files[name]:
                return
        for part in older.parts:
            shutil.copytree(self._target / part, self._aside / part)
        kept = older.manifest
        self._manifest = replace(kept, text_version="", files={})


def _text_version(manifest: TextManifest) -> str:
    content = {
        "files": [
            [name, entry.sha256] for name, entry in sorted(manifest.files.items()) if not name.startswith(_DERIVED)
        ],
        "parts": [None if part is None else asdict(part) for part in (manifest.text_mol, manifest.phrases)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _check_tokenizers(bundle: TextBundle) -> None:
    found = bundle.word_pieces.fingerprint
    for name, part in ((TEXT_MOL, bundle.manifest.text_mol), (PHRASES, bundle.manifest.phrases)):
        if part is not None and part.tokenizer != found:
            raise BundleError(
                f"text bundle {bundle.path}: {name} was trained with word list {part.tokenizer}; {WORD_LIST} is {found}"
            )


def _check_text_mol(bundle: TextBundle) -> None:
    part = bundle.manifest.text_mol
    if part is None:
        return
    bundle.file(TEXT_ENCODER)
    head = part.head
    states = (bundle.num_items, head.num_item_components, head.component_width)
    check_tensors(bundle.file(TEXT_STATES), {"components": states})
    if head.is_mixture:
        check_pair_gate(bundle.file(TEXT_PAIR_GATE), head)

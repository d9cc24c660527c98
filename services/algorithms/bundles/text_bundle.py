"""The text bundle: one directory with everything for text queries.

Parts: documents (item ids and texts), word list, `text_mol/` (text encoder, document states, pair gate), `phrases/`
(phrase encoder, vocabulary, generator).

Letters: X documents, P_x item components, P pairs, d component width.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from services.algorithms.bundles.model_manifest import BundleError, HeadShape, errors_of
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
from services.algorithms.bundles.text_manifest import PhrasesPart, TextManifest, TextMolPart
from services.algorithms.item_table.file import strings_of
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings, joined
from services.algorithms.scoring.states import ItemStates, PairGate
from services.algorithms.text.word_pieces import WordPieces

__all__ = [
    "BundleError",
    "HeadShape",
    "PhrasesPart",
    "TextBundle",
    "TextManifest",
    "TextMolPart",
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
# The version does not depend on these files, which are derived from the parts: the inference server's model folders and
# both encoders' int8 graphs (`int8/<part>.onnx`, or one for both).
INFERENCE_SERVER = "inference_server"
INT8 = "int8"
SHARED_INT8 = f"{INT8}/shared.onnx"
DERIVED = (f"{INFERENCE_SERVER}/", f"{INT8}/")

DOCUMENT_SCHEMA = pa.schema([("item_id", pa.string()), ("text", pa.string())])


@dataclass(frozen=True)
class TextBundle:
    """A text bundle with matching checksums and shapes."""

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
        with errors_of(path):
            ids.check()
            texts.check()
            found = ItemIds(ids)
            found.check("item_id")
        return found, texts

    @property
    def item_ids(self) -> Strings:
        return self.item_index.strings

    @property
    def item_index(self) -> ItemIds:
        """Document rows by id. Raises: BundleError unless ids are distinct and of 1-128 bytes."""
        return self._documents[0]

    @property
    def texts(self) -> Strings:
        return self._documents[1]

    @cached_property
    def word_pieces(self) -> WordPieces:
        """The query tokenizer of both encoders. Raises: BundleError for an invalid word list."""
        try:
            return WordPieces.read(self.file(WORD_LIST))
        except BundleError:
            raise
        except ValueError as exc:
            raise BundleError(str(exc)) from exc

    @property
    def text_mol(self) -> TextMolPart:
        """The text MoL part. Raises: BundleError without one."""
        if self.manifest.text_mol is None:
            raise BundleError(f"text bundle {self.path} has no part {TEXT_MOL}; parts: {self.parts}")
        return self.manifest.text_mol

    @property
    def phrases(self) -> PhrasesPart:
        """The phrases part. Raises: BundleError without one."""
        if self.manifest.phrases is None:
            raise BundleError(f"text bundle {self.path} has no part {PHRASES}; parts: {self.parts}")
        return self.manifest.phrases

    @property
    def parts(self) -> tuple[str, ...]:
        found = {TEXT_MOL: self.manifest.text_mol, PHRASES: self.manifest.phrases}
        return tuple(name for name, part in found.items() if part is not None)

    @cached_property
    def item_states(self) -> ItemStates:
        """The text MoL's document states, memory-mapped: components (X, P_x, d)."""
        self.text_mol  # noqa: B018 - raises BundleError if there is none
        return read_item_states(self.path / TEXT_STATES)

    @cached_property
    def pair_gate(self) -> PairGate | None:
        """The text MoL's gate, which reads cosines only; None for a dot product."""
        return read_pair_gate(self.path / TEXT_PAIR_GATE) if self.text_mol.head.is_mixture else None

    def file(self, name: str) -> Path:
        """The path of a listed file. Raises: BundleError for an unlisted name."""
        if name not in self.manifest.files:
            raise BundleError(
                f"text bundle {self.path}: {name} is not in the manifest; files: {sorted(self.manifest.files)}"
            )
        return self.path / name

    def int8_graph(self, part: str) -> Path | None:
        """The int8 graph of a part's encoder, if any."""
        name = f"{INT8}/{part}.onnx"
        return self.path / name if name in self.manifest.files else None

    @property
    def shared_int8_graph(self) -> Path | None:
        """The int8 graph of both encoders, if any; outputs are named after parts."""
        return self.path / SHARED_INT8 if SHARED_INT8 in self.manifest.files else None


def load_text_bundle(path: Path | str, *, verify: bool = True) -> TextBundle:
    """Open a text bundle; check what `load_bundle` checks, and the word list's fingerprint.

    Raises: BundleError with file, found and expected value.
    """
    root = Path(path)
    manifest = TextManifest.read(root / MANIFEST)
    for name, entry in sorted(manifest.files.items()):
        check_file(root, name, entry, verify=verify)
    version = text_version_of(manifest)
    if version != manifest.text_version:
        raise BundleError(f"{root / MANIFEST}: text_version={manifest.text_version}; the content hashes to {version}")
    bundle = TextBundle(path=root, manifest=manifest)
    check_table(bundle.file(DOCUMENTS), DOCUMENT_SCHEMA, bundle.num_items)
    bundle.item_index  # noqa: B018
    words = bundle.word_pieces.fingerprint
    for name, part in ((TEXT_MOL, manifest.text_mol), (PHRASES, manifest.phrases)):
        if part is not None and part.tokenizer != words:
            raise BundleError(
                f"text bundle {root}: {name} was trained with word list {part.tokenizer}; {WORD_LIST} is {words}"
            )
    if manifest.text_mol is not None:
        head = manifest.text_mol.head
        bundle.file(TEXT_ENCODER)
        states = (bundle.num_items, head.num_item_components, head.component_width)
        check_tensors(bundle.file(TEXT_STATES), {"components": states})
        if head.is_mixture:
            check_pair_gate(bundle.file(TEXT_PAIR_GATE), head)
    if manifest.phrases is not None:
        bundle.file(PHRASE_ENCODER)
    return bundle


def text_version_of(manifest: TextManifest) -> str:
    content = {
        "files": [
            [name, entry.sha256] for name, entry in sorted(manifest.files.items()) if not name.startswith(DERIVED)
        ],
        "parts": [None if part is None else asdict(part) for part in (manifest.text_mol, manifest.phrases)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

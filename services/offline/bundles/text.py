"""Write the parts of a text bundle, or add derived files to one."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.algorithms.bundles.model_manifest import BundleError, HeadShape
from services.algorithms.bundles.sealed_files import MANIFEST, file_entry
from services.algorithms.bundles.text_bundle import (
    DERIVED,
    DOCUMENT_SCHEMA,
    DOCUMENTS,
    PHRASE_ENCODER,
    PHRASES,
    TEXT_ENCODER,
    TEXT_MOL,
    TEXT_PAIR_GATE,
    TEXT_STATES,
    WORD_LIST,
    TextBundle,
    load_text_bundle,
    text_version_of,
)
from services.algorithms.bundles.text_manifest import PhrasesPart, TextManifest, TextMolPart
from services.algorithms.generation.phrases_part import GENERATOR, VOCABULARY, PhraseParts
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate
from services.algorithms.text.word_pieces import WordPieces
from services.offline.bundles.folders import folder_aside, put_file, save_pair_gate, save_tensors, swap


class TextBundleWriter:
    """Collects parts in a temporary folder; `seal` renames it into place.

    Parts of an existing bundle with the same documents and word list are copied, so the text encoder and the phrase
    model can be trained one after the other. A bundle with other documents is replaced.
    """

    def __init__(
        self, path: Path | str, *, item_ids: Sequence[str], texts: Sequence[str], words: Sequence[str]
    ) -> None:
        """Begin a bundle of these documents; words: the word list of queries.

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
        pq.write_table(pa.table(columns, schema=DOCUMENT_SCHEMA), self._aside / DOCUMENTS)
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
        """Add the exported encoder, the documents' states in order, and the gate. A model that scores by dot product
        has no gate.
        """
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
        """Add the phrase model. files: paths by name below `phrases/`, including `encoder.onnx`.

        PhrasesPart describes the other arguments.

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
        """Write the manifest, check the bundle, rename it into place, and return it loaded.

        data, metrics: are added to those of the existing parts. Raises: BundleError if parts disagree.
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
        replace(manifest, text_version=text_version_of(manifest)).write(self._aside / MANIFEST)
        load_text_bundle(self._aside)
        swap(self._aside, self._target)
        return load_text_bundle(self._target, verify=False)

    def _fresh(self, part: str) -> None:
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


def add_text_files(
    path: Path | str, sources: Mapping[str, Path], *, metrics: Mapping[str, Any] | None = None
) -> TextBundle:
    """Add derived files (int8 graphs, the inference server's folders) and `metrics`; the version stays.

    Raises: BundleError for a file that is not derived.
    """
    root = Path(path)
    manifest = TextManifest.read(root / MANIFEST)
    files = dict(manifest.files)
    for name, source in sources.items():
        if not name.startswith(DERIVED):
            allowed = ", ".join(f"{prefix}..." for prefix in DERIVED)
            raise BundleError(f"text bundle {root}: file {name!r} is content; allowed: {allowed}")
        files[name] = put_file(root, name, source)
    replace(manifest, files=files, metrics={**manifest.metrics, **(metrics or {})}).write(root / MANIFEST)
    return load_text_bundle(root, verify=False)


def save_phrases(folder: Path, parts: PhraseParts, encoder: Path) -> dict[str, Path]:
    """Write all files except the encoder; return all paths by name, for `add_phrases`.

    Raises: ValueError for a trie or identifiers that changed after they were built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts.generator.save(folder / GENERATOR)
    parts.vocabulary.save(folder / VOCABULARY)
    return {Path(PHRASE_ENCODER).name: encoder, **{name: folder / name for name in (GENERATOR, VOCABULARY)}}

"""The phrases of a text bundle: read back as written, and refused where vocabulary and model do not match."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from generator_scene import POSITIONS, WORDS

from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.text_bundle import TextBundle, load_text_bundle
from services.algorithms.generation.phrases_part import PhraseParts, load_phrases
from services.offline.bundles.text import TextBundleWriter, save_phrases
from services.offline.training.phrases.vocabulary_fit import build_vocabulary


@pytest.fixture
def bundle(films: Path) -> TextBundle:
    return load_text_bundle(films / "text")


def resealed(bundle: TextBundle, folder: Path, parts: PhraseParts, **other: object) -> TextBundle:
    """The bundle with other phrases in it, or another description of them."""
    said = bundle.phrases
    described = {
        "vocabulary": said.vocabulary,
        "vocabulary_size": said.vocabulary_size,
        "positions": POSITIONS,
        "width": len(WORDS),
        "max_tokens": 16,
    } | other
    files = save_phrases(folder / "parts", parts, bundle.file("phrases/encoder.onnx"))
    with TextBundleWriter(folder / "text", item_ids=bundle.item_ids, texts=bundle.texts, words=WORDS) as to:
        to.add_phrases(files, **described)  # type: ignore[arg-type]
        return to.seal()


def test_what_is_written_generates_the_same(bundle: TextBundle, tmp_path: Path) -> None:
    parts = load_phrases(bundle)
    again = load_phrases(resealed(bundle, tmp_path, parts))
    assert again.vocabulary.fingerprint == parts.vocabulary.fingerprint
    assert len(again.generator.trie) == len(parts.generator.trie) == 6
    assert [again.generator.identifiers.text(row) for row in range(6)] == bundle.texts


def test_a_vocabulary_of_another_model_is_refused_naming_both(bundle: TextBundle, tmp_path: Path) -> None:
    other = build_vocabulary(["entirely other words"], size=600, min_count=1)
    parts = replace(load_phrases(bundle), vocabulary=other)
    with pytest.raises(BundleError, match=rf"{other.fingerprint}.*trained for {bundle.phrases.vocabulary}"):
        load_phrases(resealed(bundle, tmp_path, parts))


@pytest.mark.parametrize("name", ["generator", "vocabulary"])
def test_a_byte_changed_anywhere_is_refused(bundle: TextBundle, tmp_path: Path, name: str) -> None:
    shutil.copytree(bundle.path, tmp_path / "text")
    path = tmp_path / "text" / "phrases" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BundleError, match=f"phrases/{name} has sha256"):
            load_text_bundle(tmp_path / "text")


@pytest.mark.parametrize(
    ("field", "value", "says"), [("width", 7, "the model has .* of 7"), ("positions", 2, "4 tokens; the model has 2")]
)
def test_a_model_of_another_shape_is_refused_naming_both(
    bundle: TextBundle, tmp_path: Path, field: str, value: int, says: str
) -> None:
    with pytest.raises(BundleError, match=says):
        load_phrases(resealed(bundle, tmp_path, load_phrases(bundle), **{field: value}))

"""Text bundles: what is written is what is read; what does not fit together is refused with both values."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from services.algorithms.bundles.text_bundle import DOCUMENTS, BundleError, TextBundle, load_text_bundle
from services.offline.bundles.text import TextBundleWriter, add_text_files
from tests.unit.bundle.bundle_scene import edit_manifest, resealed
from tests.unit.text.text_scene import (
    HEAD,
    ITEM_IDS,
    TEXTS,
    WORDS,
    add_phrases,
    add_text_mol,
    pair_gate,
    some_file,
    states,
    write_both,
    writer,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_both(tmp_path / "text", tmp_path).path


def test_a_written_text_bundle_reads_back_equal(path: Path) -> None:
    bundle = load_text_bundle(path)
    assert (bundle.item_ids, bundle.texts, bundle.num_items) == (ITEM_IDS, TEXTS, 3)
    assert bundle.parts == ("text_mol", "phrases")
    assert bundle.word_pieces.token_ids("space movies") == [2, 4, 5, 6, 3]
    np.testing.assert_array_equal(bundle.item_states.components, states().components)
    assert bundle.item_states.gate is None
    assert bundle.pair_gate is not None
    np.testing.assert_array_equal(bundle.pair_gate.out_weight, pair_gate().out_weight)
    assert (bundle.text_mol.head, bundle.text_mol.max_tokens) == (HEAD, 16)
    assert (bundle.phrases.vocabulary, bundle.phrases.positions) == ("abc", 4)
    assert bundle.file("phrases/trie.bin").read_bytes() == b"trie"
    assert bundle.manifest.data == {"name": "test"}


def test_a_part_that_was_never_trained_is_refused_by_name(tmp_path: Path) -> None:
    with writer(tmp_path / "text") as to:
        bundle = to.seal()
    assert bundle.parts == ()
    with pytest.raises(BundleError, match="has no part text_mol"):
        bundle.item_states  # noqa: B018
    with pytest.raises(BundleError, match="has no part phrases"):
        bundle.phrases  # noqa: B018


def test_parts_may_be_trained_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with writer(path) as to:
        add_text_mol(to, tmp_path)
        first = to.seal(data={"text_mol": 1})
    with writer(path) as to:
        add_phrases(to, tmp_path)
        both = to.seal(data={"phrases": 2})
    assert both.parts == ("text_mol", "phrases")
    assert both.manifest.data == {"text_mol": 1, "phrases": 2}
    assert both.text_version != first.text_version
    np.testing.assert_array_equal(both.item_states.components, states().components)


def test_parts_over_other_documents_are_not_kept(path: Path, tmp_path: Path) -> None:
    with writer(path, texts=[*TEXTS[:2], "another"]) as to:
        add_phrases(to, tmp_path)
        assert to.seal().parts == ("phrases",)
    assert not (path / "text_mol").exists()


def test_a_part_written_again_leaves_no_file_of_the_older_one(path: Path, tmp_path: Path) -> None:
    with writer(path) as to:
        files = {"encoder.onnx": some_file(tmp_path, "phrases.onnx")}
        to.add_phrases(files, vocabulary="abc", vocabulary_size=9, positions=4, width=4, max_tokens=16)
        assert "phrases/trie.bin" not in to.seal().manifest.files


def test_a_writer_left_without_sealing_changes_nothing(path: Path, tmp_path: Path) -> None:
    before = load_text_bundle(path).text_version
    with writer(path) as to:
        add_text_mol(to, tmp_path, seed=1)
    assert load_text_bundle(path).text_version == before
    assert not [entry for entry in path.parent.iterdir() if entry.name.startswith(".")]


def test_the_version_follows_content_and_not_derived_files(path: Path, tmp_path: Path) -> None:
    before = load_text_bundle(path).text_version
    derived = add_text_files(path, {"inference_server/text/config.pbtxt": some_file(tmp_path, "config.pbtxt")})
    assert derived.text_version == before == load_text_bundle(path).text_version
    with pytest.raises(BundleError, match=r"'phrases/trie\.bin' is content"):
        add_text_files(path, {"phrases/trie.bin": some_file(tmp_path, "other")})
    with pytest.raises(BundleError, match="leaves the bundle"):
        add_text_files(path, {"inference_server/../../x": some_file(tmp_path, "other")})


def test_a_flipped_byte_a_cut_file_and_a_missing_file_are_refused(path: Path) -> None:
    trie = path / "phrases" / "trie.bin"
    trie.write_bytes(b"tri3")
    with pytest.raises(BundleError, match=r"trie\.bin has sha256 .*; manifest\.json says"):
        load_text_bundle(path)
    trie.write_bytes(b"tri")
    with pytest.raises(BundleError, match=r"trie\.bin holds 3 bytes; manifest\.json says 4"):
        load_text_bundle(path)
    trie.unlink()
    with pytest.raises(BundleError, match=r"trie\.bin is missing"):
        load_text_bundle(path)


def test_a_word_list_that_the_encoder_was_not_trained_with_is_refused(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "tokenizer" / "vocab.txt").write_text("\n".join([*WORDS, "more"]) + "\n")
    resealed(path, load_text_bundle, "text_version")
    with pytest.raises(BundleError, match=f"trained with word list {manifest['text_mol']['tokenizer']}; .* is "):
        load_text_bundle(path)


def test_states_of_another_shape_than_the_head_says_are_refused(tmp_path: Path) -> None:
    with writer(tmp_path / "text") as to:
        add_text_mol(to, tmp_path, head=replace(HEAD, component_width=5))
        with pytest.raises(BundleError, match=r"\(3, 2, 4\).*manifest\.json says .*\(3, 2, 5\)"):
            to.seal()
    assert not (tmp_path / "text").exists()


def test_a_pair_gate_of_other_pairs_is_refused(path: Path) -> None:
    gate = pair_gate(head=replace(HEAD, num_item_components=1))
    arrays = {name: getattr(gate, name) for name in ("hidden_weight", "hidden_bias", "out_weight", "out_bias")}
    save_file(arrays, path / "text_mol" / "pair_gate.safetensors")
    resealed(path, load_text_bundle, "text_version")
    with pytest.raises(BundleError, match=r"pair_gate\.safetensors holds .*\(3, 2\).*manifest\.json says .*\(3, 4\)"):
        load_text_bundle(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "model"}, "kind='model'; a text bundle's is 'text'"),
        ({"format": 1}, "format=1; this program reads format 2"),
        ({"num_items": 0}, "num_items=0; allowed: at least 1"),
        ({"num_items": 4}, r"documents\.parquet has 3 rows of .*; expected 4 rows"),
        ({"extra": 1}, "manifest has fields .*extra"),
        ({"phrases": {"width": 4}}, "phrases has fields"),
        ({"text_mol": []}, "text_mol is a JSON list; expected an object"),
    ],
)
def test_a_wrong_manifest_is_refused_by_field(path: Path, changes: dict[str, object], message: str) -> None:
    edit_manifest(path, **changes)
    with pytest.raises(BundleError, match=message):
        load_text_bundle(path)


def test_a_manifest_that_is_none_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json is missing"):
        load_text_bundle(tmp_path)
    for text in ("{", "[" * 100_000):
        (path / "manifest.json").write_text(text)
        with pytest.raises(BundleError, match="is not JSON"):
            load_text_bundle(path)
    (path / "manifest.json").write_text("[]")
    with pytest.raises(BundleError, match="holds a JSON list"):
        load_text_bundle(path)


def test_a_folder_that_is_no_text_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    with pytest.raises(BundleError, match="refusing to replace"):
        writer(tmp_path / "precious")
    (tmp_path / "precious" / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(BundleError, match="kind=None"):
        writer(tmp_path / "precious")
    assert (tmp_path / "precious" / "file").read_text() == "kept"
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]


def test_documents_and_vocabulary_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    for ids, texts, message in (
        ([], [], "0 item ids and 0 texts"),
        (["a"], ["x", "y"], "1 item ids and 2 texts"),
        (["a", "a"], ["x", "y"], "2 item ids, 1 different"),
    ):
        with pytest.raises(ValueError, match=message):
            TextBundleWriter(tmp_path / "text", item_ids=ids, texts=texts, words=WORDS)
    with pytest.raises(ValueError, match="lacks"):
        TextBundleWriter(tmp_path / "text", item_ids=["a"], texts=["x"], words=["[PAD]"])
    with writer(tmp_path / "text") as to, pytest.raises(ValueError, match=r"encoder\.onnx must be among them"):
        to.add_phrases({}, vocabulary="abc", vocabulary_size=9, positions=4, width=4, max_tokens=16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("item_ids", "message"),
    [(["a", "b", "a"], "item_id holds 'a' more than once"), (["a", "b" * 129, "c"], "of 129 bytes; allowed: 1-128")],
)
def test_ids_of_documents_that_cannot_be_are_refused_by_file_and_id(
    path: Path, item_ids: list[str], message: str
) -> None:
    bundle = TextBundle(path=path, manifest=load_text_bundle(path).manifest)
    pq.write_table(pa.table({"item_id": item_ids, "text": ["x", "y", "z"]}), path / DOCUMENTS)
    with pytest.raises(BundleError, match=f"{path / DOCUMENTS}: .*{message}"):
        bundle.item_ids  # noqa: B018

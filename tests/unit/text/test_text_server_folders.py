"""The inference server's folders of a text bundle: those of its parts, each naming the version that it serves."""

import shutil
from pathlib import Path

import pytest

from services.algorithms.text_bundle import load_text_bundle
from services.offline.training.onnx_graphs import ExportError
from services.offline.training.text_server import TEMPLATES, add_server_folders
from tests.unit.text.text_scene import add_text_mol, write_both, writer


def test_each_part_gets_a_folder_that_names_the_version(tmp_path: Path) -> None:
    before = write_both(tmp_path / "text", tmp_path)
    bundle = add_server_folders(before.path)
    assert bundle.text_version == before.text_version
    for name, graph in (("text", "text_mol/encoder.onnx"), ("phrases", "phrases/encoder.onnx")):
        folder = bundle.path / "inference_server" / name
        for config in ("config.pbtxt", "configs/onnxruntime.pbtxt", "configs/onnxruntime-gpu.pbtxt"):
            written = (folder / config).read_text(encoding="utf-8")
            assert f'name: "{name}"' in written
            assert f'key: "text_version" value: {{ string_value: "{bundle.text_version}" }}' in written
            assert "dynamic_batching" in written
        assert (folder / "1" / "model.onnx").read_bytes() == bundle.file(graph).read_bytes()
        assert (folder / "1" / "model.py").read_bytes() == (TEMPLATES / "text" / "1" / "model.py").read_bytes()
    # They are listed, so a damaged one is refused.
    (bundle.path / "inference_server" / "text" / "1" / "model.py").write_text("")
    with pytest.raises(ValueError, match=r"model\.py holds 0 bytes"):
        load_text_bundle(bundle.path)


def test_a_part_that_is_not_there_gets_none(tmp_path: Path) -> None:
    with writer(tmp_path / "text") as to:
        to.seal()
    assert add_server_folders(tmp_path / "text").manifest.files.keys() == {"documents.parquet", "tokenizer/vocab.txt"}
    with writer(tmp_path / "text") as to:
        add_text_mol(to, tmp_path)
        to.seal()
    add_server_folders(tmp_path / "text")
    assert [path.name for path in (tmp_path / "text" / "inference_server").iterdir()] == ["text"]


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    write_both(tmp_path / "text", tmp_path)
    templates = shutil.copytree(TEMPLATES, tmp_path / "templates")
    (templates / "text" / "1" / "model.py").unlink()
    with pytest.raises(ExportError, match=r"model\.py is missing"):
        add_server_folders(tmp_path / "text", templates=templates)
    shutil.rmtree(templates / "phrases")
    with pytest.raises(ExportError, match=r"phrases/config\.pbtxt is missing"):
        add_server_folders(tmp_path / "text", templates=templates)

"""Query encoders: real graphs in this process, and what becomes of a model or a server that is not there."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from generator_scene import POSITIONS, WIDTH, WORDS, bag_of_words
from onnx import numpy_helper

from services.algorithms.word_pieces import WordPieces
from services.common.errors import DependencyUnavailable, PreconditionFailed
from services.generator.adapters.text_encoders import InferenceServerText, InProcessText
from services.generator.adapters.text_parts import Queries, open_text_bundle

PIECES = WordPieces(WORDS)


@pytest.fixture
def encoder(films: Path) -> Iterator[InProcessText]:
    encoder = InProcessText(films / "text" / "text_mol" / "encoder.onnx", PIECES, max_tokens=16)
    yield encoder
    encoder.close()


def test_queries_of_any_length_are_encoded_together_as_each_alone(encoder: InProcessText) -> None:
    queries = ["space", "a space odyssey and the lonely dog", "😀", "toy story " * 100]
    together = encoder.encode(queries)
    assert together.shape == (4, 2, WIDTH)
    for query, found in zip(queries, together, strict=True):
        np.testing.assert_allclose(found, encoder.encode([query])[0], atol=1e-6)


def test_a_query_alone_has_the_same_bits_whatever_was_asked_before(films: Path, encoder: InProcessText) -> None:
    alone = Queries(PIECES, 16).alone(encoder)
    first = alone("a space odyssey")
    encoder.encode(["toy story", "a space odyssey", "dog"])
    other = InProcessText(films / "text" / "text_mol" / "encoder.onnx", PIECES, max_tokens=16)
    for found in (alone("a space odyssey"), Queries(PIECES, 16).alone(other)("a space odyssey")):
        assert found is not None
        assert first is not None
        assert found.tobytes() == first.tobytes()


def test_a_query_without_a_word_is_known_by_its_pieces(encoder: InProcessText) -> None:
    queries = Queries(PIECES, 16)
    assert queries.with_words(["space", "\u200b", "😀", ""]).tolist() == [True, False, True, False]
    assert queries.alone(encoder)("\u200b") is None


def test_the_phrase_model_gives_every_position(films: Path) -> None:
    encoder = InProcessText(films / "text" / "phrases" / "encoder.onnx", PIECES, max_tokens=16)
    assert encoder.encode(["space", "toy story"]).shape == (2, 1 + POSITIONS, len(WORDS))


def test_a_graph_that_is_missing_or_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "encoder.onnx"
    with pytest.raises(PreconditionFailed, match=r"encoder\.onnx cannot be loaded"):
        InProcessText(path, PIECES, max_tokens=16).encode(["space"])
    path.write_bytes(b"no graph")
    with pytest.raises(PreconditionFailed, match=r"encoder\.onnx cannot be loaded"):
        InProcessText(path, PIECES, max_tokens=16).encode(["space"])


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    table = np.ones((len(WORDS), 4))
    table[WORDS.index("space")] = np.nan
    graph = bag_of_words(tmp_path / "encoder.onnx", table, 2, normalised=False)
    encoder = InProcessText(graph, PIECES, max_tokens=16)
    assert encoder.encode(["toy"]).shape == (1, 2, 2)
    with pytest.raises(PreconditionFailed, match="NaN or infinite values: train the model anew"):
        encoder.encode(["toy", "space"])


def test_an_output_of_another_form_is_refused_with_both_shapes(tmp_path: Path) -> None:
    graph = bag_of_words(tmp_path / "encoder.onnx", np.ones((len(WORDS), 4)), 2, normalised=False)
    model = onnx.load(graph)
    for constant in model.graph.initializer:
        if constant.name == "shape":
            constant.CopyFrom(numpy_helper.from_array(np.array([1, -1, 2], dtype=np.int64), "shape"))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    onnx.save(model, graph)
    with pytest.raises(PreconditionFailed, match=r"shape \(1, 4, 2\); expected \(2, rows, width\)"):
        InProcessText(graph, PIECES, max_tokens=16).encode(["toy", "story"])


def test_an_inference_server_that_is_away_is_unavailable() -> None:
    encoder = InferenceServerText("127.0.0.1:9", "text", PIECES, text_version="v", max_tokens=16, timeout_s=0.5)
    with pytest.raises(DependencyUnavailable, match=r"inference server at 127\.0\.0\.1:9"):
        encoder.encode(["space"])
    encoder.close()


def test_a_folder_without_a_manifest_is_no_text_bundle_and_a_damaged_one_says_why(films: Path, tmp_path: Path) -> None:
    assert open_text_bundle(tmp_path / "none")[0] is None
    (tmp_path / "empty").mkdir()  # as a container engine makes for a volume that is not there
    bundle, reason = open_text_bundle(tmp_path / "empty")
    assert (bundle, "there is no text bundle" in reason) == (None, True)
    copy = Path(shutil.copytree(films / "text", tmp_path / "copy"))
    (copy / "documents.parquet").write_bytes(b"short")
    bundle, reason = open_text_bundle(copy)
    assert bundle is None
    assert "documents.parquet" in reason

"""Query encoders: real graphs in this process, and what becomes of a model that is not there."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from generator_scene import POSITIONS, WIDTH, WORDS, bag_of_words
from onnx import numpy_helper
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.text_bundle import SHARED_INT8
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.text.word_pieces import WordPieces
from services.generator.adapters import text_parts
from services.generator.adapters.text_parts import InProcessText, OneOutput, Queries, SharedText, open_text_bundle
from services.generator.bootstrap import load_sources
from services.generator.config import GeneratorSettings
from services.generator.domain.requests import Asked
from services.generator.metrics import GeneratorMetrics
from services.offline.bundles.text import add_text_files
from services.platform.errors import PreconditionFailed

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
    with pytest.raises(PreconditionFailed, match="NaN or infinite values: train the model again"):
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


def both_in_one(text: Path, path: Path) -> Path:
    """The scene's two graphs side by side, an output for each part."""
    found = {part: onnx.load(text / part / "encoder.onnx") for part in ("text_mol", "phrases")}
    for part, model in found.items():
        onnx.compose.add_prefix(model, f"{part}/", inplace=True)
        for node in model.graph.node:
            plain = {f"{part}/{name}": name for name in ("input_ids", "attention_mask")} | {f"{part}/output": part}
            node.input[:] = [plain.get(name, name) for name in node.input]
            node.output[:] = [plain.get(name, name) for name in node.output]
        model.graph.output[0].name = part
    first, second = found["text_mol"], found["phrases"]
    for tensor, name in zip(first.graph.input, ("input_ids", "attention_mask"), strict=True):
        tensor.name = name
    first.graph.node.extend(second.graph.node)
    first.graph.initializer.extend(second.graph.initializer)
    first.graph.output.extend(second.graph.output)
    onnx.save(first, path)
    return path


class Counted(InProcessText):
    """Counts how often the graph runs, and waits before it does for as long as `gate` is closed."""

    def __init__(self, graph: Path) -> None:
        super().__init__(graph, PIECES, max_tokens=16)
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def outputs(self, texts: Sequence[str]) -> dict[str, Any]:
        self.asked += texts
        assert self.gate.wait(10)
        return super().outputs(texts)


def test_a_query_that_both_models_are_asked_for_is_encoded_once(films: Path, tmp_path: Path) -> None:
    graph = Counted(both_in_one(films / "text", tmp_path / "shared.onnx"))
    shared = SharedText(graph, remembered=2)
    graph.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        # Whoever comes while it is computed waits for it.
        asked = [threads.submit(shared.of(part).encode, ["space", "toy story"]) for part in ("text_mol", "phrases")]
        graph.gate.set()
        components, x = (one.result(10) for one in asked)

    assert sorted(graph.asked) == ["space", "toy story"]
    for part, found in (("text_mol", components), ("phrases", x)):
        own = InProcessText(films / "text" / part / "encoder.onnx", PIECES, max_tokens=16)
        np.testing.assert_allclose(found, own.encode(["space", "toy story"]), atol=1e-6)
    shared.of("phrases").encode(["dog", "toy story", "space"])
    assert graph.asked[2:] == ["dog", "space"]  # the oldest of three was let go
    with pytest.raises(PreconditionFailed, match=r"no output 'other'; it has \['phrases', 'text_mol'\]"):
        shared.of("other").encode(["dog"])


def test_a_failure_is_told_to_all_who_wait_and_not_remembered(films: Path, tmp_path: Path) -> None:
    path = tmp_path / "shared.onnx"
    shared = SharedText(InProcessText(path, PIECES, max_tokens=16))
    for part in ("text_mol", "phrases"):
        with pytest.raises(PreconditionFailed, match=r"shared\.onnx cannot be loaded"):
            shared.of(part).encode(["space"])
    both_in_one(films / "text", path)
    assert shared.of("phrases").encode(["space"]).shape == (1, 1 + POSITIONS, len(WORDS))


def test_a_model_that_answers_nan_does_not_take_the_other_with_it(films: Path, tmp_path: Path) -> None:
    path = both_in_one(films / "text", tmp_path / "shared.onnx")
    model = onnx.load(path)
    for constant in model.graph.initializer:
        if constant.name == "phrases/table":
            table = numpy_helper.to_array(constant) * np.float32(np.nan)
            constant.CopyFrom(numpy_helper.from_array(table, constant.name))
    onnx.save(model, path)
    shared = SharedText(InProcessText(path, PIECES, max_tokens=16))
    assert shared.of("text_mol").encode(["space"]).shape == (1, 2, WIDTH)
    with pytest.raises(PreconditionFailed, match=r"phrases in shared\.onnx of the text bundle answers NaN"):
        shared.of("phrases").encode(["space"])


def test_sources_of_a_shared_graph_load_it_once_where_bytes_are_multiplied(
    films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bundle", "text"):
        shutil.copytree(films / name, tmp_path / name)
    add_text_files(tmp_path / "text", {SHARED_INT8: both_in_one(films / "text", tmp_path / "shared.onnx")})
    for best, num_graphs in (("avx512", 1), ("avx2", 0)):
        monkeypatch.setattr(text_parts, "instruction_set", lambda best=best: best)
        settings = GeneratorSettings(port=0, metrics_port=0, bundle=tmp_path / "bundle", text=tmp_path / "text")
        sources, encoders = load_sources(settings, GeneratorMetrics(CollectorRegistry()))
        graphs = {id(encoder.shared) for encoder in encoders if isinstance(encoder, OneOutput)}
        assert (sources.reasons, len(graphs)) == ({}, num_graphs)
        assert sources.text is not None
        assert sources.phrases is not None
        asked = Asked(query="toy story", k=1, filter=ItemFilter())
        for source in (sources.text, sources.phrases):
            assert list(source.find([asked])[0].item_ids) == ["1"]


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

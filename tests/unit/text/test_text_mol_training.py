"""Fine-tuning text encoders: it learns, from the seed alone, what it may change; exports answer as PyTorch does."""

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from services.algorithms.bundles.text_bundle import TextBundle, load_text_bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.models.text_model_folder import load_body
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates
from services.generator.adapters import text_parts
from services.generator.adapters.text_parts import InProcessText
from services.offline.training import int8_graphs, onnx_graphs
from services.offline.training.int8_graphs import LEAST_COSINE
from services.offline.training.onnx_graphs import ExportError, session
from services.offline.training.text_catalogue import write_text_mol
from services.offline.training.text_mol import TextFit, TextMolSettings, train_text_mol
from services.offline.training.text_mol.fit import Prepared, encoded
from tests.unit.text.model_folder_scene import bert_folder

DOCUMENTS = ["space space", "cat", "a dog!", "movies", "the cat dog", "中", "space cat", "dog dog dog"]
# What one asks for is never written in what one wants: only training can tell.
PAIRS = [("the", 0), ("the the", 1), ("a a", 2), ("!", 3), ("! !", 4), ("movie", 5), ("a the", 6), ("the a !", 7)]
SMALL = TextMolSettings(
    steps=60, batch=8, components=2, gate_hidden=4, learning_rate=2e-2, max_tokens=8, half_precision=False
)

SHORT = replace(SMALL, steps=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("body"))


@pytest.fixture(scope="module")
def fit(folder: Path) -> TextFit:
    return train_text_mol(PAIRS, DOCUMENTS, SMALL, 0, folder=folder)


def states_of(fit: TextFit, texts: Sequence[str]) -> QueryStates:
    """Return the states of queries, as in serving."""
    ids, mask = fit.tokenizer.batch(texts, max_tokens=fit.model.max_tokens)
    with torch.no_grad():
        return QueryStates(
            components=fit.model.query_components(torch.from_numpy(ids), torch.from_numpy(mask).bool()).numpy()
        )


def test_a_fit_finds_what_training_alone_could_tell(fit: TextFit) -> None:
    assert fit.losses[-1] < 0.1 < 1.0 < fit.losses[0]
    index = BruteForce(MolScorer(fit.item_states, fit.pair_gate))
    found = index.search(states_of(fit, [query for query, _ in PAIRS]), 1)
    assert found.item_indices[:, 0].tolist() == [document for _, document in PAIRS]


def test_the_seed_alone_decides(folder: Path) -> None:
    one = train_text_mol(PAIRS, DOCUMENTS, SHORT, 0, folder=folder)
    torch.randn(5)  # whatever was drawn before
    again = train_text_mol(PAIRS, DOCUMENTS, SHORT, 0, folder=folder)
    np.testing.assert_array_equal(again.item_states.components, one.item_states.components)
    other = train_text_mol(PAIRS, DOCUMENTS, SHORT, 1, folder=folder)
    assert not np.allclose(other.item_states.components, one.item_states.components, atol=1e-2)


def test_the_lower_layers_stay(folder: Path) -> None:
    before = load_body(folder).state_dict()
    trained = train_text_mol(PAIRS, DOCUMENTS, SHORT, 0, folder=folder).model.body.state_dict()
    for name, value in before.items():
        if name.startswith(("words", "positions", "norm", "layers.0")):
            torch.testing.assert_close(trained[name], value, rtol=0, atol=0)
    for layer in (1, 2):
        name = f"layers.{layer}.inner.weight"
        assert not torch.equal(trained[name], before[name])


def test_kept_lower_layers_give_the_states_of_the_whole_model(folder: Path, fit: TextFit) -> None:
    prepared = Prepared(PAIRS, DOCUMENTS, SMALL, folder=folder)
    texts = ["the cat", "", "movies! " * 20, "dog"]
    kept = encoded(fit.model, prepared.keep(texts), fit.model.query)
    # Half-precision storage of the kept layers is all the difference.
    np.testing.assert_allclose(kept, states_of(fit, texts).components, atol=5e-3)


def test_half_precision_costs_little(folder: Path) -> None:
    rough = train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, steps=20, half_precision=True), 0, folder=folder)
    assert rough.losses[-1] < 0.6 * rough.losses[0]
    assert not rough.model.body.half_precision


def test_another_document_of_the_query_is_no_negative(folder: Path) -> None:
    """One query whose two documents are all there is: nothing to be told apart, so no loss."""
    only = [("the", 0), ("the", 1)]
    found = train_text_mol(
        only, DOCUMENTS[:2], replace(SMALL, steps=2, mutual_information_weight=0.0), 0, folder=folder
    )
    np.testing.assert_allclose(found.losses, 0, atol=1e-6)


def test_the_mutual_information_loss_is_part_of_it(folder: Path) -> None:
    without, heavy = (
        train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, steps=5, mutual_information_weight=weight), 0, folder=folder)
        for weight in (0.0, 1e4)
    )
    # Pair weights begin nearly even, with 1e-6 nats of mutual information; five steps make more of it.
    assert heavy.losses[0] < without.losses[0]
    assert heavy.losses[-1] < 0 < without.losses[-1]


@pytest.mark.parametrize(
    ("pairs", "documents", "message"),
    [
        ([], DOCUMENTS, "0 pairs and 8 documents"),
        (PAIRS, [], "8 pairs and 0 documents"),
        ([("the", 8)], DOCUMENTS, r"pairs name documents 8\.\.8; allowed: 0\.\.7"),
        ([("the", -1)], DOCUMENTS, r"pairs name documents -1\.\.-1"),
        ([("the", 0), ("a", 0)], ["one document"], "all pairs have one document; in-batch negatives need at least 2"),
    ],
)
def test_pairs_that_teach_nothing_are_refused(
    folder: Path, pairs: list[tuple[str, int]], documents: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train_text_mol(pairs, documents, SMALL, 0, folder=folder)


def test_empty_texts_and_equal_documents_train_without_an_error(folder: Path) -> None:
    found = train_text_mol(
        [("", 0), ("\x00", 1), ("the", 2)], ["same", "same", ""], replace(SMALL, steps=2), 0, folder=folder
    )
    assert np.isfinite(found.item_states.components).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"components": 0}, "components=0; allowed: at least 1"),
        ({"batch": 1}, "batch=1; allowed: at least 2"),
        ({"trained_layers": 0}, "trained_layers=0; allowed: at least 1"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0; allowed: above 0"),
        ({"weight_decay": -1.0}, r"weight_decay=-1\.0; allowed: at least 0"),
        ({"warmup_fraction": 2.0}, r"warmup_fraction=2\.0; allowed: 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_more_trained_layers_than_the_body_has_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="trained_layers=9; allowed: at most 2, one layer less than the body in "):
        train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, trained_layers=9), 0, folder=folder)


IDS = [f"item-{row}" for row in range(len(DOCUMENTS))]
QUERIES = [query for query, _ in PAIRS]


@pytest.fixture(scope="module")
def bundle(fit: TextFit, tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    path = tmp_path_factory.mktemp("sealed") / "text"
    write_text_mol(path, fit, item_ids=IDS, texts=DOCUMENTS, queries=QUERIES)
    return load_text_bundle(path)


def test_a_sealed_bundle_answers_as_the_fit_does(fit: TextFit, bundle: TextBundle) -> None:
    assert bundle.parts == ("text_mol",)
    assert bundle.text_mol.head == SMALL.head(16)
    assert bundle.manifest.metrics["text_mol"]["export_error"] <= 1e-4
    np.testing.assert_array_equal(bundle.item_states.components, fit.item_states.components)
    run = session(bundle.file("text_mol/encoder.onnx"))
    for texts in (["the"], QUERIES, ["", "movies " * 90], ["中 \x00 !"]):
        tokens, mask = bundle.word_pieces.batch(texts, max_tokens=bundle.text_mol.max_tokens)
        (components,) = run.run(None, {"input_ids": tokens, "attention_mask": mask})
        np.testing.assert_allclose(components, states_of(fit, texts).components, atol=1e-4)
    index = BruteForce(MolScorer(bundle.item_states, bundle.pair_gate))
    found = index.search(states_of(fit, QUERIES), 1).item_indices[:, 0]
    assert found.tolist() == [document for _, document in PAIRS]


def test_an_export_that_answers_otherwise_is_never_sealed(
    fit: TextFit, bundle: TextBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy.deepcopy(fit.model)
    other.query.tokens.data.add_(1.0)
    graph = bundle.file("text_mol/encoder.onnx")
    monkeypatch.setattr(onnx_graphs, "write_text_graph", lambda encoder, path, **_: shutil.copyfile(graph, path))
    with pytest.raises(ExportError, match=r"encoder\.onnx differs from PyTorch by"):
        write_text_mol(tmp_path / "text", replace(fit, model=other), item_ids=IDS, texts=DOCUMENTS, queries=QUERIES)
    with pytest.raises(ValueError, match="0 queries; allowed: at least 1"):
        write_text_mol(tmp_path / "text", fit, item_ids=IDS, texts=DOCUMENTS, queries=[])
    assert not (tmp_path / "text").exists()


def test_the_int8_graph_answers_nearly_alike_and_alone(fit: TextFit, bundle: TextBundle) -> None:
    graph = bundle.int8_graph("text_mol")
    assert graph is not None
    assert {node.op_type for node in onnx.load(graph).graph.node} >= {"MatMulInteger"}
    encoder = InProcessText(graph, bundle.word_pieces, max_tokens=bundle.text_mol.max_tokens, alone=True)
    queries = [*QUERIES, "", "movies " * 90]
    together = encoder.encode(queries)
    # The range of a call would be that of its longest text.
    for query, found in zip(queries, together, strict=True):
        assert encoder.encode([query])[0].tobytes() == found.tobytes()
    # On any processor: without VNNI, weights of 8 bits saturate, to a cosine of .84.
    assert bundle.manifest.metrics["int8_cosine"]["text_mol"] >= LEAST_COSINE
    assert (together * states_of(fit, queries).components).sum(axis=2).mean() >= LEAST_COSINE  # unit vectors


def test_an_int8_graph_that_answers_otherwise_is_left_out(
    fit: TextFit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_graphs, "LEAST_COSINE", 1.1)
    bundle = write_text_mol(tmp_path / "text", fit, item_ids=IDS, texts=DOCUMENTS, queries=QUERIES)
    assert bundle.int8_graph("text_mol") is None
    assert bundle.manifest.metrics["int8_cosine"]["text_mol"] < 1.1
    (tmp_path / "graph").write_bytes(b"no graph")
    with pytest.raises(ExportError, match="graph cannot be written in int8"):
        int8_graphs.write_int8(tmp_path / "graph", tmp_path / "int8")


def test_processors_that_multiply_bytes_are_given_int8(bundle: TextBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for best, name in (("avx512", "int8/text_mol.onnx"), ("avx2", "text_mol/encoder.onnx")):
        monkeypatch.setattr(text_parts, "instruction_set", lambda best=best: best)
        graph = text_parts.queries_of(bundle, "text_mol")[1]
        assert (graph.path, graph.alone) == (bundle.path / name, best == "avx512")

"""The `phrases/` part of a text bundle answers as the trained model does, and refuses what does not belong to it."""

import copy

import numpy as np
import pytest
from phrase_scene import PIECES, corpus, tiny_encoder

from services.algorithms.bundles.text_bundle import BundleError, load_text_bundle
from services.algorithms.generation.phrases_part import PhraseParts, load_phrases
from services.algorithms.generation.vocabulary import FIXED_TOKENS
from services.offline.bundles.text import TextBundleWriter, save_phrases
from services.offline.training.onnx_graphs import TEXT_INPUTS, TOLERANCE, max_text_difference, session
from services.offline.training.phrases.fit import PhraseSettings, train_phrases
from services.offline.training.phrases.vocabulary_fit import build_vocabulary
from services.offline.training.text_catalogue import OUTPUT, write_phrases

SETTINGS = PhraseSettings(positions=3, max_tokens=16, epochs=2, least_steps=0, batch=25, encoder_rate=3e-3,
                         output_rate=5e-2)  # fmt: skip
QUERIES = ["show me a red house", "blue ship"]


@pytest.fixture(scope="module")
def trained():
    pairs, documents = corpus()
    said = [each[0] for each in documents] * 3
    vocabulary = build_vocabulary(said, size=FIXED_TOKENS + 30, min_count=2)
    return train_phrases(pairs, documents, vocabulary, SETTINGS, 0, encoder=tiny_encoder)


@pytest.fixture(scope="module")
def documents():
    texts = [each[0] for each in corpus()[1]]
    return {"item_ids": [f"item-{row}" for row in range(len(texts))], "texts": texts}


@pytest.fixture(scope="module")
def bundle(trained, documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "bundle"
    return write_phrases(path, trained, **documents, queries=QUERIES, data={"queries": "pseudo"})


def test_the_bundle_answers_as_the_trained_model(trained, bundle):
    loaded = load_text_bundle(bundle.path)
    parts = load_phrases(loaded)
    graph = session(loaded.file("phrases/encoder.onnx"))
    for texts in (QUERIES, ["", "red"], ["a " * 40]):
        batch = loaded.word_pieces.batch(texts, max_tokens=loaded.phrases.max_tokens)
        x = graph.run([OUTPUT], dict(zip(TEXT_INPUTS, batch, strict=True)))[0]
        np.testing.assert_allclose(x, trained.encode(texts), atol=1e-5)
        for row in x:
            found = parts.generator.generate(row, 5).answers
            expected = trained.generator().generate(row, 5).answers
            assert [(one.text, one.item_rows.tolist()) for one in found] == [
                (one.text, one.item_rows.tolist()) for one in expected
            ]


def test_the_manifest_says_what_the_model_was_trained_for(trained, bundle):
    said = bundle.phrases
    assert (said.vocabulary, said.vocabulary_size) == (trained.tokenizer.fingerprint, len(trained.tokenizer))
    assert (said.positions, said.width, said.max_tokens) == (3, 32, 16)
    assert bundle.manifest.data["phrases"] == {"queries": "pseudo"}
    assert bundle.manifest.metrics["phrases"]["export_error"] < 1e-4


def test_a_vocabulary_and_a_model_that_do_not_match_are_refused(trained, documents, tmp_path):
    other = build_vocabulary(["red house", "red houses", "red house"], size=FIXED_TOKENS + 3, min_count=1)
    graph = tmp_path / "encoder.onnx"
    graph.write_bytes(b"graph")
    files = save_phrases(tmp_path, PhraseParts(trained.generator(), other), graph)
    with TextBundleWriter(tmp_path / "text", **documents, words=PIECES) as to:
        to.add_phrases(
            files,
            vocabulary=trained.tokenizer.fingerprint,
            vocabulary_size=len(trained.tokenizer),
            positions=3,
            width=32,
            max_tokens=16,
        )
        written = to.seal()
    with pytest.raises(BundleError, match=other.fingerprint) as refused:
        load_phrases(written)
    assert trained.tokenizer.fingerprint in str(refused.value)


def test_a_graph_of_other_weights_is_seen_to_differ(trained, bundle):
    graph = bundle.file("phrases/encoder.onnx")
    batches = [trained.pieces.batch(QUERIES)]
    assert max_text_difference(trained.encoder, graph, batches) < TOLERANCE
    moved = copy.deepcopy(trained.encoder)
    moved.body.layers[-1].norm.bias.data += 0.01
    assert max_text_difference(moved, graph, batches) > TOLERANCE

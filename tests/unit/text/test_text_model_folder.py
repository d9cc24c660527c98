"""Model folders: published weights answer as published, and what is unknown is refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from services.algorithms.models.sentence_encoder import MiniLM, model_folder
from services.algorithms.models.text_model_folder import FolderEmbedder, load_body
from tests.unit.text.model_folder_scene import BERT, bert_folder, bert_weights, write_folder


def test_minilms_cosines_are_the_published_ones() -> None:
    embedder = MiniLM(model_folder())
    vectors = embedder.encode(["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    # As the model's own documentation prints them.
    expected = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-4)


def test_a_batch_of_mixed_lengths_gives_each_text_its_own_vector(tmp_path: Path) -> None:
    embedder = FolderEmbedder(bert_folder(tmp_path), max_tokens=16)
    texts = ["", "the cat", "a dog! " * 50, "space movies", "\x00"]
    done: list[int] = []
    together = embedder.encode(texts, batch_tokens=20, progress=done.append)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(embedder.encode([text])[0], vector, atol=1e-5)
    assert done[-1] == len(texts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    assert embedder.encode([]).shape == (0, 16)


def test_a_folder_may_name_norms_the_old_way(tmp_path: Path) -> None:
    weights = {
        f"bert.{name}".replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in bert_weights().items()
    }
    found = FolderEmbedder(write_folder(tmp_path / "old", dict(BERT), weights)).encode(["the cat"])
    np.testing.assert_array_equal(found, FolderEmbedder(bert_folder(tmp_path / "new")).encode(["the cat"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "model_type='roberta'; allowed: 'bert'"),
        ({"model_type": None}, "model_type=None; allowed: 'bert'"),
        ({"hidden_act": "swish"}, "hidden_act='swish'; allowed: 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'; allowed: 'absolute'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0; allowed: a whole number from 1"),
        ({"num_hidden_layers": 4}, r"lacks encoder\.layer\.3\."),
        ({"num_attention_heads": 5}, "hidden_size=16 is no multiple of 5 attention heads"),
        ({"vocab_size": 3}, r"word_embeddings\.weight has shape \(14, 16\); config\.json asks for \(3, 16\)"),
        ({"intermediate_size": "24"}, "intermediate_size='24'; allowed: a whole number from 1"),
    ],
)
def test_a_configuration_that_is_unknown_or_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_folder(tmp_path, dict(BERT) | changes, bert_weights())
    with pytest.raises(ValueError, match=message):
        load_body(folder)


def test_missing_files_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "model")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_body(tmp_path)
    save_file(
        {name: tensor for name, tensor in bert_weights().items() if "query" not in name}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.0\.attention\.self\.query\.weight"):
        load_body(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*pickled weights are not read"):
        load_body(folder)
    for broken, message in (("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "holds a JSON list")):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ValueError, match=message):
            load_body(folder)

"""Model folders: published weights answer as published, T5 as its formulas say, and what is unknown is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.algorithms.models.sentence_encoder import MiniLM, model_folder
from services.algorithms.models.text_bodies import T5Body
from services.algorithms.models.text_model_folder import FolderEmbedder, TextEmbedder, load_body, load_tokenizer
from tests.unit.text.model_folder_scene import BERT, T5, bert_folder, bert_weights, t5_weights, write_folder


def test_minilms_cosines_are_the_published_ones() -> None:
    embedder: TextEmbedder = MiniLM(model_folder())
    vectors = embedder.embed(["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    # As the model's own documentation prints them.
    expected = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-4)


def test_a_batch_of_mixed_lengths_gives_each_text_its_own_vector(tmp_path: Path) -> None:
    embedder = FolderEmbedder(bert_folder(tmp_path), max_tokens=16)
    texts = ["", "the cat", "a dog! " * 50, "space movies", "\x00"]
    done: list[int] = []
    together = embedder.encode(texts, batch_tokens=20, progress=done.append)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], vector, atol=1e-5)
    assert done[-1] == len(texts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    assert embedder.embed([]).shape == (0, 16)


def test_a_folder_may_pool_by_its_first_token_and_name_norms_the_old_way(tmp_path: Path) -> None:
    weights = {
        f"bert.{name}".replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in bert_weights().items()
    }
    folder = write_folder(tmp_path, dict(BERT), weights)
    mean = FolderEmbedder(folder).embed(["the cat"])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true, "word_embedding_dimension": 1}')
    first = FolderEmbedder(folder)
    hidden = first.body.run(first.body.embed(torch.tensor([[2, 10, 7, 3]])), torch.ones(1, 4, dtype=torch.bool), 0, 3)
    np.testing.assert_allclose(
        first.embed(["the cat"]), torch.nn.functional.normalize(hidden[:, 0]).detach(), atol=1e-5
    )
    assert not np.allclose(mean, first.embed(["the cat"]), atol=1e-2)


def test_t5s_distance_buckets_are_exact_when_near_and_logarithmic_when_far(tmp_path: Path) -> None:
    config = dict(T5) | {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    body = load_body(write_folder(tmp_path, config, t5_weights(config)))
    assert isinstance(body, T5Body)
    distances = torch.tensor([0, -1, -7, -8, -11, -12, -16, -33, -65, -127, -500, 1, 7, 12, 500])
    assert body._buckets(distances).tolist() == [0, 1, 7, 8, 8, 9, 10, 12, 14, 15, 15, 17, 23, 25, 31]


@pytest.mark.parametrize("feed_forward", ["gated-gelu", "relu"])
@torch.no_grad()
def test_t5s_outputs_are_those_of_its_formulas(tmp_path: Path, feed_forward: str) -> None:
    config = dict(T5) | {"feed_forward_proj": feed_forward}
    weights = t5_weights(config)
    body = load_body(write_folder(tmp_path, config, weights))
    ids = torch.tensor([[4, 7, 9, 5, 6], [8, 4, 0, 0, 0]])
    found = body.run(body.embed(ids), ids > 0, 0, 2)
    for row, length in enumerate((5, 2)):
        expected = _t5_by_hand({name: tensor.numpy() for name, tensor in weights.items()}, ids[row, :length].numpy())
        np.testing.assert_allclose(found[row, :length].numpy(), expected, atol=2e-5)


def _t5_by_hand(weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """One text, one head and one position at a time, as the T5 paper and its published configuration have it."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}.weight"])

    def bucket(distance: int) -> int:
        side, size = (4 if distance > 0 else 0), abs(distance)
        far = 2 + int(np.log(max(size, 1) / 2) / np.log(16 / 2) * 2) if size >= 2 else size
        return side + min(far, 3)

    x = weights["shared.weight"][ids]
    bias = weights["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    for layer in range(2):
        name = f"encoder.block.{layer}.layer."
        normed = norm(x, f"{name}0.layer_norm")
        query, key, value = (normed @ weights[f"{name}0.SelfAttention.{part}.weight"].T for part in "qkv")
        heads = []
        for head in range(3):
            own = slice(5 * head, 5 * head + 5)
            logits = query[:, own] @ key[:, own].T
            for i in range(len(ids)):
                for j in range(len(ids)):
                    logits[i, j] += bias[bucket(j - i), head]
            shares = np.exp(logits - logits.max(-1, keepdims=True))
            heads.append(shares / shares.sum(-1, keepdims=True) @ value[:, own])
        x = x + np.concatenate(heads, axis=1) @ weights[f"{name}0.SelfAttention.o.weight"].T
        normed, inner = norm(x, f"{name}1.layer_norm"), f"{name}1.DenseReluDense."
        if f"{inner}wi.weight" in weights:
            made = np.maximum(normed @ weights[f"{inner}wi.weight"].T, 0)
        else:
            raw = normed @ weights[f"{inner}wi_0.weight"].T
            gelu = 0.5 * raw * (1 + np.tanh(np.sqrt(2 / np.pi) * (raw + 0.044715 * raw**3)))
            made = gelu * (normed @ weights[f"{inner}wi_1.weight"].T)
        x = x + made @ weights[f"{inner}wo.weight"].T
    return norm(x, "encoder.final_layer_norm")


def test_a_tokenizer_file_is_read_where_there_is_no_uncased_word_list(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    (folder / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"neither an uncased vocab\.txt nor a tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_bytes((model_folder() / "tokenizer.json").read_bytes())
    ids, mask = load_tokenizer(folder).batch(["Space movies", "cat"], max_tokens=3)
    assert ids.tolist() == [[101, 2686, 102], [101, 4937, 102]]
    assert mask.all()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer file"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "model_type='roberta'; allowed: bert, t5"),
        ({"model_type": None}, "model_type=None; allowed: bert, t5"),
        ({"hidden_act": "swish"}, "activation 'swish'; allowed: gelu"),
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


def test_missing_files_pickled_weights_and_other_poolings_are_refused(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "model")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_body(tmp_path)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ValueError, match=r"pooling_mode_max_tokens.*allowed: mean_tokens or cls_token"):
        FolderEmbedder(folder)
    save_file(
        {name: tensor for name, tensor in bert_weights().items() if "query" not in name}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.0\.attention\.self\.query\.weight"):
        load_body(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*pickled weights are not read"):
        load_body(folder)
    for broken, message in (("{", "is not JSON"), ("[]", "holds a JSON list")):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ValueError, match=message):
            load_body(folder)

"""Any local folder of a text encoder in the usual format: config.json, model.safetensors, vocab.txt or tokenizer.json.

BERT (MiniLM is one) and T5 encoders; what it does not know it refuses by name, for a model that loads and answers
wrongly costs more than one that does not load. No pickled weights. Also what any embedder of texts has to offer, so
that somebody else's endpoint can stand in its place.

Letters: n, B texts, L tokens of the longest, D width.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.algorithms.models.text_bodies import ACTIVATIONS, BertBody, BodyShape, T5Body, TextBody
from services.algorithms.states import FloatArray
from services.algorithms.word_pieces import Tokens, WordPieces, padded

__all__ = ["FolderEmbedder", "TextEmbedder", "TextTokenizer", "load_body", "load_tokenizer"]

MODEL_TYPES = ("bert", "t5")
_WEIGHTS = "model.safetensors"
# Tokens of so many texts are held at once: 64 MB at 256 of them.
_TEXTS_AT_ONCE = 16_384


class TextEmbedder(Protocol):
    """Texts to vectors, whoever makes them: a model here, or an endpoint of somebody else's."""

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """n texts -> vectors (n, d) in their order."""


class TextTokenizer(Protocol):
    """Texts to a model's input."""

    def batch(self, texts: Sequence[str], *, max_tokens: int) -> tuple[Tokens, Tokens]:
        """Ids (B, L), zero where padded, and mask (B, L), 1 at tokens."""


class _TokenizerFile:
    """A tokenizer.json, run by the library that writes them."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises nothing narrower
            raise ValueError(f"{path} is no tokenizer file: {exc}") from exc
        self._tokenizer.no_padding()

    def batch(self, texts: Sequence[str], *, max_tokens: int) -> tuple[Tokens, Tokens]:
        self._tokenizer.enable_truncation(max_tokens)
        return padded([encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))])


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The folder's tokenizer: its word list where that is uncased BERT's, else its tokenizer.json.

    Raises: ValueError naming the folder and the files that it could have.
    """
    config = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if (folder / "vocab.txt").is_file() and config.get("do_lower_case", True):
        return WordPieces.read(folder / "vocab.txt")
    if (folder / "tokenizer.json").is_file():
        return _TokenizerFile(folder / "tokenizer.json")
    raise ValueError(f"{folder} holds neither an uncased vocab.txt nor a tokenizer.json; one of them is needed")


def load_body(folder: Path) -> TextBody:
    """The folder's encoder with its weights, in float32. A decoder's or a head's weights are left alone.

    Raises: ValueError naming the folder and the field, file, or tensor that is missing, unknown, or of another shape.
    """
    config = _json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{folder / 'config.json'}: model_type={kind!r}; allowed: {', '.join(MODEL_TYPES)}")
    if not (folder / _WEIGHTS).is_file():
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".safetensors", ".pt"))
        raise ValueError(f"{folder} holds no {_WEIGHTS} (found: {found or 'no weights'}); pickled weights are not read")
    weights = load_file(folder / _WEIGHTS)
    if kind == "bert":
        return _bert(folder, config, weights)
    return _t5(folder, config, weights)


class FolderEmbedder:
    """Mean-pooled (or first-token) unit vectors of a model folder, as sentence encoders are published."""

    def __init__(self, folder: Path, *, max_tokens: int = 256) -> None:
        """Raises: ValueError as `load_body` and `load_tokenizer` do, or for a pooling that is neither."""
        self.body, self.tokenizer, self.max_tokens = load_body(folder), load_tokenizer(folder), max_tokens
        pooling = _json(folder / "1_Pooling" / "config.json") if (folder / "1_Pooling").is_dir() else {}
        modes = sorted(name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True)
        if modes not in ([], ["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
            raise ValueError(f"{folder / '1_Pooling'}: {modes}; allowed: mean_tokens or cls_token alone")
        self._first_token = modes == ["pooling_mode_cls_token"]

    @property
    def width(self) -> int:
        return self.body.shape.width

    def embed(self, texts: Sequence[str]) -> FloatArray:
        return self.encode(texts)

    @torch.no_grad()
    def encode(
        self, texts: Sequence[str], *, batch_tokens: int = 8192, progress: Callable[[int], None] | None = None
    ) -> FloatArray:
        """Vectors (n, D), unit norm, of n texts in their order; `progress` is called with the number of texts done.

        Texts of similar length share a batch, so that hardly any padding is computed.
        """
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        for begin in range(0, len(texts), _TEXTS_AT_ONCE):
            ids, mask = self.tokenizer.batch(texts[begin : begin + _TEXTS_AT_ONCE], max_tokens=self.max_tokens)
            lengths = mask.sum(axis=1)
            order = np.argsort(lengths, kind="stable")
            start = 0
            while start < len(order):
                stop = start + 1
                while stop < len(order) and (stop + 1 - start) * lengths[order[stop]] <= batch_tokens:
                    stop += 1
                rows = order[start:stop]
                longest = int(lengths[rows[-1]])
                vectors[begin + rows] = self._pooled(ids[rows, :longest], mask[rows, :longest])
                start = stop
                if progress is not None:
                    progress(begin + stop)
        return vectors

    def _pooled(self, ids: Tokens, mask: Tokens) -> FloatArray:
        real = torch.from_numpy(mask).bool()
        hidden = self.body.run(self.body.embed(torch.from_numpy(ids)), real, 0, self.body.shape.layers)
        pooled = hidden[:, 0] if self._first_token else mean_of_tokens(hidden, real)
        return torch.nn.functional.normalize(pooled, dim=1).numpy()


def mean_of_tokens(hidden: Tensor, real: Tensor) -> Tensor:
    """hidden (B, L, D), real (B, L) true at tokens -> means (B, D)."""
    return (hidden * real[..., None]).sum(dim=1) / real.sum(dim=1, keepdim=True)


def _bert(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TextBody:
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise ValueError(f"{folder / 'config.json'}: position_embedding_type={positions!r}; allowed: 'absolute'")
    heads, width = _count(folder, config, "num_attention_heads"), _count(folder, config, "hidden_size")
    if width % heads:
        raise ValueError(f"{folder / 'config.json'}: hidden_size={width} is no multiple of {heads} attention heads")
    shape = BodyShape(
        vocabulary=_count(folder, config, "vocab_size"),
        width=width,
        layers=_count(folder, config, "num_hidden_layers"),
        heads=heads,
        head_width=width // heads,
        inner=_count(folder, config, "intermediate_size"),
        activation=_activation(folder, config.get("hidden_act", "gelu")),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        max_positions=_count(folder, config, "max_position_embeddings"),
    )
    plain = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    segments = plain.get("embeddings.token_type_embeddings.weight")
    if segments is not None:
        plain["segment"] = segments[0]
    names = {
        "words.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "segment": "segment",
        "norm.": "embeddings.LayerNorm.",
    }
    for number in range(shape.layers):
        ours, theirs = f"layers.{number}.", f"encoder.layer.{number}."
        names |= {f"{ours}attention.{part}.": f"{theirs}attention.self.{part}." for part in ("query", "key", "value")}
        names |= {
            f"{ours}attention.out.": f"{theirs}attention.output.dense.",
            f"{ours}attention_norm.": f"{theirs}attention.output.LayerNorm.",
            f"{ours}inner.": f"{theirs}intermediate.dense.",
            f"{ours}outer.": f"{theirs}output.dense.",
            f"{ours}norm.": f"{theirs}output.LayerNorm.",
        }
    return _filled(folder, BertBody(shape), names, plain)


def _t5(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TextBody:
    feed_forward = str(config.get("feed_forward_proj", "relu"))
    gated, activation = feed_forward.startswith("gated-"), feed_forward.removeprefix("gated-")
    shape = BodyShape(
        vocabulary=_count(folder, config, "vocab_size"),
        width=_count(folder, config, "d_model"),
        layers=_count(folder, config, "num_layers"),
        heads=_count(folder, config, "num_heads"),
        head_width=_count(folder, config, "d_kv"),
        inner=_count(folder, config, "d_ff"),
        # The published code reads "gated-gelu" as the tanh approximation.
        activation=_activation(folder, "gelu_new" if gated and activation == "gelu" else activation),
        epsilon=float(config.get("layer_norm_epsilon", 1e-6)),
        gated=gated,
        distance_buckets=_count(folder, config, "relative_attention_num_buckets"),
        max_distance=int(config.get("relative_attention_max_distance", 128)),
    )
    plain = dict(weights)
    if "shared.weight" not in plain and "encoder.embed_tokens.weight" in plain:
        plain["shared.weight"] = plain["encoder.embed_tokens.weight"]
    names = {
        "words.weight": "shared.weight",
        "distances.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "norm.": "encoder.final_layer_norm.",
    }
    for number in range(shape.layers):
        ours, theirs = f"layers.{number}.", f"encoder.block.{number}.layer."
        parts = {"query": "q", "key": "k", "value": "v", "out": "o"}
        names |= {f"{ours}attention.{own}.": f"{theirs}0.SelfAttention.{name}." for own, name in parts.items()}
        names |= {
            f"{ours}attention_norm.": f"{theirs}0.layer_norm.",
            f"{ours}norm.": f"{theirs}1.layer_norm.",
            f"{ours}inner.": f"{theirs}1.DenseReluDense.{'wi_0' if gated else 'wi'}.",
            f"{ours}gate.": f"{theirs}1.DenseReluDense.wi_1.",
            f"{ours}outer.": f"{theirs}1.DenseReluDense.wo.",
        }
    return _filled(folder, T5Body(shape), names, plain)


def _filled(folder: Path, body: TextBody, names: Mapping[str, str], weights: Mapping[str, Tensor]) -> TextBody:
    """The body with each of its parameters read; `names`: ours to theirs, whole or ending in a dot for a module's."""
    found = {}
    for own, parameter in body.state_dict().items():
        module = own[: own.rindex(".") + 1] if "." in own else own
        theirs = names[own] if own in names else names[module] + own.removeprefix(module)
        if theirs not in weights:
            # Weights from before 2019 name a norm's two gamma and beta.
            theirs = theirs.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        if theirs not in weights:
            raise ValueError(f"{folder / _WEIGHTS} lacks {names.get(own, theirs)}; config.json asks for it")
        if weights[theirs].shape != parameter.shape:
            raise ValueError(
                f"{folder / _WEIGHTS}: {theirs} has shape {tuple(weights[theirs].shape)}; "
                f"config.json asks for {tuple(parameter.shape)}"
            )
        found[own] = weights[theirs].float()
    body.load_state_dict(found)
    return body.eval()


def _count(folder: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{folder / 'config.json'}: {name}={value!r}; allowed: a whole number from 1")
    return value


def _activation(folder: Path, name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"{folder / 'config.json'}: activation {name!r}; allowed: {', '.join(ACTIVATIONS)}")
    return name


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ValueError(f"{path} is missing; a model folder holds one") from exc
    except ValueError as exc:
        raise ValueError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a JSON {type(raw).__name__}; expected an object")
    return raw

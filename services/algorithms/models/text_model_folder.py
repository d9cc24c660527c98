"""A folder of a BERT encoder (such as MiniLM) in the usual format: config.json, model.safetensors, vocab.txt.

Unsupported fields are rejected by name. Pickled weights are not read.

Letters: n, B texts, L tokens of the longest, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.algorithms.bundles.model_manifest import read_fields
from services.algorithms.models.text_bodies import BertBody, BodyShape
from services.algorithms.scoring.states import FloatArray
from services.algorithms.text.word_pieces import Tokens, WordPieces

_ALLOWED = {"model_type": "bert", "position_embedding_type": "absolute", "hidden_act": "gelu"}
_WEIGHTS = "model.safetensors"
# Number of texts whose tokens are in memory at once: 64 MB at 256 tokens each.
_TEXTS_AT_ONCE = 16_384


def load_body(folder: Path) -> BertBody:
    """Load the encoder in float32, without decoders or heads.

    Raises: ValueError with the folder and the missing, unknown or misshapen field, file or tensor.
    """
    config = read_fields(folder / "config.json", "a model folder")
    for field, allowed in _ALLOWED.items():
        if config.get(field, allowed) != allowed:
            raise ValueError(f"{folder / 'config.json'}: {field}={config[field]!r}; allowed: {allowed!r}")
    if not (folder / _WEIGHTS).is_file():
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".safetensors", ".pt"))
        raise ValueError(f"{folder} holds no {_WEIGHTS} (found: {found or 'no weights'}); pickled weights are not read")
    weights = load_file(folder / _WEIGHTS)
    heads, width = _count(folder, config, "num_attention_heads"), _count(folder, config, "hidden_size")
    if width % heads:
        raise ValueError(f"{folder / 'config.json'}: hidden_size={width} is no multiple of {heads} attention heads")
    shape = BodyShape(
        vocabulary=_count(folder, config, "vocab_size"),
        width=width,
        layers=_count(folder, config, "num_hidden_layers"),
        heads=heads,
        inner=_count(folder, config, "intermediate_size"),
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


class FolderEmbedder:
    """Embeds texts as mean-pooled unit vectors, like published sentence encoders."""

    def __init__(self, folder: Path, *, max_tokens: int = 256) -> None:
        """Load a model. Raises: ValueError as `load_body` and `WordPieces.read` do."""
        self.body, self.tokenizer = load_body(folder), WordPieces.read(folder / "vocab.txt")
        self.max_tokens = max_tokens

    @property
    def width(self) -> int:
        return self.body.shape.width

    @torch.no_grad()
    def encode(
        self, texts: Sequence[str], *, batch_tokens: int = 8192, progress: Callable[[int], None] | None = None
    ) -> FloatArray:
        """Unit vectors (n, D) of n texts, in order. progress: called with the number of finished texts.

        Texts of similar length share a batch, to save padding.
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
        return torch.nn.functional.normalize(mean_of_tokens(hidden, real), dim=1).numpy()


def mean_of_tokens(hidden: Tensor, real: Tensor) -> Tensor:
    """hidden (B, L, D), real (B, L) true at tokens -> means (B, D)."""
    return (hidden * real[..., None]).sum(dim=1) / real.sum(dim=1, keepdim=True)


def _filled(folder: Path, body: BertBody, names: Mapping[str, str], weights: Mapping[str, Tensor]) -> BertBody:
    """Load all parameters of the body. names: our name -> the file's; a final dot means a whole module."""
    found = {}
    for own, parameter in body.state_dict().items():
        module = own[: own.rindex(".") + 1] if "." in own else own
        theirs = names[own] if own in names else names[module] + own.removeprefix(module)
        if theirs not in weights:
            # Before 2019, a norm's parameters were gamma and beta.
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

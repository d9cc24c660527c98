"""Which items are alike, by the item states of a bundle: a new item is put among them, and asked for by who likes them.

A bundle is a folder with items.parquet and item_states.safetensors; an item's vector is the average of its components,
normalised. It imports no service.

Letters: X items, P_x components, d width.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from .population import read_items


def read_vectors(bundle: Path) -> tuple[list[str], npt.NDArray[np.float32]]:
    """Item ids and unit vectors (X, d). Raises: ValueError naming the path when there is nothing usable."""
    path = bundle / "item_states.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{path} is not there; --items has to name a bundle folder, whose item states say what is near"
        )
    try:
        components = load_file(path)["components"]
    except (SafetensorError, KeyError, OSError) as exc:
        raise ValueError(f"{path} cannot be read: {exc}") from exc
    item_ids, _ = read_items(bundle)
    if len(item_ids) != len(components):
        raise ValueError(f"{path} has {len(components)} items, items.parquet has {len(item_ids)}; they must agree")
    vectors = components.mean(axis=1, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return item_ids, vectors / np.maximum(lengths, 1e-12)


def neighbourhoods(
    item_ids: list[str],
    vectors: npt.NDArray[np.float32],
    anchors: npt.NDArray[np.int64],
    *,
    size: int,
    among: npt.NDArray[np.int64],
) -> list[list[str]]:
    """Of each anchor, ids of the `size` nearest by cosine out of `among` (the anchor, which is nearest, among them)."""
    similar = vectors[anchors] @ vectors[among].T
    order = np.argsort(-similar, axis=1, kind="stable")[:, :size]
    return [[item_ids[row] for row in among[nearest].tolist()] for nearest in order]

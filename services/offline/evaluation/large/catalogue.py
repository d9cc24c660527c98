"""A synthetic catalogue of any size whose items look like a trained model's, and queries from its encoder.

Items are rows of the bundle, with normal noise added to each component before it is normalised.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime

from services.algorithms.bundles.model_bundle import ENCODER_ONNX, Bundle
from services.algorithms.item_table.categories import Categories, CategoryLists
from services.algorithms.item_table.strings import Strings
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates
from services.offline.bundles.model import BundleContent, write_bundle
from services.offline.training.codebooks.inverted_file import catalogue_codebooks

_NOISE = 0.1 * 32**0.5  # norm, for components of length 1: a copy's cosine with its original is about .87
_HISTORY = 50
_CHUNK = 200_000
_PREFIX, _DIGITS = b"synthetic-", 8


def enlarged(
    bundle: Bundle, num_items: int, path: Path, *, seed: int, width: int | None = None, coded: bool = True
) -> Bundle:
    """Write a bundle of `num_items` synthetic items to `path`, with the head and gate of `bundle`, without an encoder.

    width: number of coordinates of each component; None means all. coded: add codebooks for `anisotropic`.
    """
    generator = np.random.default_rng(seed)
    trained, head = bundle.item_states, bundle.manifest.head
    width = head.component_width if width is None else min(width, head.component_width)
    noise = _NOISE / width**0.5
    components = _on_disk(path, "components", (num_items, trained.components.shape[1], width))
    gate = None if trained.gate is None else _on_disk(path, "gate", (num_items, trained.gate.shape[1]))
    for x in range(0, num_items, _CHUNK):
        rows = generator.integers(0, bundle.num_items, min(_CHUNK, num_items - x))
        part = trained.components[rows, :, :width]
        part = part + noise * generator.standard_normal(part.shape, dtype=np.float32)
        components[x : x + _CHUNK] = part / np.linalg.norm(part, axis=-1, keepdims=True)
        if gate is not None and trained.gate is not None:
            gate[x : x + _CHUNK] = trained.gate[rows]
    items = ItemStates(components=components, gate=gate)
    content = BundleContent(
        encoder=None,
        head=replace(head, component_width=width),
        weights={},
        item_states=items,
        pair_gate=bundle.pair_gate,
        item_ids=_numbered(num_items),
        titles=Strings(np.zeros(0, np.uint8), np.zeros(num_items, np.int32)),
        categories=Categories(CategoryLists(np.zeros(num_items + 1, np.int64), np.zeros(0, np.int32)), ()),
        counts=np.zeros(num_items, dtype=np.int64),
        codebooks=catalogue_codebooks(items, bundle.pair_gate, seed=seed) if coded else None,
    )
    try:
        return write_bundle(path, content)
    finally:
        for name in ("components", "gate"):
            path.with_name(f"{path.name}.{name}").unlink(missing_ok=True)


def _on_disk(path: Path, name: str, shape: tuple[int, ...]) -> FloatArray:
    return np.memmap(path.with_name(f"{path.name}.{name}"), np.float32, mode="w+", shape=shape)


def _numbered(count: int) -> Strings:
    ids = np.empty((count, len(_PREFIX) + _DIGITS), np.uint8)
    ids[:, : len(_PREFIX)] = np.frombuffer(_PREFIX, np.uint8)
    rows = np.arange(count, dtype=np.int32)
    for place in range(ids.shape[1] - 1, len(_PREFIX) - 1, -1):
        ids[:, place] = ord("0") + rows % 10
        rows //= 10
    return Strings(ids.reshape(-1), np.arange(1, count + 1) * ids.shape[1])


def queries(bundle: Bundle, count: int, *, seed: int) -> QueryStates:
    """Return states of `count` random histories. A history has 50 items, or fewer if the encoder reads fewer."""
    generator = np.random.default_rng(seed + 1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(bundle.file(ENCODER_ONNX)), options)
    length = min(_HISTORY, bundle.max_history)
    times = 1_000_000_000_000 + np.sort(generator.integers(0, 100_000_000, (count, length)), axis=1)
    given = {
        "item_index": generator.integers(1, bundle.num_items, (count, length)),
        "event_time": times,
        "position": np.full((count, 1), length - 1),
        "user_index": np.full(count, -1),
    }
    wanted = {one.name: given[one.name] for one in session.get_inputs()}
    # Half precision, as processes send states; a dot product has no gate output.
    found = [array[:, 0].astype(np.float16).astype(np.float32) for array in session.run(None, wanted)]
    return QueryStates(**dict(zip([one.name for one in session.get_outputs()], found, strict=True)))

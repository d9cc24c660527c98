"""A synthetic catalogue of any size whose items look like a trained model's, and queries that its encoder makes.

Items are rows of the bundle, drawn with replacement, each component turned by normal noise: near copies at every
distance, as catalogues of millions have. Queries are states of histories of random items of the bundle.
"""

from pathlib import Path

import numpy as np
import onnxruntime

from services.algorithms.bundles.model_bundle import ENCODER_ONNX, Bundle, BundleContent, write_bundle
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.training.codebooks.inverted_file import catalogue_codebooks

_NOISE = 0.1 * 32**0.5  # its norm, beside components of 1: a copy has a cosine of about .87 with its original
_HISTORY = 50
_CHUNK = 200_000


def enlarged(bundle: Bundle, num_items: int, path: Path, *, seed: int) -> Bundle:
    """A bundle of so many synthetic items at `path`, with the trained one's head and gate and no encoder."""
    generator = np.random.default_rng(seed)
    trained = bundle.item_states
    noise = _NOISE / trained.components.shape[2] ** 0.5
    components = np.empty((num_items, *trained.components.shape[1:]), dtype=np.float32)
    gate = None if trained.gate is None else np.empty((num_items, trained.gate.shape[1]), dtype=np.float32)
    for x in range(0, num_items, _CHUNK):
        rows = generator.integers(0, bundle.num_items, min(_CHUNK, num_items - x))
        part = trained.components[rows]
        part = part + noise * generator.standard_normal(part.shape, dtype=np.float32)
        components[x : x + _CHUNK] = part / np.linalg.norm(part, axis=-1, keepdims=True)
        if gate is not None and trained.gate is not None:
            gate[x : x + _CHUNK] = trained.gate[rows]
    items = ItemStates(components=components, gate=gate)
    content = BundleContent(
        encoder=None,
        head=bundle.manifest.head,
        weights={},
        item_states=items,
        pair_gate=bundle.pair_gate,
        item_ids=[f"synthetic-{row:08d}" for row in range(num_items)],
        titles=[""] * num_items,
        categories=[()] * num_items,
        counts=np.zeros(num_items, dtype=np.int64),
        codebooks=catalogue_codebooks(items, bundle.pair_gate, seed=seed),
    )
    return write_bundle(path, content)


def queries(bundle: Bundle, count: int, *, seed: int) -> QueryStates:
    """States of `count` histories of 50 random items each, or as many as the encoder reads."""
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
    # As they cross the wire; a dot product has no gate.
    found = [array[:, 0].astype(np.float16).astype(np.float32) for array in session.run(None, wanted)]
    return QueryStates(**dict(zip([one.name for one in session.get_outputs()], found, strict=True)))

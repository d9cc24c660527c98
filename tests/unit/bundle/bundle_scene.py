"""A small bundle's content, with random but seeded arrays."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.algorithms.bundles.model_bundle import BundleError, EncoderShape, HeadShape, load_bundle
from services.algorithms.scoring.states import ItemStates, PairGate
from services.offline.bundles.model import BundleContent
from tests.unit.retrieval_scene import unit

ENCODER = EncoderShape(
    kind="hstu", num_blocks=1, num_heads=1, width=8, d_qk=4, d_v=4, max_history=8, num_time_buckets=16
)
MIXTURE = HeadShape(
    kind="mol", num_query_components=2, num_item_components=2, component_width=4, tau=0.05, gate_hidden=3
)
DOT = HeadShape(kind="dot", num_query_components=1, num_item_components=1, component_width=8, tau=0.05)


def content(num_items: int = 5, *, seed: int = 0) -> BundleContent:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return BundleContent(
        encoder=ENCODER,
        head=MIXTURE,
        weights={"item_embedding.weight": array(num_items, 8), "scale": array()},
        item_states=ItemStates(components=unit(array(num_items, 2, 4)), gate=array(num_items, 4)),
        pair_gate=PairGate(hidden_weight=array(3, 4), hidden_bias=array(3), out_weight=array(4, 3), out_bias=array(4)),
        item_ids=[f"film-{row}" for row in range(num_items)],
        titles=[f"Film № {row}" for row in range(num_items)],
        categories=[("Drama", "War") if row % 2 else () for row in range(num_items)],
        counts=np.arange(num_items, dtype=np.int64),
        data={"name": "test"},
        metrics={"hr@10": 0.5},
    )


def dot_content() -> BundleContent:
    base = content()
    components = unit(np.random.default_rng(1).normal(size=(5, 1, 8)))
    return replace(base, head=DOT, item_states=ItemStates(components=components), pair_gate=None)


def edit_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def relist(path: Path, name: str) -> None:
    """Make the manifest agree with a file's bytes, so that only its content is wrong."""
    manifest = json.loads((path / "manifest.json").read_text())
    raw = (path / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    (path / "manifest.json").write_text(json.dumps(manifest))


def resealed(path: Path, load: Callable[[Path], object] = load_bundle, version: str = "model_version") -> None:
    """Make sizes, checksums and version of a bundle anew, as whoever writes other content would."""
    for name in json.loads((path / "manifest.json").read_text())["files"]:
        relist(path, name)
    with pytest.raises(BundleError) as refusal:
        load(path)
    if found := re.search("the content hashes to ([0-9a-f]{16})", str(refusal.value)):
        edit_manifest(path, **{version: found[1]})

"""`freshet inspect`: a bundle's identity, training data, content, and most similar items."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.pefa.refresh import unit

# Number of most popular items in the report, and of nearest items for each.
ITEMS, NEAREST = 5, 5


def inspect(path: Path) -> dict[str, Any]:
    """Return a report of plain values; None for a part that the bundle lacks. Raises: BundleError."""
    bundle = load_bundle(path)
    manifest = bundle.manifest
    parts = {
        name: None if (part := getattr(manifest, name)) is None else asdict(part)
        for name in ("encoder", "head", "neighbours", "absence")
    }
    arrays = {"items": bundle.item_states.components, "item gates": bundle.item_states.gate}
    files = {name: entry.bytes for name, entry in sorted(manifest.files.items(), key=lambda one: -one[1].bytes)}
    return {
        "bundle": str(path),
        "model_version": bundle.model_version,
        **parts,
        "items": manifest.num_items,
        "users": manifest.num_users,
        "untrained_items": len(bundle.untrained),
        "new_item_length": manifest.new_item_length,
        "event_types": {name: one.role.value for name, one in bundle.event_schema.types.items()},
        "trained_on": manifest.data,
        "metrics": manifest.metrics,
        "shapes": {name: list(one.shape) for name, one in arrays.items() if one is not None},
        "files": files,
        "bytes": sum(files.values()),
        "nearest": _nearest(bundle),
    }


def _nearest(bundle: Bundle) -> list[dict[str, Any]]:
    """Return the items nearest to the most popular ones, by the mean cosine of components."""
    vectors = unit(bundle.item_states.components).reshape(bundle.num_items, -1).astype(np.float32)
    count = min(NEAREST, bundle.num_items - 1)
    rows = []
    for item in np.argsort(-bundle.counts, kind="stable")[:ITEMS].tolist():
        alike = vectors @ vectors[item] / bundle.manifest.head.num_item_components
        alike[item] = -np.inf
        best = np.argsort(-alike, kind="stable")[:count].tolist()
        rows.append(
            {
                "item": _name(bundle, item),
                "events": int(bundle.counts[item]),
                "nearest": [{"item": _name(bundle, one), "cosine": round(float(alike[one]), 4)} for one in best],
            }
        )
    return rows


def _name(bundle: Bundle, item: int) -> str:
    title = bundle.titles[item]
    return f"{bundle.item_ids[item]} {title}".rstrip()

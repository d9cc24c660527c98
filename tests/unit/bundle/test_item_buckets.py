"""Bucket rows are part of the shapes; which row an item has is the same everywhere."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_scene import ENCODER, content

from services.algorithms.bundles.model_bundle import load_bundle, write_bundle
from services.algorithms.bundles.model_manifest import BundleError, Manifest
from services.algorithms.encoding.item_buckets import item_bucket, item_buckets


def test_buckets_are_part_of_the_models_version(tmp_path: Path) -> None:
    plain = write_bundle(tmp_path / "plain", content())
    manifest = Manifest.read(tmp_path / "plain" / "manifest.json")
    bucketed = replace(manifest, encoder=replace(ENCODER, num_item_buckets=3))
    bucketed.write(tmp_path / "plain" / "manifest.json")
    assert Manifest.read(tmp_path / "plain" / "manifest.json").encoder == bucketed.encoder
    with pytest.raises(BundleError, match=f"model_version={plain.model_version}; the content hashes to"):
        load_bundle(tmp_path / "plain")


def test_a_negative_number_of_buckets_is_refused_by_name() -> None:
    with pytest.raises(BundleError, match=r"encoder\.num_item_buckets=-1; allowed: 0 or more"):
        replace(ENCODER, num_item_buckets=-1)


def test_an_items_bucket_is_the_same_everywhere_and_buckets_share_the_items_evenly() -> None:
    # Written down: another answer would send histories to rows that were trained for other items.
    assert [item_bucket(item, 64) for item in ("1", "1193", "größer")] == [11, 25, 27]
    counts = np.bincount(item_buckets([f"item-{number}" for number in range(64_000)], 64), minlength=64)
    assert counts.min() > 850
    assert counts.max() < 1150

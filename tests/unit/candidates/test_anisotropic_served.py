"""Product codes in candidates: codebooks of the bundle code base, changes, merges, restarts and shards alike."""

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from retrieval_scene import make_bundle, make_items, make_queries

from services.algorithms.bundles.model_bundle import CODEBOOKS, Bundle, add_files
from services.algorithms.bundles.sealed_files import save_tensors
from services.algorithms.indexes.mutable.snapshot import snapshots
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.scoring.states import QueryStates
from services.candidates.bootstrap import Live, load_catalogue, load_shard_snapshot, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.contracts.shards import Shard
from services.contracts.topics.index_deltas import ItemDelta
from services.offline.training.codebooks.inverted_file import catalogue_codebooks
from services.platform.config import ConfigError

pytest.importorskip("faiss", reason="faiss is an optional extra")

X, NAME = 600, "anisotropic(120)"
WHOLE = f"anisotropic({8 * (X + 200)})"  # a query has at most a tangent for each of the 8 pairs
QUERIES = make_queries(np.random.default_rng(5), 6, 4, 2, 8)


def with_codebooks(bundle: Bundle, scratch: Path) -> Path:
    """The bundle's folder, codebooks of its items in it."""
    codebooks = catalogue_codebooks(bundle.item_states, bundle.pair_gate)
    assert codebooks is not None
    save_tensors(dict(codebooks.arrays), scratch)
    return add_files(bundle.path, {CODEBOOKS: scratch}).path


def live_of(bundle: Path, shard: Shard) -> Live:
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=bundle, algorithms=f"{NAME} {WHOLE}", shard=shard)
    return make_live(settings, load_catalogue(settings), CandidatesMetrics(CollectorRegistry()))


def changes() -> list[ItemDelta]:
    """100 items of the bundle with other states, 100 new ones, and one that goes."""
    states = make_items(np.random.default_rng(6), 200, 4, 2, 8)
    assert states.gate is not None
    names = [*(f"item-{row}" for row in range(0, 300, 3)), *(f"new-{row}" for row in range(100))]
    changed = [
        ItemDelta(item_id=name, components=states.components[row], gate=states.gate[row], model_share=0.5)
        for row, name in enumerate(names)
    ]
    return [*changed, ItemDelta(item_id="item-1", dropped=True)]


def check(catalogue: LiveCatalogue, queries: QueryStates) -> list[tuple[str, ...]]:
    """A pool of everything is exact, a small one holds most of the top 20: its ids."""
    exact = catalogue.index.search(queries, 20, algorithm="truth")
    whole = catalogue.index.search(queries, 20, algorithm=WHOLE)
    assert [list(ids) for ids in whole.item_ids] == [list(ids) for ids in exact.item_ids]
    assert {one.kind for one in whole.certificates} == {"exact"}
    few = catalogue.index.search(queries, 20, algorithm=NAME)
    found = [len({*ids} & {*best}) / 20 for ids, best in zip(few.item_ids, exact.item_ids, strict=True)]
    assert np.mean(found) > 0.9
    return [tuple(ids) for ids in few.item_ids]


@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)], ids=str)
def test_changes_merges_and_a_restart_are_coded_by_the_bundles_codebooks(tmp_path: Path, shard: Shard) -> None:
    bundle = with_codebooks(make_bundle(tmp_path / "bundle", count=X), tmp_path / "codebooks")
    live = live_of(bundle, shard)
    check(live.catalogue, QUERIES)
    live.catalogue.apply(3, [one for one in changes() if shard.holds(one.item_id)], mark="m")
    check(live.catalogue, QUERIES)
    live.catalogue.index.merge()
    merged = check(live.catalogue, QUERIES)
    live.catalogue.capture(written_s=1)(tmp_path / "snapshots")
    again = live_of(bundle, shard)
    model_version = again.catalogue.base.model_version
    again.catalogue.restore(load_shard_snapshot(shard, model_version, snapshots(tmp_path / "snapshots")[0]))
    check(again.catalogue, QUERIES)
    again.catalogue.index.merge()
    assert check(again.catalogue, QUERIES) == merged


def test_a_bundle_without_codebooks_is_refused_with_the_commands_that_write_them(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    with pytest.raises(ConfigError, match="the bundle has none; `freshet train` and `freshet index` write them"):
        live_of(bundle.path, Shard(0, 1))

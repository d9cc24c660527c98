"""Product codes in candidates: codebooks of the bundle code base, changes, merges, restarts and shards alike."""

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from retrieval_scene import make_bundle, make_items, make_queries
from structlog.testing import capture_logs

from services.algorithms.bundles.model_bundle import CODEBOOKS, Bundle
from services.algorithms.indexes.mutable.snapshot import snapshots
from services.algorithms.indexes.mutable.version import Answer
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.scoring.states import QueryStates
from services.candidates.bootstrap import Live, load_catalogue, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.contracts.shards import Shard
from services.contracts.topics.index_deltas import ItemDelta
from services.offline.bundles.folders import save_tensors
from services.offline.bundles.model import add_files
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


def live_of(bundle: Path, shard: Shard, snapshots: Path | str = "") -> Live:
    settings = CandidatesSettings(
        port=0, metrics_port=0, bundle=bundle, algorithms=f"{NAME} {WHOLE}", shard=shard, snapshots=str(snapshots)
    )
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


def check(catalogue: LiveCatalogue, queries: QueryStates) -> Answer:
    """A pool of everything is exact, a small one holds most of the top 20, and is returned."""
    exact = catalogue.index.version.search(queries, 20, algorithm="truth")
    whole = catalogue.index.version.search(queries, 20, algorithm=WHOLE)
    assert [list(ids) for ids in whole.item_ids] == [list(ids) for ids in exact.item_ids]
    assert {one.kind for one in whole.certificates} == {"exact"}
    few = catalogue.index.version.search(queries, 20, algorithm=NAME)
    found = [len({*ids} & {*best}) / 20 for ids, best in zip(few.item_ids, exact.item_ids, strict=True)]
    assert np.mean(found) > 0.9
    return few


def assert_equal(found: Answer, wanted: Answer) -> None:
    assert found.item_ids == wanted.item_ids
    assert found.scores.tobytes() == wanted.scores.tobytes()
    assert found.certificates == wanted.certificates


@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)], ids=str)
def test_changes_merges_and_restarts_are_coded_by_the_bundles_codebooks(
    tmp_path: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = with_codebooks(make_bundle(tmp_path / "bundle", count=X), tmp_path / "codebooks")
    root = tmp_path / "snapshots"
    live = live_of(bundle, shard, root)
    folder = root if shard.is_all else root / "shard-1-of-2"
    check(live.catalogue, QUERIES)
    live.catalogue.apply(3, [one for one in changes() if shard.holds(one.item_id)], mark="m")
    check(live.catalogue, QUERIES)
    live.catalogue.index.merge()
    merged = check(live.catalogue, QUERIES)
    live.catalogue.capture(written_s=round(time.time()))(folder)

    coded = Codebooks.coded
    monkeypatch.setattr(Codebooks, "coded", None)  # a restart codes nothing
    again = live_of(bundle, shard, root)
    assert again.catalogue.served.name == live.catalogue.served.name
    assert_equal(check(again.catalogue, QUERIES), merged)

    # With a delta behind the coded items, and coded items that died.
    later = [replace(one, item_id=f"later-{row}") for row, one in enumerate(changes()[:30])]
    dead = [ItemDelta(item_id=f"new-{row}", dropped=True) for row in range(20)]
    again.catalogue.apply(4, [one for one in (*later, *dead) if shard.holds(one.item_id)], mark="n")
    held = again.catalogue.index.version.search(QUERIES, 20, algorithm=WHOLE)
    again.catalogue.capture(written_s=round(time.time()))(folder)
    third = live_of(bundle, shard, root)
    check(third.catalogue, QUERIES)
    assert_equal(third.catalogue.index.version.search(QUERIES, 20, algorithm=WHOLE), held)
    assert third.catalogue.served.name == again.catalogue.served.name
    monkeypatch.setattr(Codebooks, "coded", coded)
    again.catalogue.index.merge()
    third.catalogue.index.merge()
    assert_equal(check(third.catalogue, QUERIES), check(again.catalogue, QUERIES))


def test_codes_of_other_codebooks_are_refused_by_name_and_made(tmp_path: Path) -> None:
    one = make_bundle(tmp_path / "bundle", count=X)
    bundle, root = with_codebooks(one, tmp_path / "codebooks"), tmp_path / "snapshots"
    live_of(bundle, Shard(0, 1), root).catalogue.capture(written_s=round(time.time()))(root)
    others = catalogue_codebooks(one.item_states, one.pair_gate, seed=1)
    assert others is not None
    (bundle / CODEBOOKS).unlink()
    save_tensors(dict(others.arrays), tmp_path / "others")
    add_files(bundle, {CODEBOOKS: tmp_path / "others"})
    with capture_logs() as logs:
        live = live_of(bundle, Shard(0, 1), root)
    (said,) = [log for log in logs if log["event"] == "codes_refused"]
    assert said["path"] == str(snapshots(root)[0] / "codes.safetensors")
    assert re.fullmatch(
        r"codes of anisotropic-slopes, product-\w+, seed 0; allowed: anisotropic-slopes, product-\w+, seed 0",
        said["reason"],
    )
    check(live.catalogue, QUERIES)
    # They are written at the first occasion, for the next start.
    assert live.snapshots is not None
    live.snapshots.look(0)
    live.snapshots.close()
    with capture_logs() as logs:
        live_of(bundle, Shard(0, 1), root)
    assert [log["event"] for log in logs if log["event"].startswith("codes_")] == ["codes_taken"]


def test_a_bundle_without_codebooks_is_refused_with_the_commands_that_write_them(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    with pytest.raises(ConfigError, match="the bundle has none; `freshet train` and `freshet index` write them"):
        live_of(bundle.path, Shard(0, 1))

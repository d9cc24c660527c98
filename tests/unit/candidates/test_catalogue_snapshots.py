"""Snapshots beside a followed topic: where a late follower begins, what it refuses, that it ends where others are."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.stream import MemoryTopics
from prometheus_client import CollectorRegistry
from retrieval_scene import make_items, make_pair_gate
from structlog.testing import capture_logs

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable.lookup import find_items
from services.algorithms.indexes.mutable.snapshot import SnapshotError, load_snapshot, snapshots
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.candidates.bootstrap import load_shard_snapshot
from services.catalogue.changes import CatalogueChanges, CatalogueMetrics
from services.catalogue.follower import CatalogueFollower
from services.catalogue.snapshots import MAX_AGE_S, CatalogueSnapshots, started
from services.contracts.shards import Shard
from services.contracts.topics.index_deltas import INDEX_DELTAS, IndexDelta, ItemDelta, encode
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item

MODEL, IDS = "m1", [f"i{row}" for row in range(6)]
STATES = make_items(np.random.default_rng(0), len(IDS), 2, 6, 4)
GATE = make_pair_gate(np.random.default_rng(1), 12, 3)
BASE = Catalogue(
    model_version=MODEL, item_ids=IDS, titles=IDS, categories=[()] * len(IDS), states=STATES, pair_gate=GATE
)


class Process:
    """A late follower of the world's topics, with the snapshots below its folder."""

    def __init__(self, world: "World") -> None:
        build = lambda items: {"brute_force": BruteForce(items)}  # noqa: E731
        self.catalogue, taken = started(
            lambda snapshot: LiveCatalogue(BASE, build=build, snapshot=snapshot), world.root, found=snapshots,
            load=partial(load_snapshot, model_version=MODEL, base=BASE.batch),
        )  # fmt: skip
        self.registry = CollectorRegistry()
        self.snapshots = CatalogueSnapshots(
            self.catalogue, world.root, taken=taken, every_s=60, clock=lambda: world.now_s
        )
        changes = CatalogueChanges(self.catalogue, CatalogueMetrics("test", self.registry))
        self.follower = CatalogueFollower(
            world.topics.reader(), changes, model_version=MODEL, snapshots=self.snapshots, poll_s=0.0, backoff_s=0.001
        )
        self.follower.step()

    @property
    def num_applied(self) -> float:
        counted = (
            self.registry.get_sample_value("freshet_test_changes_total", {"kind": kind}) or 0
            for kind in ("item", "dropped_item")
        )
        return sum(counted)

    def content(self) -> dict[str, tuple[bytes, float, int]]:
        """State, lambda and evidence of every item that is served."""
        found = find_items(self.catalogue.served.version, [*IDS, "new", "other"])
        explained = {item_id: self.catalogue.explain(item_id) for item_id in found.item_ids}
        return {
            item_id: (one.state.components.tobytes(), one.model_share, one.num_interactions)
            for item_id, one in explained.items()
            if one is not None
        }


class World:
    def __init__(self, root: Path) -> None:
        self.root, self.now_s = root, 1_000.0
        self.topics = MemoryTopics({INDEX_DELTAS: 1, ITEMS: 1})
        self._batch = 0

    def delta(self, item_id: str, *, dropped: bool = False, last: bool = True, writer: int = 0) -> None:
        self._batch += last
        state = make_items(np.random.default_rng(self._batch + 10), 1, 2, 6, 4)
        assert state.gate is not None
        change = ItemDelta(
            item_id=item_id, components=state.components[0], gate=state.gate[0], model_share=0.5,
            num_interactions=self._batch,
        )  # fmt: skip
        one = IndexDelta(
            model_version=MODEL, partition=writer, offset=self._batch, batch=self._batch, last_of_batch=last,
            newest_recorded_ms=1_700_000_000_000 + self._batch,
            change=ItemDelta(item_id=item_id, dropped=True) if dropped else change,
        )  # fmt: skip
        self.topics.write(INDEX_DELTAS, one.key, encode(one))

    def put(self, item_id: str, *, available: bool) -> None:
        value = encode_item(CatalogueItem(item_id=item_id, available=available))
        self.topics.write(ITEMS, item_id.encode(), value)

    def snapshot(self) -> Path:
        """By a process that has read everything."""
        process = Process(self)
        self.now_s += 61
        process.follower.step()
        process.snapshots.close()
        return snapshots(self.root)[0]


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    for item_id in ("i1", "i2", "new", "i3", "i4"):
        world.delta(item_id)
    world.delta("i4", dropped=True)
    world.put("i3", available=False)
    return world


def fresh(world: World) -> Process:
    """A process that reads everything."""
    elsewhere, world.root = world.root, world.root / "none"
    process, world.root = Process(world), elsewhere
    return process


def test_a_late_follower_begins_at_the_snapshot_and_ends_where_one_from_zero_does(world: World) -> None:
    world.snapshot()
    world.delta("i5")
    late, zero = Process(world), fresh(world)
    assert (late.num_applied, zero.num_applied) == (1, 6)
    assert late.content() == zero.content()
    assert late.catalogue.served.name == zero.catalogue.served.name
    # What was not available when the snapshot was made comes back with what it had learnt.
    world.put("i3", available=True)
    for process in (late, zero):
        process.follower.step()
    assert "i3" in late.content()
    assert late.content() == zero.content()


def test_a_version_of_a_snapshot_has_its_name(world: World) -> None:
    world.snapshot()
    late, zero = Process(world), fresh(world)
    assert late.num_applied == 0
    assert late.catalogue.served.name == zero.catalogue.served.name
    assert late.catalogue.served.newest_recorded_ms == zero.catalogue.served.newest_recorded_ms
    assert late.content() == zero.content()


def test_none_is_written_while_a_batch_is_open(world: World) -> None:
    world.delta("i1", last=False, writer=1)
    process = Process(world)
    world.now_s += 61
    process.follower.step()
    process.snapshots.close()
    assert snapshots(world.root) == []


def test_what_was_dropped_meanwhile_goes_even_where_its_record_is_gone(world: World) -> None:
    world.snapshot()
    for item_id in ("new", "i1"):
        world.delta(item_id, dropped=True)
        world.topics.write(INDEX_DELTAS, f"{MODEL}/item/{item_id}".encode(), None)
    world.topics._gone |= {(INDEX_DELTAS, 0, 6), (INDEX_DELTAS, 0, 8)}
    late = Process(world)
    assert "new" not in late.content()
    assert late.content() == fresh(world).content()


def damaged(path: Path) -> None:
    data = bytearray((path / "item_states.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "item_states.safetensors").write_bytes(data)


def torn(path: Path) -> None:
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:-20])


@pytest.mark.parametrize(
    ("change", "names"), [(damaged, "item_states.safetensors has sha256"), (torn, "manifest.json")]
)
def test_a_changed_snapshot_is_refused_by_name_and_the_one_before_is_taken(
    world: World, change: Callable[[Path], None], names: str
) -> None:
    first = world.snapshot()
    world.delta("i5")
    change(world.snapshot())
    with capture_logs() as logs:
        late = Process(world)
    assert [names in one["reason"] for one in logs if one["event"] == "snapshot_refused"] == [True]
    assert late.num_applied == 1
    assert late.content() == fresh(world).content()
    change(first)
    with capture_logs():
        assert Process(world).num_applied == 6


def test_a_topic_made_anew_is_read_from_its_start(world: World) -> None:
    world.snapshot()
    world.topics.logs[INDEX_DELTAS][0].clear()
    for row in range(9):
        world.delta(f"i{row % 3}")
    late = Process(world)
    assert late.num_applied == 3
    assert late.content() == fresh(world).content()


def test_one_whose_record_compaction_took_and_one_that_is_too_old_are_passed_over(world: World) -> None:
    world.snapshot()
    world.now_s += MAX_AGE_S + 1
    assert Process(world).num_applied == 5
    world.now_s -= MAX_AGE_S + 1
    assert Process(world).num_applied == 0
    world.delta("i4", dropped=True)
    world.topics.compact(INDEX_DELTAS)
    late = Process(world)
    assert late.num_applied == 5
    assert late.content() == fresh(world).content()


def test_who_reads_nothing_new_writes_none(world: World) -> None:
    path = world.snapshot()
    process = Process(world)
    for expected in (2, 2):
        world.now_s += 61
        process.follower.step()
        process.snapshots.close()
        assert len(snapshots(world.root)) == expected
    assert path in snapshots(world.root)


@pytest.mark.parametrize(
    "change",
    [
        *({"written_s": None}, {"written_s": "now"}, {"position": "4"}, {"position": None}, {"mark": 7}),
        *({"aside": "i1"}, {"aside": [1]}, {"aside": ["x", "y"]}, {"newest_recorded_ms": "1"}),
    ],
)
def test_a_whole_snapshot_that_says_other_things_is_refused_and_the_topic_read(
    world: World, change: dict[str, Any]
) -> None:
    path = world.snapshot() / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["checksum"]
    raw["said"] |= change
    raw["checksum"] = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(raw))
    with capture_logs() as logs:
        late = Process(world)
    assert [one["path"] for one in logs if one["event"] == "snapshot_refused"] == [str(path.parent)]
    assert late.content() == fresh(world).content()


def test_a_snapshot_of_another_shard_is_refused_by_name(world: World) -> None:
    path = world.snapshot()
    shard = Shard(0, 2)
    assert not all(map(shard.holds, IDS))
    with pytest.raises(SnapshotError, match=r"is not of shard 0/2, which this process holds"):
        load_shard_snapshot(shard, BASE, path)
    assert len(load_shard_snapshot(Shard(0, 1), BASE, path).items) == len(IDS)


def test_unchanged_items_are_snapshotted_without_their_states(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.delta("i1")
    world.delta("i1", dropped=True)
    assert (world.snapshot() / "item_states.safetensors").exists()
    unchanged = World(tmp_path / "unchanged")
    path = unchanged.snapshot()
    assert not (path / "item_states.safetensors").exists()
    late, zero = Process(unchanged), fresh(unchanged)
    assert late.catalogue.index.version.main.segment.rows.states.components.base is STATES.components
    assert late.content() == zero.content()
    unchanged.delta("i5")
    for process in (late, zero):
        process.follower.step()
    assert late.content() == zero.content()


def test_states_that_the_bundle_should_have_are_refused_for_other_items(tmp_path: Path) -> None:
    path = World(tmp_path).snapshot()
    others = replace(BASE, version=BASE.index_version, item_ids=[*IDS[1:], IDS[0]])
    for base in (None, others.batch):
        with pytest.raises(SnapshotError, match="the bundle's states of 6 items; this process has other items"):
            load_snapshot(path, model_version=MODEL, base=base)
    assert load_shard_snapshot(Shard(0, 1), BASE, path).items.states is BASE.states

"""Searches on a card while 1,000 items a second change: a large segment there, the delta on the CPU, merges beside.

It needs the compiled kernels of a processor, too: `python deploy/build_kernels.py mol_scores top_rows`. At the end the
card's answers are compared with those of `BruteForce` over the same version.
"""

# ruff: noqa: T201
import argparse
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

import tests.gpu.bare  # noqa: F401 - before what imports the packages that it stands in for
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import Algorithm, make_card_index
from services.algorithms.indexes.card_passes import CardPasses
from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import Build, MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.protocol import Index, take_queries
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.device import DeviceScorer
from services.algorithms.scoring.states import ItemStates
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import Scene, shape_named

_K = 100
_BATCHES_PER_SECOND = 20
_TRUTH = "truth"
_ALGORITHMS = (Algorithm("exact", ()), Algorithm("top_k_avg", (4000,)))


def build_on(device: str) -> Build:
    """The algorithms over one copy of the states on the device, and the CPU's truth."""

    def build(items: MolScorer) -> Mapping[str, Index]:
        states = ItemStates(components=items.components, gate=items.item_gate)
        passes = CardPasses(DeviceScorer(states, items.pair_gate, device=torch.device(device)))
        built = {one.name: make_card_index(one, passes) for one in _ALGORITHMS}
        return {**built, _TRUTH: BruteForce(items)}

    return build


class Changes(threading.Thread):
    """Replaces `rate` items a second until it is stopped; `error` says why it ended early."""

    def __init__(self, index: MutableIndex, scene: Scene, ids: list[str], rate: int) -> None:
        super().__init__(daemon=True)
        self._index, self._items, self._ids = index, scene.items, ids
        self._size, self.ended, self.done, self.spent = rate // _BATCHES_PER_SECOND, threading.Event(), 0, 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        rng, started, batches = np.random.default_rng(1), time.perf_counter(), 0
        try:
            while not self.ended.wait(max(0.0, started + batches / _BATCHES_PER_SECOND - time.perf_counter())):
                rows = rng.choice(len(self._ids), self._size, replace=False)
                states = rng.permutation(rows)  # every item gets another's state
                gate = None if self._items.gate is None else self._items.gate[states]
                batch = ItemStates(components=self._items.components[states], gate=gate)
                began = time.perf_counter()
                self._index.apply(upserts=ItemBatch(item_ids=[self._ids[row] for row in rows], states=batch))
                self.spent += time.perf_counter() - began
                batches, self.done = batches + 1, self.done + self._size
        except BaseException as error:
            self.error = error


def searched(index: MutableIndex, scene: Scene, batch: int, algorithm: str, seconds: float) -> str:
    """Searches one after the other for some seconds: how many, and milliseconds by quantile."""
    wall, groups, until = [], len(scene.queries) // batch, time.perf_counter() + seconds
    while time.perf_counter() < until or not wall:
        start = len(wall) % groups * batch
        began = time.perf_counter()
        index.version.search(take_queries(scene.queries, start, start + batch), _K, algorithm=algorithm)
        wall.append(1e3 * (time.perf_counter() - began))
    median, p95, p99 = np.quantile(wall, (0.5, 0.95, 0.99))
    return f"{len(wall)} searches, median {median:.2f} ms, p95 {p95:.2f}, p99 {p99:.2f}, most {max(wall):.1f}"


def wrong_answers(index: MutableIndex, scene: Scene) -> int:
    """Of 8 queries, those whose exact answer on the card is not the CPU's, in one version."""
    version, queries = index.version, take_queries(scene.queries, 0, 8)
    found, truth = (version.search(queries, _K, algorithm=name) for name in ("exact", _TRUTH))
    same = [a == b for a, b in zip(found.item_ids, truth.item_ids, strict=True)]
    exact = [one.kind == "exact" for one in found.certificates]
    return sum(not (ids and proof) for ids, proof in zip(same, exact, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="books")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rate", type=int, default=1_000, help="changes a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options = parser.parse_args()
    shape = shape_named(options.shape)
    if options.device == "cpu":
        shape = replace(shape, num_items=min(shape.num_items, 9_000))
    scene = generate(shape, num_queries=64, seed=0)
    ids = [f"{row:07d}" for row in range(len(scene.items))]
    items, build, began = ItemBatch(item_ids=ids, states=scene.items), build_on(options.device), time.perf_counter()
    index = MutableIndex(items, scene.pair_gate, model_version="generated", build=build)
    print(f"{options.shape}: {len(ids)} items, built in {time.perf_counter() - began:.1f} s", flush=True)
    measurements = [(name, batch) for name in ("exact", "top_k_avg") for batch in (32, 1)]
    for name, batch in measurements:
        print(f"SUMMARY still     {name} B={batch}: {searched(index, scene, batch, name, options.seconds)}", flush=True)
    changes = Changes(index, scene, ids, options.rate)
    changes.start()
    with BackgroundMerge(index) as merging:
        for name, batch in measurements:
            text = searched(index, scene, batch, name, options.seconds)
            size = index.num_items, len(index.version.blocks), index.memory.delta >> 20
            print(f"SUMMARY {options.rate}/s {name} B={batch}: {text} (items, blocks, MB of delta {size})", flush=True)
        changes.ended.set()
        changes.join()
    each = 1e6 * changes.spent / max(1, changes.done)
    merges = f"{merging.merges} merges in {merging.seconds:.1f} s"
    print(f"SUMMARY {changes.done} changes, {each:.0f} us each; {merges}; {changes.error!r}")
    print(f"SUMMARY wrong exact answers of 8 after all changes: {wrong_answers(index, scene)}", flush=True)


if __name__ == "__main__":
    main()

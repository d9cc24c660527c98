"""The mutable index against a naive dictionary: 22,000 random operations, restarts from snapshots among them."""

from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from mutable_scene import CATEGORIES, KINDS, MODEL, Build, Oracle, States, restore

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.mutable import index as mutable
from services.algorithms.indexes.mutable.index import MutableIndex, only
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.snapshot import load_snapshot, write_snapshot
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.native.threads import compute_threads, set_compute_threads
from services.algorithms.rules.attributes import Comparison, Condition
from services.algorithms.rules.filters import ItemFilter

SEED = 20261121
IDS = [f"item-{number}" for number in range(700)] + ["å", "日本", "Z" * 128, "item-1 "]


def whole_pool(scorer):
    return TopKAvg(scorer, pool_size=10**6)


class Run:
    """One index, its oracle, and random operations on both."""

    names = ("upsert", "remove", "both", "search", "filter", "hold", "merge", "tidy", "bulk", "restart")
    ends = tuple(np.cumsum([0.57, 0.27, 0.099, 0.03, 0.02, 0.005, 0.002, 0.002, 0.0015]).tolist())

    def __init__(self, states: States, build: Build, seed: int, folder: Path) -> None:
        self.rng = np.random.default_rng(seed)
        self.states, self.build, self.folder = states, build, folder
        self.oracle = Oracle(IDS, states)
        self.index = MutableIndex(
            ItemBatch(item_ids=[], states=states.of([]), attributes=AttributeTable.of(KINDS, [])),
            states.pair_gate,
            model_version=MODEL,
            build=only(build),
        )
        self.held: tuple[Version, Oracle] | None = None
        self.counts: dict[str, int] = {}

    def step(self) -> None:
        name = self.names[bisect(self.ends, self.rng.random())]
        self.counts[name] = self.counts.get(name, 0) + 1
        getattr(self, name)()

    def some_ids(self, most: int) -> list[str]:
        return [IDS[place] for place in self.rng.choice(len(IDS), size=self.rng.integers(1, most + 1), replace=False)]

    def batch(self, item_ids: list[str]) -> tuple[ItemBatch, np.ndarray]:
        numbers = self.rng.integers(len(self.states), size=len(item_ids))
        categories = None
        if self.rng.random() < 0.7:
            categories = [[name for name in CATEGORIES if self.rng.random() < 0.3] for _ in item_ids]
        attributes = None
        if self.rng.random() < 0.7:
            attributes = AttributeTable.of(KINDS, [self.values() for _ in item_ids])
        states = self.states.of(numbers)
        return ItemBatch(item_ids=item_ids, states=states, categories=categories, attributes=attributes), numbers

    def values(self) -> dict[str, float | str]:
        price, language = self.rng.integers(5), self.rng.integers(4)
        return {
            **({"price": float(price)} if price else {}),
            **({"language": "xab"[language - 1]} if language else {}),
        }

    def upsert(self, most: int = 6) -> None:
        batch, numbers = self.batch(self.some_ids(most))
        known = sum(self.oracle.state[self.oracle.place[item_id]] >= 0 for item_id in batch.item_ids)
        change = self.index.apply(upserts=batch)
        self.oracle.upsert(batch, numbers)
        assert (change.added, change.updated) == (len(batch) - known, known)

    def bulk(self) -> None:
        self.upsert(most=len(IDS))

    def remove(self) -> None:
        item_ids = self.some_ids(6)
        change = self.index.apply(removals=item_ids)
        assert list(change.unknown) == self.oracle.remove(item_ids)
        assert change.removed == len(item_ids) - len(change.unknown)

    def both(self) -> None:
        item_ids = self.some_ids(6)
        batch, numbers = self.batch(item_ids[: len(item_ids) // 2])
        self.index.apply(upserts=batch if len(batch) else None, removals=item_ids[len(batch) :])
        self.oracle.upsert(batch, numbers)
        self.oracle.remove(item_ids[len(batch) :])

    def search(self) -> None:
        self.check(self.index.version, self.oracle, int(self.rng.choice([1, 3, 10, 2000])), None)

    def filter(self) -> None:
        wanted = ItemFilter(
            allow_item_ids=self.some_ids(60) if self.rng.random() < 0.3 else (),
            deny_item_ids=[*self.some_ids(60), "unknown"],
            allow_categories=[*self.rng.choice(CATEGORIES, size=2), "unknown"] if self.rng.random() < 0.5 else (),
            deny_categories=self.rng.choice(CATEGORIES, size=1).tolist() if self.rng.random() < 0.5 else (),
            where=[
                Condition("price", Comparison.AT_MOST, (float(self.rng.integers(1, 5)),)),
                Condition("language", Comparison.NONE_OF, ("a", "unknown")),
            ][: self.rng.integers(3)],
            seen_item_ids=self.some_ids(60),
            exclude_seen=bool(self.rng.random() < 0.5),
        )
        self.check(self.index.version, self.oracle, 10, wanted)

    def hold(self) -> None:
        """What a reader held on to still answers as it did then."""
        if self.held is not None:
            self.check(*self.held, 10, None)
        self.held = (self.index.version, self.oracle.copy())

    def merge(self) -> None:
        """Changes arrive between the slices of a merge."""
        self._merge(self.index.merge)

    def tidy(self) -> None:
        """The delta becomes one block that is searched as the main segment is."""
        with patch.object(mutable, "CODED_ROWS", 1), patch.object(mutable, "MERGE_ROWS", 10**9):
            self._merge(self.index.tidy)

    def _merge(self, merge: Callable[[Callable[[], None]], None]) -> None:
        before = self.index.version.name
        arrivals = iter(range(20))

        def change() -> None:
            if next(arrivals, None) is not None and self.rng.random() < 0.5:
                self.remove() if self.rng.random() < 0.3 else self.upsert()

        merge(change if self.rng.random() < 0.8 else lambda: None)
        if next(arrivals, None) == 0:
            assert self.index.version.name == before

    def restart(self) -> None:
        snapshot = load_snapshot(write_snapshot(self.folder, self.index), model_version=MODEL)
        assert snapshot.index_version == self.index.version.name
        ids = snapshot.items.item_ids
        values = [self.oracle.attributes[self.oracle.place[item_id]] for item_id in ids]
        items = replace(snapshot.items, attributes=AttributeTable.of(KINDS, values))
        self.index = restore(replace(snapshot, items=items), self.states.pair_gate, build=only(self.build))
        assert self.index.version.name == snapshot.index_version

    def check(self, version: Version, oracle: Oracle, k: int, wanted: ItemFilter | None) -> None:
        assert version.num_items == len(oracle)
        numbers = self.rng.integers(len(self.states.queries), size=self.rng.integers(1, 4)).tolist()
        queries = self.states.query(numbers)
        answer = version.search(queries, k, wanted)
        for place, query in enumerate(numbers):
            ids, scores = oracle.top(query, k, wanted)
            assert answer.certificates[place].kind == "exact"
            assert list(answer.item_ids[place]) == ids
            assert np.abs(answer.scores[place, : len(ids)] - scores).max(initial=0) < 1e-10
            assert (answer.scores[place, len(ids) :] == -np.inf).all()


@pytest.fixture(autouse=True)
def one_compute_thread():
    """Threads only wait for each other on catalogues this small."""
    threads = compute_threads()
    set_compute_threads(1)
    yield
    set_compute_threads(threads)


@pytest.mark.parametrize(
    ("build", "shape", "operations"),
    [
        (BruteForce, (2, 2, 6), 6_000),
        (BruteForce, (1, 1, 8), 4_000),
        (whole_pool, (2, 3, 5), 4_000),
        (Exact, (2, 2, 6), 4_000),
        (Quantized, (1, 1, 8), 4_000),
    ],
    ids=["brute-force", "dot-product", "top-k-avg-all", "exact", "quantized-exact"],
)
def test_random_operations_leave_what_a_dictionary_would_hold(build, shape, operations, tmp_path) -> None:
    p_q, p_x, d = shape
    print(f"seed {SEED}")  # noqa: T201 - a failing run says how to repeat it
    run = Run(States(np.random.default_rng(SEED), p_q=p_q, p_x=p_x, d=d), build, SEED, tmp_path)
    for _ in range(operations):
        run.step()
    assert sum(run.counts.values()) == operations
    assert set(run.counts) == set(run.names)

"""Searches of a large catalogue while a thousand of its items change per second."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import MERGE_SHARE, MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.protocol import Index
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.evaluation.common.timing import Times

RATE = 1_000
_BATCH, _PAUSE_S, _NOISE = 20, 0.01, 0.02
_BULK = 4_096
_TRUTH = "brute_force"


@dataclass(frozen=True, slots=True)
class Changing:
    """Search times before and during changes, changed items per second, and final recall of brute force's top K."""

    before: Times
    while_changing: Times
    applied_per_s: float
    recall: float


def searched_while_changing(
    catalogue: Bundle, asked: QueryStates, algorithm: str, k: int, *, seconds: float, seed: int
) -> Changing:
    """Search without changes, apply half as many changes as trigger a merge, then search during changes.

    The last step takes `seconds`. It searches about every ten milliseconds, and changes 1,000 items per second, 20 at
    a time.
    Raises: ValueError for an unknown algorithm.
    """
    wanted = parse_algorithm(algorithm)

    def build(scorer: MolScorer) -> Mapping[str, Index]:
        index = make_index(wanted, scorer, codebooks=catalogue.codebooks)
        return {algorithm: index, _TRUTH: BruteForce(scorer)}

    items = ItemBatch(item_ids=catalogue.item_ids, states=catalogue.item_states, categories=catalogue.categories)
    index = MutableIndex(
        items,
        catalogue.pair_gate,
        model_version=catalogue.model_version,
        build=build,
    )
    changes = _Changes(items, np.random.default_rng(seed))
    each = [asked.take([number]) for number in range(len(asked))]
    quiet = _searched(index, each, k, seconds / 4)
    for _ in range(0, int(MERGE_SHARE / 2 * catalogue.num_items), _BULK):
        index.apply(upserts=changes.some(min(_BULK, catalogue.num_items)))
    index.tidy()
    stop = threading.Event()
    applied = 0

    def change() -> None:
        nonlocal applied
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            index.apply(upserts=changes.some(_BATCH))
            applied += _BATCH
            due += _BATCH / RATE

    writer = threading.Thread(target=change, name="changes")
    with BackgroundMerge(index):
        began = time.monotonic()
        writer.start()
        busy = _searched(index, each, k, seconds)
        stop.set()
        writer.join()
        took = time.monotonic() - began
    return Changing(quiet, busy, applied / took, _recall(index, asked, k))


def _recall(index: MutableIndex, asked: QueryStates, k: int) -> float:
    version = index.version
    shares = []
    for number in range(len(asked)):
        query = asked.take([number])
        found = version.search(query, k, None).item_ids[0]
        best = version.search(query, k, None, _TRUTH).item_ids[0]
        shares.append(len(set(found).intersection(best)) / k)
    return float(np.mean(shares))


def _searched(index: MutableIndex, each: list[QueryStates], k: int, seconds: float) -> Times:
    times, end, number = Times(), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        query = each[number % len(each)]
        if number < len(each):
            index.version.search(query, k)
        else:
            times.call(lambda one: index.version.search(one, k), query)
        number += 1
        time.sleep(_PAUSE_S)
    return times


class _Changes:
    def __init__(self, items: ItemBatch, generator: np.random.Generator) -> None:
        self._items, self._generator = items, generator

    def some(self, count: int) -> ItemBatch:
        states = self._items.states
        rows = np.sort(self._generator.choice(len(states), count, replace=False, shuffle=False))
        components = states.components[rows]
        components = components + _NOISE * self._generator.standard_normal(components.shape, dtype=np.float32)
        components /= np.linalg.norm(components, axis=-1, keepdims=True)
        return ItemBatch(
            item_ids=self._items.ids.strings.take(rows),
            states=ItemStates(components=components, gate=None if states.gate is None else states.gate[rows]),
        )

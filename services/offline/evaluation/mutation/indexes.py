"""What the mutation benchmark measures: the mutable index, and FAISS and hnswlib doing the same under a lock.

FAISS and hnswlib let nobody search while something is written, so one lock stands around each call, as a service would
do it. Both get the threads and the batches of changes that the mutable index gets.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import MutableIndex, only
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Subject(Protocol):
    """An index over item numbers whose states are numbers in a pool."""

    def search(self, query: int, k: int) -> tuple[list[int], int]:
        """Item numbers, best first, and how many batches of changes they reflect."""

    def apply(self, items: Sequence[int], states: Sequence[int], removed: Sequence[int]) -> int:
        """Write and remove some items as one batch; how many batches there were, as `search` counts them."""

    @property
    def nbytes(self) -> int:
        """Bytes held at this moment."""

    def close(self) -> dict[str, float]:
        """Stop; say what else was measured."""


Start = Callable[[IntArray, IntArray], Subject]  # items and the state of each -> a running index


class Mutable:
    """The mutable index, merged in the background."""

    def __init__(
        self,
        algorithm: str,
        pool: ItemStates,
        queries: QueryStates,
        gate: PairGate | None,
        held: tuple[IntArray, IntArray],
    ) -> None:
        self._pool, self._queries = pool, queries
        wanted = parse_algorithm(algorithm)
        self.index = MutableIndex(
            ItemBatch(item_ids=[_name(item) for item in held[0].tolist()], states=_states(pool, held[1])),
            gate,
            model_version="benchmark",
            build=only(lambda scorer, _: make_index(wanted, scorer, np.arange(scorer.num_items))),
        )
        self._merging = BackgroundMerge(self.index)
        self._merging.start()
        self._most_bytes = self._answered = self._proven = self._touched = 0

    def search(self, query: int, k: int) -> tuple[list[int], int]:
        one = slice(query, query + 1)
        gate = None if self._queries.gate is None else self._queries.gate[one]
        answer = self.index.search(QueryStates(components=self._queries.components[one], gate=gate), k)
        self._answered += 1
        self._proven += answer.certificates[0].kind == "exact"
        self._touched += sum(int(step.touched[0]) for step in answer.passes)
        return [int(item_id) for item_id in answer.item_ids[0]], _number(answer.version)

    def apply(self, items: Sequence[int], states: Sequence[int], removed: Sequence[int]) -> int:
        upserts = ItemBatch(item_ids=[_name(item) for item in items], states=_states(self._pool, states))
        change = self.index.apply(upserts=upserts if items else None, removals=[_name(item) for item in removed])
        return _number(change.version)

    @property
    def nbytes(self) -> int:
        memory = self.index.memory
        self._most_bytes = max(self._most_bytes, memory.total)
        return memory.total

    def close(self) -> dict[str, float]:
        self._merging.close()
        return {
            "merges": self._merging.merges,
            "merge_seconds": self._merging.seconds,
            "peak_bytes": self._most_bytes,
            "exact": self._proven / max(1, self._answered),
            "touched": self._touched / max(1, self._answered),
        }


class _Locked:
    """What FAISS and hnswlib share: vectors of a pool, a lock, and a count of batches."""

    def __init__(self, pool: ItemStates, queries: QueryStates) -> None:
        self._vectors = np.ascontiguousarray(pool.components[:, 0])
        self._queries = np.ascontiguousarray(queries.components[:, 0])
        self._lock = threading.Lock()
        self._batches = 0

    def close(self) -> dict[str, float]:
        return {}


class Faiss(_Locked):
    """FAISS by its own ids: flat, or IVF with a hash table from id to place so that removing needs no scan."""

    def __init__(
        self, kind: str, pool: ItemStates, queries: QueryStates, held: tuple[IntArray, IntArray], *, threads: int
    ) -> None:
        super().__init__(pool, queries)
        import faiss

        faiss.omp_set_num_threads(threads)
        self._faiss: Any = faiss
        width = int(self._vectors.shape[1])
        self._index: Any
        if kind == "flat":
            self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(width))
            self._bytes_per_item = 4 * width + 8
        else:
            cells = max(16, round(len(held[0]) ** 0.5))
            self._index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
            self._index.train(self._vectors[held[1]])
            self._index.set_direct_map_type(self._faiss.DirectMap.Hashtable)
            self._index.nprobe = max(1, cells // 4)
            self._bytes_per_item = 4 * width + 8 + 32
        self._index.add_with_ids(self._vectors[held[1]], held[0])

    def search(self, query: int, k: int) -> tuple[list[int], int]:
        with self._lock:
            _, found = self._index.search(self._queries[query : query + 1], k)
            batches = self._batches
        return [int(item) for item in found[0] if item >= 0], batches

    def apply(self, items: Sequence[int], states: Sequence[int], removed: Sequence[int]) -> int:
        gone = np.array([*items, *removed], dtype=np.int64)
        with self._lock:
            # A batch selector keeps a Bloom filter and a set; IVF's direct map takes the array selector only.
            flat = isinstance(self._index, self._faiss.IndexIDMap2)
            self._index.remove_ids(self._faiss.IDSelectorBatch(gone) if flat else self._faiss.IDSelectorArray(gone))
            if items:
                self._index.add_with_ids(self._vectors[list(states)], np.array(items, dtype=np.int64))
            self._batches += 1
            return self._batches

    @property
    def nbytes(self) -> int:
        items: int = self._index.ntotal
        return items * self._bytes_per_item


class Hnsw(_Locked):
    """hnswlib: an update moves a point, a removal marks it, an insert takes a marked one's place under a new label."""

    def __init__(
        self, pool: ItemStates, queries: QueryStates, held: tuple[IntArray, IntArray], *, threads: int, ef: int
    ) -> None:
        super().__init__(pool, queries)
        import hnswlib

        self._index: Any = hnswlib.Index(space="ip", dim=self._vectors.shape[1])
        self._index.init_index(2 * len(held[0]), M=16, ef_construction=100, allow_replace_deleted=True)
        self._index.add_items(self._vectors[held[1]], held[0])
        self._index.set_num_threads(threads)
        self._index.set_ef(ef)
        self._label = {item: item for item in held[0].tolist()}
        self._item = dict(self._label)
        self._next = 1 << 40  # labels of inserts, beyond all item numbers
        self._marked = 0

    def search(self, query: int, k: int) -> tuple[list[int], int]:
        with self._lock:
            found, _ = self._index.knn_query(self._queries[query : query + 1], k)
            return [self._item[label] for label in found[0].tolist()], self._batches

    def apply(self, items: Sequence[int], states: Sequence[int], removed: Sequence[int]) -> int:
        with self._lock:
            for item in removed:
                if (label := self._label.pop(item, None)) is not None:
                    self._index.mark_deleted(label)
                    del self._item[label]
                    self._marked += 1
            moved = [
                (self._label[item], state) for item, state in zip(items, states, strict=True) if item in self._label
            ]
            fresh = [(item, state) for item, state in zip(items, states, strict=True) if item not in self._label]
            if moved:
                self._index.add_items(self._vectors[[state for _, state in moved]], [label for label, _ in moved])
            for item, state in fresh:
                label, self._next = self._next, self._next + 1
                self._index.add_items(self._vectors[[state]], [label], replace_deleted=self._marked > 0)
                self._marked = max(0, self._marked - 1)
                self._label[item], self._item[label] = label, item
            self._batches += 1
            return self._batches

    @property
    def nbytes(self) -> int:
        return int(self._index.index_file_size())


def _number(version: str) -> int:
    """The number of changes in an index version: "model.<number>-<digest>"."""
    return int(version.rpartition(".")[2].partition("-")[0])


def _name(item: int) -> str:
    return f"{item:09d}"


def _states(pool: ItemStates, numbers: Sequence[int] | IntArray) -> ItemStates:
    rows = np.asarray(numbers, dtype=np.int64)
    return ItemStates(components=pool.components[rows], gate=None if pool.gate is None else pool.gate[rows])

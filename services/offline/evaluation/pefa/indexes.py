"""Indexes for text queries with PEFA: this library's, and hnswlib (an extra).

PEFA-XS puts other vectors into the same index. PEFA-XL adds a second search and the documents that it votes for. Graphs
have the paper's settings. An answer is a query's 100 best documents, best first.

Letters: n documents, m training queries, B queries, E pairs, d width, k neighbours, K results.
"""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates
from services.offline.evaluation.pefa.data import Judged
from services.offline.evaluation.pefa.paper import xl_votes

K = 100
BUILD_THREADS = 2
_EDGES, _BUILD_BREADTH, _SEARCH_BREADTH = 32, 500, 300
_APPEND = 2_048  # remembered queries added at a time

Found = npt.NDArray[np.int64]
Votes = list[dict[int, float]]


class Vectors(ABC):
    """Document vectors (n, d), searched by inner product."""

    nbytes: int

    @abstractmethod
    def nearest(self, queries: FloatArray) -> tuple[Any, Any]:
        """Return rows and inner products (B, K), best first."""

    def answer(self, queries: FloatArray) -> Found:
        return np.asarray(self.nearest(queries)[0], dtype=np.int64)


class ServedVectors(Vectors):
    """Vectors in one of this library's indexes."""

    def __init__(self, vectors: FloatArray, *, algorithm: str) -> None:
        scorer = MolScorer(ItemStates(components=np.ascontiguousarray(vectors[:, None])), None)
        self._index = make_index(parse_algorithm(algorithm), scorer)
        self.nbytes = self._index.nbytes

    def nearest(self, queries: FloatArray) -> tuple[Any, Any]:
        answer = self._index.search(QueryStates(components=queries[:, None]), K)
        return answer.item_indices, answer.scores


class ServedMemory:
    """Exact search of one entry per pair of a training query and its document."""

    def __init__(self, train: Judged, *, k: int) -> None:
        self._k = k
        self._index = VotingIndex(num_components=1, width=train.queries.shape[1], model_version="text")
        halves = train.queries.astype(np.float16)
        entries = [
            MemoryEntry(
                entry_id=f"{number:07d}",
                item_id=str(document),
                components=halves[query][None],
                weight=1.0,
                interaction_type="asked",
                event_seconds=0,
            )
            for number, (query, document) in enumerate(train.pairs.tolist())
        ]
        for start in range(0, len(entries), _APPEND):
            self._index.apply(upserts=entries[start : start + _APPEND])
        self._index.index.merge()
        self.nbytes = len(self._index) * self._index.bytes_per_entry

    def votes(self, queries: FloatArray) -> Votes:
        """Return votes by document row, for each query."""
        found = self._index.votes(QueryStates(components=queries[:, None]), self._k)
        return [{int(document): vote for document, vote in votes.items()} for votes in found]


def bytes_per_entry(width: int) -> int:
    """Return one remembered query's bytes."""
    return VotingIndex(num_components=1, width=width, model_version="text").bytes_per_entry


class GraphVectors(Vectors):
    """hnswlib's HNSW, at the paper's settings."""

    def __init__(self, vectors: FloatArray, *, seed: int, results: int = K) -> None:
        self._index = import_module("hnswlib").Index(space="ip", dim=vectors.shape[1])
        self._index.init_index(
            max_elements=len(vectors), M=_EDGES, ef_construction=_BUILD_BREADTH, random_seed=seed + 1
        )
        self._index.add_items(vectors, num_threads=BUILD_THREADS)
        self._index.set_num_threads(1)
        self._results = min(results, len(vectors))
        self._index.set_ef(max(_SEARCH_BREADTH, self._results))
        self.nbytes = int(self._index.index_file_size())

    def nearest(self, queries: FloatArray) -> tuple[Any, Any]:
        rows, distances = self._index.knn_query(queries, k=self._results)
        return rows.astype(np.int64), 1.0 - distances


class GraphMemory:
    """The paper's second graph, in which hnswlib finds the k nearest training queries, which vote."""

    def __init__(self, train: Judged, relevant: sparse.csr_matrix, *, k: int, seed: int) -> None:
        self._graph = GraphVectors(train.queries, seed=seed, results=k)
        self._relevant, self._k = relevant, k
        self.nbytes = int(self._graph.nbytes + relevant.indptr.nbytes + relevant.indices.nbytes)

    def votes(self, queries: FloatArray) -> Votes:
        rows, products = self._graph.nearest(queries)
        found = xl_votes(rows, products.astype(np.float64), self._relevant, k=self._k)
        return [dict(zip(one.indices.tolist(), one.data.tolist(), strict=True)) for one in found]


Memory = ServedMemory | GraphMemory


class Voted:
    """PEFA-XL: rank the base's best documents and all voted documents by lambda s + (1 - lambda) vote.

    The answer is exact if the base and the memory are exact and no vote is negative.
    """

    def __init__(self, documents: FloatArray, base: Vectors, memory: Memory, *, share: float) -> None:
        self._documents, self._base, self._memory, self._share = documents, base, memory, share
        self.nbytes = base.nbytes + memory.nbytes

    def answer(self, queries: FloatArray) -> Found:
        rows, scores = self._base.nearest(queries)
        found = np.full((len(queries), K), -1, dtype=np.int64)
        for number, votes in enumerate(self._memory.votes(queries)):
            pool = dict(zip(rows[number].tolist(), scores[number].tolist(), strict=True))
            joining = [document for document in votes if document not in pool]
            own = self._documents[joining].astype(np.float64) @ queries[number]
            pool.update(zip(joining, own.tolist(), strict=True))
            pool.pop(-1, None)
            ranked = sorted(
                (-self._share * score - (1 - self._share) * votes.get(document, 0.0), document)
                for document, score in pool.items()
            )
            best = [document for _, document in ranked[:K]]
            found[number, : len(best)] = best
        return found

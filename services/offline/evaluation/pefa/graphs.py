"""PEFA over graph indexes, as its paper serves it: HNSW with M 32, efConstruction 500, efSearch 300.

Two libraries: `libpecos`, the authors' own (their example's script, on the same vectors), and `hnswlib`. Both are
extras; what is not installed is left out by name. An answer is the 100 best documents of a query, best first.

Letters: n documents, m training queries, B test queries, E pairs, d width, K results.
"""

import importlib.util
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.states import FloatArray
from services.offline.evaluation.pefa.data import Judged

K = 100
_EDGES, _BUILD_BREADTH, _SEARCH_BREADTH = 32, 500, 300
_POOL = 500  # documents that XL takes from the encoder's index, as in the authors' script
_THREADS = 2

Found = npt.NDArray[np.int64]


class Retriever(Protocol):
    """A built index: the 100 best documents (B, K) of each query (B, d), best first, and its bytes."""

    @property
    def nbytes(self) -> int: ...

    def answer(self, queries: FloatArray) -> Found: ...


# What each of the table's libraries needs; libpecos is installed without its training dependencies.
_NEEDS = {"hnswlib": ("hnswlib",), "libpecos": ("pecos", "scipy", "sklearn")}


def installed(library: str) -> bool:
    """Whether "hnswlib" or "libpecos" can be imported here."""
    return all(importlib.util.find_spec(package) is not None for package in _NEEDS[library])


class PecosVectors:
    """The authors' HNSW over document vectors: the encoder alone, or PEFA-XS's interpolated ones."""

    def __init__(self, vectors: FloatArray, *, results: int = K) -> None:
        library = import_module("pecos.ann.hnsw").HNSW
        self._index = library.train(
            np.ascontiguousarray(vectors),
            train_params=library.TrainParams(M=_EDGES, efC=_BUILD_BREADTH, metric_type="ip", threads=_THREADS),
            pred_params=None,
        )
        # A graph gives at most what it searches, and no more than it holds.
        results = min(results, len(vectors))
        self._settings = library.PredParams(efS=max(_SEARCH_BREADTH, results), topk=results)
        self._searchers = self._index.searchers_create(num_searcher=1)

    @property
    def nbytes(self) -> int:
        """Bytes on disk, which the paper's Table 6 gives."""
        with tempfile.TemporaryDirectory() as folder:
            self._index.save(str(Path(folder) / "index"))
            return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())

    def nearest(self, queries: FloatArray) -> tuple[npt.NDArray[np.uint32], FloatArray]:
        """Rows and inner products, best first."""
        rows, distances = self._index.predict(
            np.ascontiguousarray(queries), pred_params=self._settings, searchers=self._searchers, ret_csr=False
        )
        return rows, 1.0 - distances

    def answer(self, queries: FloatArray) -> Found:
        return self.nearest(queries)[0].astype(np.int64)


def pecos_xs(documents: FloatArray, train: Judged, *, share: float) -> PecosVectors:
    """PEFA-XS as the authors' script builds it: PIFA embeddings by `libpecos`, interpolated, in one graph."""
    fed_back = import_module("pecos.xmc").LabelEmbeddingFactory.create(
        _relevance(train, len(documents)), train.queries, method="pifa", normalized_Y=False
    )
    return PecosVectors((share * documents + (1.0 - share) * fed_back).astype(np.float32))


class PecosXL:
    """PEFA-XL as the authors' script runs it: 500 documents and k training queries from two graphs, summed sparsely."""

    def __init__(self, documents: FloatArray, train: Judged, *, share: float, neighbours: int) -> None:
        self._documents = PecosVectors(documents, results=_POOL)
        self._queries = PecosVectors(train.queries, results=neighbours)
        self._relevant = _relevance(train, len(documents))
        self._share, self._neighbours = share, neighbours

    @property
    def nbytes(self) -> int:
        matrix = self._relevant
        return self._documents.nbytes + self._queries.nbytes + _bytes(matrix.data, matrix.indices, matrix.indptr)

    def answer(self, queries: FloatArray) -> Found:
        own = _csr(*self._documents.nearest(queries), width=self._relevant.shape[1])
        near = _csr(*self._queries.nearest(queries), width=self._relevant.shape[0])
        near.data /= self._neighbours
        scores = (self._share * own + (1.0 - self._share) * near.dot(self._relevant)).tocsr()
        found = np.full((len(queries), K), -1, dtype=np.int64)
        for query in range(len(queries)):
            row = slice(scores.indptr[query], scores.indptr[query + 1])
            best = np.argsort(-scores.data[row], kind="stable")[:K]
            found[query, : len(best)] = scores.indices[row][best]
        return found


class GraphVectors:
    """hnswlib's HNSW over document vectors, at the paper's settings."""

    def __init__(self, vectors: FloatArray, *, seed: int, results: int = K) -> None:
        self._index = import_module("hnswlib").Index(space="ip", dim=vectors.shape[1])
        self._index.init_index(
            max_elements=len(vectors), M=_EDGES, ef_construction=_BUILD_BREADTH, random_seed=seed + 1
        )
        self._index.add_items(vectors, num_threads=_THREADS)
        self._index.set_num_threads(1)
        self._results = min(results, len(vectors))
        self._index.set_ef(max(_SEARCH_BREADTH, self._results))

    @property
    def nbytes(self) -> int:
        return int(self._index.index_file_size())

    def nearest(self, queries: FloatArray) -> tuple[Found, FloatArray]:
        """Rows and inner products, best first."""
        rows, distances = self._index.knn_query(queries, k=self._results)
        return rows.astype(np.int64), 1.0 - distances

    def answer(self, queries: FloatArray) -> Found:
        return self.nearest(queries)[0]


def _relevance(train: Judged, num_documents: int) -> Any:
    """Y of the paper, (m, n) of ones."""
    ones = np.ones(len(train.pairs), dtype=np.float32)
    return import_module("scipy.sparse").csr_matrix(
        (ones, (train.pairs[:, 0], train.pairs[:, 1])), shape=(len(train), num_documents)
    )


def _csr(rows: npt.NDArray[np.uint32], scores: FloatArray, *, width: int) -> Any:
    starts = np.arange(0, rows.size + 1, rows.shape[1])
    return import_module("scipy.sparse").csr_matrix(
        (scores.ravel(), rows.ravel().astype(np.int64), starts), shape=(len(rows), width)
    )


def _bytes(*arrays: npt.NDArray[Any]) -> int:
    return sum(array.nbytes for array in arrays)

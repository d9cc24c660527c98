"""PEFA on text as this library serves it, and over graph indexes: build time, bytes, latency and recall.

One class serves any base index and any memory: PEFA-XS is another set of vectors in the same index, PEFA-XL adds a
second search and lets voted documents join. Ours are exact search, the integer codes with proof, and the same codes
with only some cells visited (an approximate index); the memory is the one that candidates search while it changes.

Letters: n documents, m training queries, B queries, E pairs, d width, k neighbours, K results.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.indexes.protocol import Index
from services.algorithms.native.threads import set_compute_threads
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import default_cells
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.states import FloatArray, ItemStates, QueryStates
from services.offline.evaluation.common.recall import ranks_of_answers, recalls
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.pefa.data import Judged, TextSet
from services.offline.evaluation.pefa.graphs import (
    Found,
    GraphVectors,
    K,
    PecosVectors,
    PecosXL,
    Retriever,
    installed,
    pecos_xs,
)
from services.offline.evaluation.pefa.paper import Pairs, xl_votes
from services.offline.evaluation.pefa.sweep import ENCODER, Setting, relevance, xs_vectors

_APPEND = 2_048  # remembered queries that become visible together
OURS = ("brute_force", "quantized(1)", "quantized(300,{cells})")
_VISITED = 0.6  # of the cells, in the approximate row: these sets have a hundred cells, and a quarter lost 6 points
BUILD_THREADS = 2

Votes = list[dict[int, float]]


class VectorIndex(Retriever, Protocol):
    """The best documents of each query by inner product: also their scores (B, K), best first."""

    def nearest(self, queries: FloatArray) -> tuple[Any, Any]: ...


class Memory(Protocol):
    """What remembered queries say of documents, by row."""

    @property
    def nbytes(self) -> int: ...

    def votes(self, queries: FloatArray) -> Votes: ...


class ServedVectors:
    """Document vectors in one of this library's indexes."""

    def __init__(self, vectors: FloatArray, *, algorithm: str) -> None:
        scorer = MolScorer(ItemStates(components=np.ascontiguousarray(vectors[:, None])), None)
        self._index: Index = make_index(parse_algorithm(algorithm), scorer, np.arange(len(vectors)))

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def nearest(self, queries: FloatArray) -> tuple[Any, Any]:
        answer = self._index.search(QueryStates(components=queries[:, None]), K)
        return answer.item_indices, answer.scores

    def answer(self, queries: FloatArray) -> Found:
        return np.asarray(self.nearest(queries)[0], dtype=np.int64)


class ServedMemory:
    """The memory of candidates: one entry per pair of a training query and its document, exact search."""

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

    @property
    def nbytes(self) -> int:
        return len(self._index) * self._index.bytes_per_entry

    def votes(self, queries: FloatArray) -> Votes:
        found = self._index.votes(QueryStates(components=queries[:, None]), self._k)
        return [{int(document): vote for document, vote in votes.items()} for votes in found]


def bytes_per_entry(width: int) -> int:
    """Bytes of one remembered query of this width."""
    return VotingIndex(num_components=1, width=width, model_version="text").bytes_per_entry


class GraphMemory:
    """The paper's second graph: the k nearest training queries by hnswlib, and Y."""

    def __init__(self, train: Judged, pairs: Pairs, *, k: int, seed: int) -> None:
        self._graph = GraphVectors(train.queries, seed=seed, results=k)
        self._pairs, self._k = pairs, k

    @property
    def nbytes(self) -> int:
        return self._graph.nbytes + self._pairs.starts.nbytes + self._pairs.passages.nbytes

    def votes(self, queries: FloatArray) -> Votes:
        rows, products = self._graph.nearest(queries)
        found = xl_votes(rows, products.astype(np.float64), self._pairs, k=self._k)
        return [dict(zip(passages.tolist(), votes.tolist(), strict=True)) for passages, votes in found]


class Voted:
    """PEFA-XL: the base's best documents and every voted one, by lambda s + (1 - lambda) vote.

    Exact where base and memory are and no vote is negative: whatever is left out has no vote and scores at most the
    base's K-th, of which K are in.
    """

    def __init__(self, documents: FloatArray, base: VectorIndex, memory: Memory, *, share: float) -> None:
        self._documents, self._base, self._memory, self._share = documents, base, memory, share

    @property
    def nbytes(self) -> int:
        return self._base.nbytes + self._memory.nbytes

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


def builds(
    data: TextSet, settings: Mapping[str, Setting], *, seed: int
) -> dict[tuple[str, str], Callable[[], Retriever]]:
    """How each (index, method) is built from vectors and pairs, everything included; calling one builds it.

    `settings`: the chosen one of "xs" and "xl"; the authors' library is also built at the one of "xs as printed",
    its own reading, if there is one. Libraries that are not installed are left out.
    """
    documents, train = data.documents, data.train
    xs, xl = settings["xs"], settings["xl"]
    served = partial(ServedMemory, train, k=xl.k)
    approximate = OURS[-1].format(cells=visited_cells(documents))
    indexes: dict[str, tuple[Callable[[FloatArray], VectorIndex], Callable[[], Memory]]] = {
        name: (partial(ServedVectors, algorithm=name), served) for name in (*OURS[:-1], approximate)
    }
    if installed("hnswlib"):
        graph = partial(GraphMemory, train, relevance(train, len(documents)), k=xl.k, seed=seed)
        indexes["hnswlib"] = (partial(GraphVectors, seed=seed), graph)
    found: dict[tuple[str, str], Callable[[], Retriever]] = {}
    for name, (index, memory) in indexes.items():
        found[name, "encoder"] = partial(index, documents)
        found[name, "xs"] = partial(_xs, index, data, xs)
        found[name, "xl"] = partial(_xl, index, memory, documents, xl)
    if installed("libpecos"):
        found["libpecos", "encoder"] = partial(PecosVectors, documents)
        found["libpecos", "xs"] = partial(pecos_xs, documents, train, share=xs.share)
        if "xs as printed" in settings:
            found["libpecos", "xs as printed"] = partial(
                pecos_xs, documents, train, share=settings["xs as printed"].share
            )
        found["libpecos", "xl"] = partial(PecosXL, documents, train, share=xl.share, neighbours=xl.k)
    return found


def _xs(index: Callable[[FloatArray], VectorIndex], data: TextSet, setting: Setting) -> Retriever:
    return index(xs_vectors(data.documents, data.train, setting))


def _xl(
    index: Callable[[FloatArray], VectorIndex], memory: Callable[[], Memory], documents: FloatArray, setting: Setting
) -> Retriever:
    return Voted(documents, index(documents), memory(), share=setting.share)


def visited_cells(documents: FloatArray) -> int:
    """Cells that the approximate row visits."""
    return max(1, round(_VISITED * default_cells(*documents.shape).num_cells))


def rows(
    data: TextSet,
    settings: Mapping[str, Setting],
    *,
    seed: int,
    num_timed: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row per index and method, as in the paper's Table 6, recall beside it.

    Seconds and milliseconds are of CPU, all threads together: what a busy machine adds by making it wait is nobody's
    cost. Builds use up to two threads; queries are asked one at a time on one thread, indexes in turns. Leaves one
    thread to PyTorch.
    """
    builders = builds(data, settings, seed=seed)
    built: dict[tuple[str, str], Retriever] = {}
    building = Times()
    torch.set_num_threads(BUILD_THREADS)
    set_compute_threads(BUILD_THREADS)
    for key, build in builders.items():
        say(f"{data.name}: building {' '.join(key)}")
        built[key] = building.call(lambda make: make(), build)
    torch.set_num_threads(1)
    set_compute_threads(1)
    say(f"{data.name}: queries one at a time")
    times = _latencies(built, data.test.queries[:num_timed])
    out = []
    for (key, index), seconds in zip(built.items(), building.cpu, strict=True):
        index_name, method = key
        found = index.answer(data.test.queries)
        recall = recalls(ranks_of_answers(list(found), data.test.pairs), data.test.pairs, len(data.test))
        base = times[index_name, "encoder"]
        out.append(
            {
                "data": data.name,
                "index": index_name,
                "method": method,
                "setting": settings.get(method, ENCODER).text,
                **{name: float(values.mean()) for name, values in recall.items()},
                "build_cpu_seconds": seconds,
                "index_bytes": index.nbytes,
                "cpu_milliseconds": times[key].cpu_ms,
                "over_encoder": times[key].cpu_ms / base.cpu_ms,
            }
        )
    return out


def _latencies(built: Mapping[tuple[str, str], Retriever], queries: FloatArray) -> dict[tuple[str, str], Times]:
    found = {key: Times() for key in built}
    for index in built.values():
        index.answer(queries[:1])  # warm: first touches of memory, lazily made tables
    for query in range(len(queries)):
        for key, index in built.items():
            found[key].call(index.answer, queries[query : query + 1])
    return found

"""PEFA on text as served: build time, bytes, latency and recall, in this library's indexes and over hnswlib.

This library's indexes are exact search, the proven integer codes, and the same codes with only some cells visited. XL's
memory is the `VotingIndex` that the candidates process searches.

Letters: n documents, m training queries, B queries, d width.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from services.algorithms.ops.quantized_scan import default_cells
from services.algorithms.scoring.states import FloatArray
from services.offline.evaluation.common.recall import ranks_of_answers, recalls
from services.offline.evaluation.common.timing import Times, use_threads
from services.offline.evaluation.pefa.data import TextSet
from services.offline.evaluation.pefa.indexes import (
    BUILD_THREADS,
    GraphMemory,
    GraphVectors,
    Memory,
    ServedMemory,
    ServedVectors,
    Vectors,
    Voted,
)
from services.offline.evaluation.pefa.sweep import ENCODER, Setting, xs_vectors

Build = Callable[[], Vectors | Voted]

_OURS = ("brute_force", "quantized(1)", "quantized(300,{cells})")
_VISITED = 0.6  # share of about 100 cells that the approximate index visits; a share of .25 lost 6 points of recall


def builds(data: TextSet, settings: Mapping[str, Setting], *, seed: int) -> dict[tuple[str, str], Build]:
    """Return (index, method) -> a function that builds it, with the settings of "xs" and "xl". hnswlib is an extra."""
    documents, train = data.documents, data.train
    xs, xl = settings["xs"], settings["xl"]
    visited = max(1, round(_VISITED * default_cells(*documents.shape).num_cells))
    indexes: dict[str, tuple[Callable[[FloatArray], Vectors], Callable[[], Memory]]] = {
        name: (partial(ServedVectors, algorithm=name), partial(ServedMemory, train, k=xl.k))
        for name in (one.format(cells=visited) for one in _OURS)
    }
    if importlib.util.find_spec("hnswlib"):
        graph = partial(GraphMemory, train, train.relevant(len(documents)), k=xl.k, seed=seed)
        indexes["hnswlib"] = (partial(GraphVectors, seed=seed), graph)
    found: dict[tuple[str, str], Build] = {}
    for name, (index, memory) in indexes.items():
        found[name, "encoder"] = partial(index, documents)
        found[name, "xs"] = lambda index=index: index(xs_vectors(documents, train, xs))  # type: ignore[misc]
        found[name, "xl"] = lambda index=index, memory=memory: Voted(  # type: ignore[misc]
            documents, index(documents), memory(), share=xl.share
        )
    return found


def rows(
    data: TextSet, settings: Mapping[str, Setting], *, seed: int, num_timed: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return one row per index and method, as in the paper's Table 6, with recall.

    Times are all threads' processor time. Builds use up to two threads; queries run one at a time, alternating
    between indexes, on one thread. Afterwards, PyTorch and the kernels still use one thread.
    """
    built: dict[tuple[str, str], Vectors | Voted] = {}
    building = Times()
    use_threads(BUILD_THREADS)
    for key, build in builds(data, settings, seed=seed).items():
        say(f"{data.name}: building {' '.join(key)}")
        built[key] = building.call(lambda make: make(), build)
    use_threads(1)
    say(f"{data.name}: queries one at a time")
    times = {key: Times() for key in built}
    for index in built.values():
        index.answer(data.test.queries[:1])  # warm-up
    for query in data.test.queries[:num_timed]:
        for key, index in built.items():
            times[key].call(index.answer, query[None])
    out = []
    for (key, index), seconds in zip(built.items(), building.cpu, strict=True):
        ranks = ranks_of_answers(list(index.answer(data.test.queries)), data.test.pairs)
        recall = recalls(ranks, data.test.pairs, len(data.test))
        out.append(
            {
                "data": data.name,
                "index": key[0],
                "method": key[1],
                "setting": settings.get(key[1], ENCODER).text,
                **{name: float(values.mean()) for name, values in recall.items()},
                "build_cpu_seconds": seconds,
                "index_bytes": index.nbytes,
                "cpu_milliseconds": times[key].cpu_ms,
                "over_encoder": times[key].cpu_ms / times[key[0], "encoder"].cpu_ms,
            }
        )
    return out

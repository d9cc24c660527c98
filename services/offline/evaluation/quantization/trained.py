"""`freshet bench quantization --bundle`: codes of a trained model's items at equal bits, and indexes over codes.

All codes are searched with a query's tangents, as in `quantized_tangents` (decision 046): the pool is the union of the
N / M best items of each tangent. Scores are exact products with decoded vectors; an item's bits exclude its cell.

Letters: X items, B queries, M tangents of a query, w coordinates of an item for tangents, N pool size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.indexes.protocol import Indices
from services.algorithms.indexes.quantized.tangents import QuantizedTangents, Slopes
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import CellCodes, Cells, default_cells
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates
from services.offline.evaluation.catalogues.trained import trained_scene
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.common.timing import Times, use_threads
from services.offline.evaluation.large.catalogue import enlarged
from services.offline.training.codebooks.inverted_file import catalogue_codebooks, train_inverted_file

K = 100
POOLS = (100, 200, 500, 1000, 2000)
_KINDS = ((0.0, False), (0.0, True), (0.1, True), (0.2, False), (0.2, True), (0.4, True))  # T, rotated
_INDEXES = ("quantized_tangents", "anisotropic")
_SHOWN = ("product, T = 0, rotated", "product, T = 0.2, rotated")
_BITS = (104, 216)  # per item, at 2 per coordinate: a dot product's, a mixture's
_LARGE = 200_000
_QUERIES = 200
_SEEDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """`bits`: per coordinate. `decoded(vectors, num_cells, seed)` encodes and decodes (X, w)."""

    name: str
    bits: int
    decoded: Callable[[FloatArray, int, int], FloatArray]


def run(request: Request, bundles: Sequence[Path]) -> Report:
    """Measure with one thread; writes trained-codes.{md,json}. Raises: as `trained_scene`, and ValueError without
    FAISS.
    """
    began = perf_counter()
    use_threads(1)
    rows: list[dict[str, Any]] = []
    for bundle in bundles:
        scene = trained_scene(bundle, num_queries=_QUERIES, seed=request.seed)
        scorer = MolScorer(scene.items, scene.pair_gate)
        name = load_bundle(bundle).manifest.data.get("name")
        of = f"{name}, {'dot product' if scorer.num_pairs == 1 else 'mixture'}"
        rows += [{"trained_on": of} | row for row in code_rows(scorer, scene.queries, request)]
        rows += [{"trained_on": of} | row for row in index_rows(scorer, scene.queries, request)]
        if not request.quick:
            with TemporaryDirectory() as folder:
                many = enlarged(load_bundle(bundle), _LARGE, Path(folder) / "bundle", seed=request.seed)
                scorer = MolScorer(many.item_states, many.pair_gate)
                rows += [{"trained_on": f"{of}, enlarged"} | row for row in index_rows(scorer, scene.queries, request)]
    return written(request, report_of("trained-codes", request, rows, began), page)


def page(report: Report) -> str:
    """Return trained-codes.md: some of the codes and pool sizes."""
    indexes = [
        {name.replace("beside", "without"): value for name, value in row.items()}
        for row in report["rows"]
        if "index" in row and row["N"] in (None, 500)
    ]
    shown = [
        {name: value for name, value in row.items() if name not in ("N=100", "N=1000", "N=2000")}
        for row in report["rows"]
        if row.get("bits") in _BITS and (row["codes"] in _SHOWN or row["codes"].startswith("scalar"))
    ]
    rows = [*shown, *indexes]
    return filled(Path(__file__).with_name("trained.md.j2"), **{"remark": ""} | report | {"rows": rows})


def code_rows(scorer: MolScorer, queries: QueryStates, request: Request) -> Iterator[dict[str, Any]]:
    """Yield a row per kind of code: mean recall@100 over codebook seeds for each N, and its largest range."""
    exact = BruteForce(scorer).search(queries, K).item_indices
    index = QuantizedTangents(scorer, pool_size=1)
    # Pad to a multiple of 4: the longest codewords have 4 coordinates.
    asked, vectors = [_whole(vectors) for vectors, _ in index.tangents(queries)], _whole(Slopes(scorer).vectors())
    num_cells = default_cells(*vectors.shape).num_cells
    sizes = _sizes(len(vectors))
    for code in codes(vectors.shape[1]):
        request.say(f"{len(vectors):,} items, {code.name}, {code.bits} bits a coordinate")
        seeds = range(request.seed, request.seed + (1 if request.quick or code.bits == 32 else _SEEDS))
        found = np.array(
            [
                [recall(pools, exact) for pools in _pools(asked, code.decoded(vectors, num_cells, seed), sizes)]
                for seed in seeds
            ]
        )
        yield {
            "items": len(vectors),
            "bits": code.bits * vectors.shape[1],
            "codes": code.name,
            **{f"N={size}": None for size in POOLS},
            **{f"N={size}": round(share, 4) for size, share in zip(sizes, found.mean(axis=0).tolist(), strict=True)},
            "range": round(float(np.ptp(found, axis=0).max()), 4),
        }


def index_rows(scorer: MolScorer, queries: QueryStates, request: Request) -> Iterator[dict[str, Any]]:
    """Yield a row per index and N; milliseconds are a query's median, bytes exclude the item's state."""
    exact = BruteForce(scorer).search(queries, K).item_indices
    each = [queries.take([query]) for query in range(len(queries))]
    sizes = _sizes(scorer.num_items)[1:]
    for kind in (None, *_INDEXES):
        request.say(f"{scorer.num_items:,} items, {kind or 'exact'}")
        began = perf_counter()
        first = "exact" if kind is None else f"{kind}({sizes[0]})"
        states = ItemStates(components=scorer.components, gate=scorer.item_gate)
        codebooks = catalogue_codebooks(states, scorer.pair_gate) if kind == "anisotropic" else None
        ranks = np.arange(scorer.num_items)
        index: Any = make_index(parse_algorithm(first), scorer, ranks, codebooks=codebooks)
        built, nbytes = perf_counter() - began, index.nbytes - scorer.nbytes
        for size in (None,) if kind is None else sizes:
            if size is not None:
                index = index.with_sizes(pool_size=size)
            times = Times.of(lambda query, index=index: index.search(query, K), each, warm_up=4)  # type: ignore[misc]
            yield {
                "items": scorer.num_items,
                "index": kind or "exact",
                "N": size,
                f"recall_{K}": round(recall(index.search(queries, K).item_indices, exact), 4),
                "milliseconds": round(times.median_ms, 3),
                "bytes_beside_states": round(nbytes / scorer.num_items, 1),
                "build_s": round(built, 1),
            }


def codes(width: int) -> Iterator[Code]:
    """Yield uncompressed vectors, then 4, 2 and 1 bits per coordinate."""
    yield Code(name="none", bits=32, decoded=lambda vectors, num_cells, seed: vectors)
    for bits in (4, 2, 1):
        kept = width * bits // 4
        yield Code(name=f"scalar, 4 bits of {kept}", bits=bits, decoded=partial(_scalar, kept))
        for threshold, rotate in _KINDS:
            name = f"product, T = {threshold:g}{', rotated' if rotate else ''}"
            yield Code(name=name, bits=bits, decoded=partial(_product, kept, threshold, rotate))


def _sizes(num_items: int) -> list[int]:
    return [size for size in POOLS if size < num_items / 3]


def _whole(vectors: FloatArray) -> FloatArray:
    return np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % 4)))


def _scalar(coded_width: int, vectors: FloatArray, num_cells: int, seed: int) -> FloatArray:
    return values(Cells(num_cells=num_cells, bits=4, coded_width=coded_width).coded(vectors, seed=seed))


def _product(
    num_subspaces: int, threshold: float, rotate: bool, vectors: FloatArray, num_cells: int, seed: int
) -> FloatArray:
    train = partial(train_inverted_file, num_subspaces=num_subspaces, code_bits=4, threshold=threshold, rotate=rotate)
    return train(vectors, num_cells=num_cells, seed=seed).coded(vectors).decoded()


def values(codes: CellCodes) -> FloatArray:
    """Return the vectors (X, w) of scalar codes."""
    cells, filled = codes.cell_of_slots(), codes.rows >= 0
    coordinates = codes.integers().astype(np.float32) * codes.scales[cells][:, None]
    if codes.projection is not None:
        coordinates = coordinates @ codes.projection.T
    result = np.empty((codes.num_items, codes.width), dtype=np.float32)
    result[codes.rows[filled]] = (coordinates + codes.centres[cells])[filled]
    return result


def _pools(asked: Sequence[FloatArray], decoded: FloatArray, sizes: Sequence[int]) -> list[list[list[int]]]:
    """Return, for each pool size, B pools: the union of the N / M best of each vector of a query."""
    result: list[list[list[int]]] = [[] for _ in sizes]
    for vectors in asked:
        scores = vectors @ decoded.T
        depths = [-(-size // len(vectors)) for size in sizes]
        best: Indices = np.argpartition(-scores, max(depths), axis=1)[:, : max(depths)]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        best = np.take_along_axis(best, order, axis=1)
        for pools, depth in zip(result, depths, strict=True):
            pools.append(np.unique(best[:, :depth]).tolist())
    return result

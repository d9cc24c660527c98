"""`freshet bench retrieval`: the paper's Table 5 at its four shapes, next to a transcription and the roofline.

The hit rate is measured on trained bundles alone: a generated catalogue has no labels, and its recall says nothing
about trained models.

Letters: X items, B queries, K = 100 results, Q queries to measure quality.
"""

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.protocol import TopK, take_queries
from services.algorithms.indexes.quantized.anisotropic import Anisotropic
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates
from services.offline.datasets import Interactions, load_dataset
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import SHAPES, SYNTHETIC, IntArray, Scene, Shape
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.report import Report, Request, Say, filled, report_of, written
from services.offline.evaluation.common.roofline import Algorithm, Rates, measure_rates
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.retrieval.algorithms import RESULTS, TRANSCRIPTION, algorithms
from services.offline.evaluation.retrieval.proof import prove
from services.offline.evaluation.retrieval.transcription import Transcription
from services.offline.training.bundling import load_model
from services.offline.training.codebooks.inverted_file import catalogue_codebooks
from services.offline.training.evaluation import states_before
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import Histories

Row = dict[str, Any]

# Settings in the stored report only.
_LEFT_OUT = {
    *("top_k_per_embedding(5)", "top_k_per_embedding(10)", "top_k_per_embedding(50)"),
    *("top_k_avg(200)", "top_k_avg(1000)", "top_k_avg(2000)"),
    *("combined_top_k(5,200)", "combined_top_k(100,1000)"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan for a shape: batch sizes, number of queries to measure quality, and seconds of timing per row."""

    shape: Shape
    batches: tuple[int, ...]
    num_queries: int
    seconds: float


def run(
    request: Request,
    *,
    shapes: list[str],
    batches: tuple[int, ...] | None,
    bundle: Path | None = None,
    with_proof: bool = False,
) -> Report:
    """Measure Table 5 at the shapes; write retrieval.{md,json}.

    bundle: replaces the generated ml-1m catalogue. with_proof: first compare answers and certificates with the float64
    formula.
    Raises: ValueError or BundleError for a bundle that does not fit.
    """
    began = time.perf_counter()
    rates = measure_rates()
    proof = prove(request, at_scale="books" in shapes) if with_proof else None
    found = []
    for plan in plans(shapes, batches=batches, quick=request.quick):
        trained = bundle if plan.shape.name == "ml-1m" else None
        found += rows(plan, seed=request.seed, quick=request.quick, bundle=trained, rates=rates, say=request.say)
    report = report_of("retrieval", request, found, began)
    report |= {"rates": asdict(rates), "proof": proof}
    return written(request, report, page)


def page(report: Report) -> str:
    """Return retrieval.md, with trained bundles first. Optional `notes` precede the first synthetic table.

    The transcription of brute force has a row; the times of the other transcriptions are in a column.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in report["rows"]:
        algorithm = row["algorithm"].removeprefix(TRANSCRIPTION)
        if algorithm not in _LEFT_OUT and row["algorithm"] in (algorithm, f"{TRANSCRIPTION}brute_force"):
            groups.setdefault((row["num_items"], row["batch"], row["catalogue"], row["shape"]), []).append(row)
    trained, synthetic = (
        [(key, groups[key]) for key in sorted(groups) if (key[2] == SYNTHETIC) == is_synthetic]
        for is_synthetic in (False, True)
    )
    values = {"trained": trained, "synthetic": synthetic, "transcription": TRANSCRIPTION}
    return filled(Path(__file__).with_name("page.md.j2"), **{"notes": []} | report | values)


def wrong_proofs(rows: list[Row]) -> list[str]:
    """Return algorithms that called all answers exact and yet missed an item."""
    return [
        f"{row['algorithm']} at {row['shape']}, batch {row['batch']}: recall {row['recall_100']:.4f}"
        for row in rows
        if row.get("exact") == 1.0 and row["recall_100"] < 1.0
    ]


def plans(names: list[str], *, batches: tuple[int, ...] | None, quick: bool) -> list[Plan]:
    """Return a run's plans. Quick has fewer queries, and B = 8 in place of 32 at the largest shapes."""
    found = []
    for name in names:
        chosen = batches or ((1, 8) if quick and name in ("books", "nq320k") else (1, 32))
        count = {"books": (16, 64), "nq320k": (16, 128)}.get(name, (64, 256))[0 if quick else 1]
        seconds = 0.3 if quick else 8.0
        found.append(Plan(shape=SHAPES[name], batches=chosen, num_queries=max(count, *chosen), seconds=seconds))
    return found


def rows(
    plan: Plan, *, seed: int, quick: bool, rates: Rates, bundle: Path | None = None, say: Say = lambda line: None
) -> list[Row]:
    """Return every algorithm's rows for one shape. `bundle` replaces the generated scene.

    Raises: BundleError or ValueError for a bundle that cannot be read, or has no gate.
    """
    say(f"{plan.shape.name}: items and queries")
    scene = _scene(plan, seed, bundle)
    plan = replace(plan, shape=replace(scene.shape, name=plan.shape.name))
    return list(_Run(plan, scene, rates, is_synthetic=bundle is None, quick=quick, say=say).rows())


class _Run:
    def __init__(self, plan: Plan, scene: Scene, rates: Rates, *, is_synthetic: bool, quick: bool, say: Say) -> None:
        self._plan, self._scene, self._rates = plan, scene, rates
        self._say: Say = lambda line: say(f"{plan.shape.name}: {line}")
        self._catalogue = SYNTHETIC if is_synthetic else scene.name
        self._algorithms = algorithms(len(scene.items), plan.shape, quick=quick)
        self._scorer = MolScorer(scene.items, scene.pair_gate)
        self._built: dict[Any, Any] = {}
        self._say("exact answers")
        exact = BruteForce(self._scorer)
        parts = [take_queries(scene.queries, start, start + 16) for start in range(0, len(scene.queries), 16)]
        self._exact = np.concatenate([exact.search(part, RESULTS).item_indices for part in parts])
        self._transcribed_ms: dict[tuple[str, int], float] = {}

    def rows(self) -> Iterator[Row]:
        if self._scene.pair_gate is not None:
            paper = Transcription(self._scene.items, self._scene.pair_gate)
            for algorithm in self._algorithms:
                for batch in self._plan.batches if hasattr(paper, algorithm.kind.name) else ():
                    self._say(f"{TRANSCRIPTION}{algorithm.name}, batch {batch}")
                    yield self._transcribed(paper, algorithm, batch)
            del paper
            gc.collect()
        for algorithm in self._algorithms:
            self._say(f"preparing {algorithm.name}")
            index = self._index(algorithm)
            for batch in sorted(self._plan.batches, reverse=True):
                self._say(f"{algorithm.name}, batch {batch}")
                if isinstance(index, Exact):
                    _settle(index, self._scene.queries, batch)
                times, answers = _timed(index.search, self._scene.queries, batch, self._plan.seconds, every_query=True)
                touched = _touched(answers)
                found = np.concatenate([one.item_indices for one in answers])
                yield self._row(algorithm, batch, times, found, touched) | {
                    "exact": float(np.mean([one.kind == "exact" for each in answers for one in each.certificates])),
                    "touched": touched,
                    "bytes_per_item": index.nbytes / len(self._scene.items),
                }
            del index

    def _index(self, algorithm: Algorithm) -> Any:
        """Return an index. Indexes of one kind share their data, because only searches read the sizes."""
        kind, sizes = algorithm.kind, algorithm.sizes
        if kind not in self._built:
            self._built.clear()
            options: dict[str, Any] = {}
            if kind is Anisotropic:
                options["codebooks"] = catalogue_codebooks(self._scene.items, self._scene.pair_gate)
            self._built[kind] = kind(self._scorer, **options, **sizes)
        index = copy.copy(self._built[kind])
        for name, size in sizes.items():
            setattr(index, name.removeprefix("pair_"), size)
        return index

    def _transcribed(self, paper: Transcription, algorithm: Algorithm, batch: int) -> Row:
        call, items = partial(getattr(paper, algorithm.kind.name), **algorithm.sizes), self._scene.items
        times, answers = _timed(call, self._scene.queries, batch, self._plan.seconds, every_query=False)
        self._transcribed_ms[algorithm.name, batch] = times.median_ms
        averages = 4 * items.components.shape[2] if "av" in algorithm.name else 0
        return self._row(algorithm, batch, times, np.concatenate([one.numpy() for one in answers]), {}) | {
            "algorithm": TRANSCRIPTION + algorithm.name,
            "speedup_same": None,
            "bytes_per_item": items.bytes_per_item + averages,
        }

    def _row(self, algorithm: Algorithm, batch: int, times: Times, found: IntArray, touched: dict[str, float]) -> Row:
        exact, labels = self._exact[: len(found)], self._scene.label_draws[: len(found)]
        exact_hits = _hits(exact, labels) if labels.size else 0.0
        shape, num_items = self._plan.shape, len(self._scene.items)
        least_ms = None
        if touched or algorithm.name == "brute_force":
            work = algorithm.work(shape, num_queries=batch, num_items=num_items, touched=touched)
            least_ms = 1e3 * self._rates.seconds(work)
        whole, same = (self._transcribed_ms.get((name, batch)) for name in ("brute_force", algorithm.name))
        return {
            "catalogue": self._catalogue,
            "shape": shape.name,
            "num_items": num_items,
            "batch": batch,
            "algorithm": algorithm.name,
            "milliseconds": times.median_ms,
            "p95_milliseconds": times.quantile_ms(0.95),
            "runs": len(times.wall),
            "queries": len(found),
            "speedup": whole and whole / times.median_ms,
            "speedup_same": same and same / times.median_ms,
            "relative_hr_100": _hits(found, labels) / exact_hits if exact_hits else None,
            "recall_100": recall(found, exact),
            "exact": None,
            "touched": None,
            "floor_milliseconds": least_ms,
            "floor_ratio": least_ms and times.median_ms / least_ms,
            "bytes_per_item": None,
        }


def _timed(
    search: Callable[[QueryStates, int], Any], queries: QueryStates, batch: int, seconds: float, *, every_query: bool
) -> tuple[Times, list[Any]]:
    """Search one batch after the other for `seconds`; with `every_query`, also until all queries ran once.

    Return the times, and the first answer to each batch.
    """
    groups = [take_queries(queries, start, start + batch) for start in range(0, len(queries) - batch + 1, batch)]
    search(take_queries(queries, 0, 1), RESULTS)  # warm-up
    times = Times()
    answers: list[Any] = []
    began = time.perf_counter()
    while True:
        answer = times.call(lambda part: search(part, RESULTS), groups[len(times.wall) % len(groups)])
        if len(answers) < len(groups):
            answers.append(answer)
        missing = every_query and len(answers) < len(groups)
        if not missing and time.perf_counter() - began >= seconds:
            return times, answers


def _settle(index: Exact, queries: QueryStates, batch: int) -> None:
    """Search until every strategy was tried, so that the one that a process serves with is measured."""
    starts = itertools.cycle(range(0, len(queries) - batch + 1, batch))
    while index.chosen(batch=batch, k=RESULTS) is None:
        start = next(starts)
        index.search(take_queries(queries, start, start + batch), RESULTS)


def _touched(answers: list[TopK]) -> dict[str, float]:
    """Return the mean number of touched items per query, by the name of the pass."""
    touched: dict[str, list[float]] = {}
    for one in itertools.chain.from_iterable(answer.passes for answer in answers):
        touched.setdefault(one.name, []).extend(one.touched.tolist())
    return {name: round(float(np.mean(values)), 1) for name, values in touched.items()}


def _hits(found: IntArray, labels: npt.NDArray[np.int64]) -> float:
    """Return the share of labels (Q, D) in their answer (Q, K)."""
    return float(np.mean([np.isin(wanted, row).mean() for wanted, row in zip(labels, found, strict=True)]))


def _scene(plan: Plan, seed: int, bundle: Path | None) -> Scene:
    if bundle is None:
        return generate(plan.shape, num_queries=plan.num_queries, seed=seed)
    return trained_scene(bundle, num_queries=plan.num_queries, seed=seed)


def trained_scene(path: Path, *, num_queries: int, seed: int) -> Scene:
    """Return a bundle's items with the states of at most `num_queries` of its users, drawn by `seed`.

    Raises: BundleError; ValueError if the data has other items or no user with two events.
    """
    bundle = load_bundle(path)
    name = str(bundle.manifest.data.get("name", ""))
    interactions = load_dataset(name)
    if interactions.item_ids != bundle.item_ids:
        raise ValueError(
            f"dataset={name!r} has {interactions.num_items} items; {path} was trained on {bundle.num_items} others"
        )
    queries, labels = query_states(load_model(bundle), bundle, interactions, num_queries=num_queries, seed=seed)
    return Scene(
        name=f"{path.name} as trained",
        items=bundle.item_states,
        queries=queries,
        pair_gate=bundle.pair_gate,
        label_draws=labels[:, None],
    )


def query_states(
    model: SequentialModel, bundle: Bundle, interactions: Interactions, *, num_queries: int, seed: int
) -> tuple[QueryStates, IntArray]:
    """Return states before the last events of drawn users, and those events' items (B,).

    Raises: ValueError if nobody has two events.
    """
    histories = Histories.of(interactions)
    able = np.flatnonzero(np.diff(histories.offsets) >= 2)
    if not len(able):
        raise ValueError(f"no user of {interactions.name} has two events; a query needs one and a label")
    chosen = np.sort(np.random.default_rng(seed).permutation(able)[:num_queries])
    last = histories.offsets[chosen + 1] - 1
    index = None
    if model.encoder_shape.uses_user_index:
        index = np.array([bundle.user_index.get(user_id, -1) for user_id in interactions.user_ids], dtype=np.int64)
    return states_before(model, histories, last, chosen, index), histories.items[last].astype(np.int64)

"""Retrieval measured: the paper's Table 5 at its four shapes, beside a transcription and the machine's floor.

Speed never stands alone: each row has its recall, how many answers were proven exact and what was touched. Recall and
hit rate mean something on a trained bundle alone: a generated catalogue has no labels, and its constants were chosen
near the paper's own table, so pages show neither for it.
Every timed call gets queries that the call before did not have. Baseline and contender run in one process, with the
same threads, on the same catalogue; on a shared machine trust the ratios more than the milliseconds.

Letters: X items, B queries, K = 100 results, Q queries that quality is measured with.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.protocol import TopK, take_queries
from services.algorithms.native.threads import compute_threads
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import QueryStates
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import SYNTHETIC, IntArray, Scene
from services.offline.evaluation.catalogues.shapes import SHAPES, Shape
from services.offline.evaluation.catalogues.trained import trained_scene
from services.offline.evaluation.common.floors import Rates, measure_rates
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.retrieval.contenders import (
    RESULTS,
    Bench,
    Contender,
    brute_force_floor,
    contenders,
)

Row = dict[str, Any]
Say = Callable[[str], None]

_SAMPLES = 128  # queries to calibrate the adaptive target on
TRANSCRIPTION = "transcription of "


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One shape: its batch sizes, how many queries quality rests on, and seconds of timing per row."""

    shape: Shape
    batches: tuple[int, ...]
    num_queries: int
    seconds: float
    num_items: int | None = None


def plans(names: list[str], *, batches: tuple[int, ...] | None, quick: bool) -> list[Plan]:
    """What a run measures. Quick keeps every shape at full size, fewer queries, and B = 8 for 32 at the largest."""
    found = []
    for name in names:
        largest = name in ("books", "nq320k")
        chosen = batches or ((1, 8) if quick and largest else (1, 32))
        count = {"books": (16, 64), "nq320k": (16, 128)}.get(name, (64, 256))[0 if quick else 1]
        count = max(count, *chosen)
        found.append(Plan(shape=SHAPES[name], batches=chosen, num_queries=count, seconds=0.3 if quick else 8.0))
    return found


def rows(
    plan: Plan,
    *,
    seed: int,
    quick: bool,
    bundle: Path | None = None,
    rates: Rates | None = None,
    say: Say = lambda line: None,
) -> list[Row]:
    """Every contender's rows for one shape. `bundle` replaces the generated scene by a trained model's.

    Raises: BundleError or ValueError for a bundle that cannot be read, or has no gate.
    """
    say(f"{plan.shape.name}: items and queries")
    scene, samples = _scene(plan, seed, bundle)
    catalogue = SYNTHETIC if bundle is None else scene.name
    plan = replace(plan, shape=_shape_of(scene, plan.shape), num_queries=len(scene.queries))
    found = rates or measure_rates()
    return list(_Run(plan, scene, samples, found, catalogue=catalogue, quick=quick, say=say).rows())


class _Run:
    """One shape's catalogue and exact answers, and the rows measured against them."""

    def __init__(
        self,
        plan: Plan,
        scene: Scene,
        samples: QueryStates,
        rates: Rates,
        *,
        catalogue: str,
        quick: bool,
        say: Say,
    ) -> None:
        self._plan, self._scene, self._rates, self._quick, self._say = plan, scene, rates, quick, say
        self._catalogue = catalogue
        self._bench = Bench(scorer=MolScorer(scene.items, scene.pair_gate), samples=samples)
        say(f"{plan.shape.name}: exact answers")
        self._exact = _answers(BruteForce(self._bench.scorer).search, scene.queries)[0]
        self._baseline: dict[int, float] = {}

    def rows(self) -> Iterator[Row]:
        num_items = len(self._scene.items)
        chosen = contenders(self._plan.shape, num_items, quick=self._quick)
        paper = self._transcription()
        transcribed: dict[tuple[str, int], float] = {}
        for contender in chosen:
            for batch in self._plan.batches if paper is not None and contender.transcribed is not None else ():
                self._say(f"{self._plan.shape.name}: {TRANSCRIPTION}{contender.name}, batch {batch}")
                row = self._transcribed(paper, contender, batch)
                transcribed[contender.name, batch] = row["milliseconds"]
                yield row
        del paper
        gc.collect()
        for contender in chosen:
            self._say(f"{self._plan.shape.name}: preparing {contender.name}")
            index = contender.build(self._bench)
            touched: dict[str, float] = {}
            for batch in sorted(self._plan.batches, reverse=True):
                self._say(f"{self._plan.shape.name}: {contender.name}, batch {batch}")
                if isinstance(index, Exact):
                    _settle(index, self._scene.queries, batch)
                timing = _timed(index.search, self._scene.queries, batch, self._plan.seconds, every_query=True)
                touched = {one.name: round(one.touched, 1) for one in _passes(timing.answers)}
                row = self._row(contender, batch, timing, touched)
                row["exact"] = float(
                    np.mean([one.kind == "exact" for answer in timing.answers for one in answer.certificates])
                )
                row["touched"] = touched
                row["passes_ms"] = {one.name: round(one.milliseconds, 3) for one in _passes(timing.answers)}
                row["bytes_per_item"] = index.nbytes / num_items
                if (contender.name, batch) in transcribed:
                    row["speedup_same"] = transcribed[contender.name, batch] / row["milliseconds"]
                yield row
            del index

    def _transcription(self) -> Any:
        from services.offline.evaluation.retrieval.transcription import Transcription

        if self._scene.pair_gate is None:
            return None
        paper = Transcription(self._scene.items, self._scene.pair_gate)
        paper.prepare_averages()
        return paper

    def _transcribed(self, paper: Any, contender: Contender, batch: int) -> Row:
        assert contender.transcribed is not None
        call = contender.transcribed
        timing = _timed(
            lambda queries, k: call(paper, queries), self._scene.queries, batch, self._plan.seconds, every_query=False
        )
        if contender.name == "brute_force":
            self._baseline[batch] = timing.times.median_ms
        row = self._row(contender, batch, timing, {})
        items = self._scene.items
        row["algorithm"] = TRANSCRIPTION + contender.name
        row["bytes_per_item"] = items.bytes_per_item + (4 * items.components.shape[2] if "av" in contender.name else 0)
        return row

    def _row(self, contender: Contender, batch: int, timing: "_Timing", touched: dict[str, float]) -> Row:
        exact = self._exact[: len(timing.found)]
        labels = self._scene.label_draws[: len(timing.found)]
        relative_hits = None
        if labels.size:
            exact_hits = _hits(exact, labels)
            relative_hits = _hits(timing.found, labels) / exact_hits if exact_hits else None
        shape, num_items = self._plan.shape, len(self._scene.items)
        floor = contender.floor if touched else brute_force_floor
        floor_ms = 1e3 * self._rates.seconds(floor(shape, batch, num_items, touched))
        baseline = self._baseline.get(batch)
        return {
            "catalogue": self._catalogue,
            "shape": shape.name,
            "num_items": num_items,
            "batch": batch,
            "algorithm": contender.name,
            "milliseconds": timing.times.median_ms,
            "p95_milliseconds": timing.times.p95_ms,
            "runs": len(timing.times.wall),
            "queries": len(timing.found),
            "speedup": None if baseline is None else baseline / timing.times.median_ms,
            "speedup_same": None,
            "relative_hr_100": relative_hits,
            "recall_100": recall(timing.found, exact),
            "exact": None,
            "touched": None,
            "floor_milliseconds": floor_ms if touched or contender.name == "brute_force" else None,
            "floor_ratio": timing.times.median_ms / floor_ms if touched or contender.name == "brute_force" else None,
            "bytes_per_item": None,
        }


@dataclass(frozen=True, slots=True)
class _Timing:
    """Times per call, the answers' rows (q, K) for the first q queries, and the answers themselves."""

    times: Times
    found: IntArray
    answers: list[TopK]


def _timed(
    search: Callable[[QueryStates, int], Any], queries: QueryStates, batch: int, seconds: float, *, every_query: bool
) -> _Timing:
    """Call with one batch after the other, round and round, for `seconds` and, if so wanted, all queries once."""
    groups = [take_queries(queries, start, start + batch) for start in range(0, len(queries) - batch + 1, batch)]
    search(take_queries(queries, 0, 1), RESULTS)  # warm: first touches of memory, lazily made tables
    times = Times()
    answers: list[Any] = []
    began = time.perf_counter()
    while True:
        group = groups[len(times.wall) % len(groups)]
        answer = times.call(lambda part: search(part, RESULTS), group)
        if len(answers) < len(groups):
            answers.append(answer)
        missing = every_query and len(answers) < len(groups)
        if not missing and time.perf_counter() - began >= seconds:
            break
    if isinstance(answers[0], TopK):
        return _Timing(times, np.concatenate([one.item_indices for one in answers]), answers)
    return _Timing(times, np.concatenate([np.asarray(one.numpy()) for one in answers]), [])


def _settle(index: Exact, queries: QueryStates, batch: int) -> None:
    """Search until every strategy had its turns: what is measured is what a process serves with from then on."""
    starts = itertools.cycle(range(0, len(queries) - batch + 1, batch))
    while index.chosen(batch=batch, k=RESULTS) is None:
        start = next(starts)
        index.search(take_queries(queries, start, start + batch), RESULTS)


@dataclass(frozen=True, slots=True)
class _MeanPass:
    name: str
    touched: float
    milliseconds: float


def _passes(answers: list[TopK]) -> list[_MeanPass]:
    """Each pass's mean touched items per query and mean milliseconds per call; equal names of one answer add up."""
    touched: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for answer in answers:
        for one in answer.passes:
            touched.setdefault(one.name, []).extend(one.touched.tolist())
            seconds[one.name] = seconds.get(one.name, 0.0) + one.seconds
    return [
        _MeanPass(name, float(np.mean(values)), 1e3 * seconds[name] / len(answers)) for name, values in touched.items()
    ]


def _hits(found: IntArray, labels: IntArray) -> float:
    """Share of labels (Q, D) that their query's answer (Q, K) holds."""
    return float(np.mean([np.isin(wanted, row).mean() for wanted, row in zip(labels, found, strict=True)]))


def _answers(search: Callable[[QueryStates, int], TopK], queries: QueryStates) -> tuple[IntArray, npt.NDArray[Any]]:
    parts = [search(take_queries(queries, start, start + 16), RESULTS) for start in range(0, len(queries), 16)]
    return np.concatenate([part.item_indices for part in parts]), np.concatenate([part.scores for part in parts])


def _scene(plan: Plan, seed: int, bundle: Path | None) -> tuple[Scene, QueryStates]:
    """The scene to measure on, and further queries to calibrate with."""
    wanted = plan.num_queries + _SAMPLES
    if bundle is not None:
        scene = trained_scene(bundle, num_queries=wanted, seed=seed)
        count = min(plan.num_queries, len(scene.queries) // 2)
        samples = take_queries(scene.queries, count, len(scene.queries))
    else:
        count = plan.num_queries
        scene = generate(plan.shape, num_items=plan.num_items, num_queries=count, seed=seed)
        more = generate(plan.shape, num_items=1, num_queries=wanted, seed=seed)
        samples = take_queries(more.queries, count, wanted)
    measured = replace(scene, queries=take_queries(scene.queries, 0, count), label_draws=scene.label_draws[:count])
    return measured, samples


def _shape_of(scene: Scene, shape: Shape) -> Shape:
    """The shape that a scene really has: a bundle's may be another than the name's."""
    _, num_item_components, width = scene.items.components.shape
    return replace(
        shape,
        num_items=len(scene.items),
        num_query_components=scene.queries.components.shape[1],
        num_item_components=num_item_components,
        component_width=width,
        gate_hidden=0 if scene.pair_gate is None else len(scene.pair_gate.hidden_bias),
        gated=scene.items.gate is not None,
    )


def threads() -> int:
    """The kernels' threads, which every row here uses."""
    return compute_threads()

"""`freshet bench gpu`: Table 5 of arXiv:2407.15462 on a GPU, next to the roofline and the paper's times.

It needs only a checkout, NumPy, PyTorch, Triton, typer and rich. CUDA events measure the milliseconds of a search on
the device; `end_to_end_ms` is wall-clock time, including copies from and to NumPy. Exact answers come from PyTorch in
float32, and in float64 for close scores. Catalogues are synthetic. A failed row reports its error, and the others are
measured.

Letters: X items, B queries, K = 100 results.
"""

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.card_passes import CardPasses
from services.algorithms.indexes.pools import PooledIndex
from services.algorithms.indexes.protocol import TopK, take_queries
from services.algorithms.ops.mol_scores.device import DeviceScorer, gate_weights, mixture
from services.algorithms.scoring.states import QueryStates
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import Scene, Shape, shape_named
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.roofline import Algorithm, heuristics
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.gpu.rates import STAND_IN, CardRates, Clock, cuda_events, measure_card, wall_clock

Row = dict[str, Any]
Say = Callable[[str], None]
CardIndex = BruteForce | PooledIndex
RESULTS = 100
_AVERAGES = (100, 200, 500, 1000, 2000, 4000)
_REPEATS = 30
_TRIED_ITEMS = 900
_COMPILED_BYTES = 2 << 30  # the largest intermediate of a chunk
NO_CARD = "no CUDA device: this table needs a card (torch.cuda.is_available() is False); nothing was measured"
# Milliseconds for 32 queries on an RTX 6000 Ada.
PAPER_MS = {
    "ml-20m": {
        "brute_force": 3.17,
        "top_k_per_embedding(5)": 1.28,
        "top_k_per_embedding(100)": 2.41,
        "top_k_avg(200)": 0.86,
        "top_k_avg(500)": 0.88,
        "combined_top_k(5,200)": 1.46,
    },
    "books": {
        "brute_force": 181.34,
        "top_k_per_embedding(5)": 26.40,
        "top_k_per_embedding(100)": 29.64,
        "top_k_avg(200)": 0.81,
        "top_k_avg(500)": 0.80,
        "top_k_avg(1000)": 0.87,
        "top_k_avg(2000)": 1.11,
        "top_k_avg(4000)": 1.72,
        "combined_top_k(5,200)": 25.73,
        "combined_top_k(100,1000)": 30.40,
    },
    "nq320k": {"brute_force": 37.74, "top_k_avg(100)": 0.57},
}


def algorithms(num_items: int) -> list[Algorithm]:
    """Return the rows of Table 5 that make sense at X items."""
    averages = [size for size in _AVERAGES if 2 * size < num_items]
    return [
        Algorithm(kind=BruteForce),
        *heuristics((5, 100), averages, ((5, 200), (100, 1000))),
    ]


def rows(
    names: Sequence[str],
    *,
    batches: Sequence[int] = (32, 1),
    seed: int = 0,
    quick: bool = False,
    device: str = "cuda",
    say: Say = lambda line: None,
) -> Iterator[Row]:
    """Yield every algorithm's rows at the named shapes. Device "cpu" tries the code on at most 900 items.

    Raises: ValueError for an unknown shape; RuntimeError without a GPU.
    """
    shapes = [shape_named(name) for name in names]
    if device == "cpu":
        card, quick = Card(device=torch.device("cpu"), rates=STAND_IN, clock=wall_clock), True
        shapes = [replace(one, num_items=min(one.num_items, _TRIED_ITEMS)) for one in shapes]
    elif not torch.cuda.is_available():
        raise RuntimeError(NO_CARD)
    else:
        rates = measure_card()
        card = Card(device=torch.device("cuda"), rates=rates, clock=cuda_events)
        say(
            f"{torch.cuda.get_device_name()}: {2e-12 * rates.multiply_adds:.0f} TFLOP/s in float16, "
            f"{1e-12 * rates.exponentials:.2f} T exponentials/s, {1e-12 * rates.bytes_moved:.2f} TB/s copied"
        )
    for shape in shapes:
        yield from shape_rows(shape, card, batches, seed=seed, quick=quick, say=say)


def shape_rows(
    shape: Shape, card: "Card", batches: Sequence[int], *, seed: int, quick: bool, say: Say = lambda line: None
) -> Iterator[Row]:
    """Yield every algorithm's rows at one shape."""
    return _Run(shape, card, batches, seed=seed, quick=quick, say=say).rows()


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The measured device, its rates, and a clock that waits for it."""

    device: torch.device
    rates: CardRates
    clock: Clock


class _Run:
    def __init__(self, shape: Shape, card: Card, batches: Sequence[int], *, seed: int, quick: bool, say: Say) -> None:
        self._shape, self._card, self._batches, self._say = shape, card, batches, say
        self._repeats = 8 if quick else _REPEATS
        say(f"{shape.name}: items and queries")
        self._scene: Scene = generate(shape, num_queries=(2 if quick else 4) * max(batches), seed=seed)
        device = card.device
        say(f"{shape.name}: exact answers by PyTorch")
        plain = DeviceScorer(self._scene.items, self._scene.pair_gate, device=device, kernels=False)
        self._exact = _in_groups(BruteForce(CardPasses(plain, max_graphs=0)), self._scene, max(batches))
        self._plain_ms = {batch: self._timed_plain(plain, batch) for batch in batches}
        del plain
        torch.cuda.empty_cache()
        self._scorer: DeviceScorer | None = DeviceScorer(self._scene.items, self._scene.pair_gate, device=device)

    def rows(self) -> Iterator[Row]:
        for batch in self._batches:
            yield {
                **self._frame("plain PyTorch, float32, brute force", batch, self._plain_ms[batch]),
                "recall_100": None,
                "relative_hr_100": None,
                "exact": 0.0,
            }
        for one in algorithms(self._shape.num_items):
            yield from self._measured(one)
        self._scorer = None
        yield from self._compiled()

    def _measured(self, algorithm: Algorithm) -> Iterator[Row]:
        assert self._scorer is not None
        name = algorithm.name
        for graphs in (8, 0):
            self._say(f"{self._shape.name}: {name}{'' if graphs else ' without CUDA graphs'}")
            try:
                passes = CardPasses(self._scorer, max_graphs=graphs)
                index = algorithm.kind(passes, **algorithm.sizes)
                answers = _in_groups(index, self._scene, max(self._batches))
                for batch in self._batches:
                    yield self._row(algorithm, index, passes, answers, batch) | {
                        "paper_ms": PAPER_MS.get(self._shape.name, {}).get(name) if batch == 32 else None,
                        "cuda_graphs": bool(graphs),
                    }
                break
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                yield {
                    "shape": self._shape.name,
                    "algorithm": name,
                    "cuda_graphs": bool(graphs),
                    "error": f"{type(error).__name__}: {error}"[:300],
                }

    def _row(self, algorithm: Algorithm, index: CardIndex, passes: CardPasses, answers: TopK, batch: int) -> Row:
        groups = [take_queries(self._scene.queries, start, start + batch) for start in self._starts(batch)]
        asked = [(group, passes.scorer.prepare(group)) for group in groups]
        key, steps = index.steps(RESULTS)
        timed = self._card.clock(
            lambda number: passes.on_device(*asked[number % len(asked)], key, steps), self._repeats
        )
        wall = Times.of(lambda number: index.search(groups[number % len(groups)], RESULTS), range(self._repeats))
        touched = {found.name: float(found.touched.mean()) for found in answers.passes}
        milliseconds = statistics.median(timed)
        work = algorithm.work(self._shape, num_queries=batch, num_items=self._shape.num_items, touched=touched)
        # The first pass reads half precision.
        least = self._card.rates.milliseconds(replace(work, bytes_read=work.bytes_read / 2))
        return {
            **self._frame(algorithm.name, batch, milliseconds),
            "p95_ms": float(np.quantile(timed, 0.95)),
            "end_to_end_ms": wall.median_ms,
            "recall_100": recall(answers.item_indices, self._exact.item_indices),
            "exact": float(np.mean([one.kind == "exact" for one in answers.certificates])),
            "wrong_proofs": _wrong_proofs(answers, self._exact),
            "touched": touched,
            "floor_ms": least,
            "floor_ratio": milliseconds / least,
            "bytes_per_item": index.nbytes / self._shape.num_items,
        }

    def _frame(self, algorithm: str, batch: int, milliseconds: float) -> Row:
        return {
            "shape": self._shape.name,
            "batch": batch,
            "algorithm": algorithm,
            "milliseconds": milliseconds,
            "speedup": self._plain_ms[batch] / milliseconds,
        }

    def _starts(self, batch: int) -> list[int]:
        return list(range(0, len(self._scene.queries) - batch + 1, batch))[:8]

    def _timed_plain(self, plain: DeviceScorer, batch: int) -> float:
        """Time PyTorch in float32: scores a chunk at a time, and their top K."""
        prepared = plain.prepare(take_queries(self._scene.queries, 0, batch))

        def call(_: int) -> object:
            return torch.topk(plain.bounds(prepared)[0], min(RESULTS, plain.num_items), dim=1)

        return statistics.median(self._card.clock(call, max(3, self._repeats // 8)))

    def _compiled(self) -> Iterator[Row]:
        """Measure the plain formula compiled by `torch.compile`, without a bound on its error."""
        device, batch = self._card.device, max(self._batches)
        group = take_queries(self._scene.queries, 0, batch)
        backend = "inductor" if device.type == "cuda" else "eager"
        for dtype in (torch.float32, torch.float16):
            name = f"plain PyTorch, {str(dtype)[6:]}, torch.compile"
            self._say(f"{self._shape.name}: {name}")
            try:
                torch.cuda.empty_cache()
                best = _compiled_best(self._scene, group, device=device, dtype=dtype, backend=backend)
                row = self._frame(name, batch, statistics.median(self._card.clock(best, 3)))
                yield {**row, "recall_100": recall(best(0).cpu().numpy(), self._exact.item_indices[:batch])}
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                yield {"shape": self._shape.name, "algorithm": name, "error": f"{type(error).__name__}: {error}"[:300]}


def _compiled_best(
    scene: Scene, queries: QueryStates, *, device: torch.device, dtype: torch.dtype, backend: str
) -> Callable[[int], torch.Tensor]:
    """Return a call that finds the top K rows (B, K) by the formula in `dtype`, chunk by chunk."""

    def moved(array: npt.NDArray[np.float32] | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(np.array(array)).to(device, dtype)

    items, gate = torch.from_numpy(np.array(scene.items.components)).to(device, dtype), moved(scene.items.gate)
    components, query_gate = torch.from_numpy(np.array(queries.components)).to(device, dtype), moved(queries.gate)
    weights = None if scene.pair_gate is None else gate_weights(scene.pair_gate, device, dtype)

    def plain(some: torch.Tensor, some_gate: torch.Tensor | None) -> torch.Tensor:
        cosines = torch.einsum("bqd,xpd->bxqp", components, some).flatten(2)
        return mixture(cosines, None if query_gate is None else query_gate[:, None], some_gate, weights)

    compiled = torch.compile(plain, dynamic=False, backend=backend)
    shape, out = scene.shape, torch.empty((len(components), len(items)), dtype=dtype, device=device)
    widest = max(shape.gate_hidden, shape.num_pairs) * len(components) * dtype.itemsize
    # All chunks have one size, so that one program is compiled. The last chunk overlaps the one before.
    step = -(-len(items) // -(-len(items) * widest // _COMPILED_BYTES))

    def call(_: int) -> torch.Tensor:
        for start in range(0, len(items), step):
            chunk = slice(min(start, len(items) - step), min(start, len(items) - step) + step)
            out[:, chunk] = compiled(items[chunk], None if gate is None else gate[None, chunk])
        return torch.topk(out, RESULTS, dim=1).indices

    return call


def _in_groups(index: CardIndex, scene: Scene, size: int) -> TopK:
    found = [
        index.search(take_queries(scene.queries, start, start + size), RESULTS)
        for start in range(0, len(scene.queries), size)
    ]
    passes = [
        replace(parts[0], touched=np.concatenate([part.touched for part in parts]))
        for parts in zip(*(answer.passes for answer in found), strict=True)
    ]
    return TopK(
        item_indices=np.concatenate([answer.item_indices for answer in found]),
        scores=np.concatenate([answer.scores for answer in found]),
        certificates=tuple(one for answer in found for one in answer.certificates),
        passes=tuple(passes),
    )


def _wrong_proofs(answers: TopK, exact: TopK) -> int:
    same_rows: npt.NDArray[np.bool_] = (answers.item_indices == exact.item_indices).all(axis=1)
    same_scores = np.isclose(answers.scores, exact.scores, rtol=0, atol=1e-9).all(axis=1)
    proven = np.array([one.kind == "exact" for one in answers.certificates])
    return int((proven & ~(same_rows & same_scores)).sum())


def measure(
    shapes: Sequence[str], *, batches: Sequence[int], seed: int, quick: bool, as_json: bool, device: str = "cuda"
) -> int:
    """Print a line per row; with `as_json`, print an object with `rows` at the end. Return 1 after a failure, else 0.

    Raises: see `rows`.
    """
    # The largest first: they matter most if time runs out.
    names = shapes or ["books", "ml-20m", "nq320k", "ml-1m"]
    found = []
    started = time.perf_counter()

    def say(line: str) -> None:
        sys.stderr.write(f"[{time.perf_counter() - started:6.1f} s] {line}\n")
        sys.stderr.flush()

    for row in rows(names, batches=batches, seed=seed, quick=quick, device=device, say=say):
        found.append(row)
        sys.stdout.write(table_line(row) + "\n")
        sys.stdout.flush()
    if as_json:
        record = {"rows": found, "device": torch.cuda.get_device_name() if device == "cuda" else device, "seed": seed}
        sys.stdout.write(json.dumps(record) + "\n")
    failed = any("milliseconds" not in row and row.get("cuda_graphs") is False for row in found)
    wrong = sum(row.get("wrong_proofs", 0) for row in found)
    return 1 if failed or wrong else 0


def table_line(row: Row) -> str:
    """Return a row as one line of a table."""
    if "error" in row:
        return f"{row['shape']:8} {row['algorithm']:36} failed: {row['error']}"

    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value is None else format(value, form)

    return (
        f"{row['shape']:8} B={row['batch']:<3} {row['algorithm']:36} {row['milliseconds']:9.3f} ms "
        f"(wall {number('end_to_end_ms', '.2f')}, paper {number('paper_ms', '.2f')}) x{row['speedup']:.1f} "
        f"recall {number('recall_100', '.4f')} exact {number('exact', '.2f')} "
        f"roofline {number('floor_ms', '.3f')} ms = 1/{number('floor_ratio', '.1f')} "
        f"wrong {number('wrong_proofs', 'd')}"
    )

"""`freshet bench generation`: the time of generation by vocabulary size, next to full softmax and SVD-softmax.

Letters: V vocabulary size, D width, s positions, U scored tokens, K results.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.generation.decoding import decode
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.report import Report, Request, Say, filled, report_of, written
from services.offline.evaluation.common.roofline import Rates, measure_rates
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.generation.proof import prove_catalogue
from services.offline.evaluation.generation.svd_softmax import Floats, SvdSoftmax, Tokens
from services.offline.evaluation.generation.world import MAKING, PhraseWorld, WorldShape, make_world

FULL, SHORTLIST = "full softmax", "shortlist"


def page(report: dict[str, Any]) -> str:
    """Return generation.md of a report; a person may add a `remark` to the stored report."""
    names = {"making": MAKING, "full_softmax": FULL, "shortlist": SHORTLIST}
    return filled(Path(__file__).with_name("page.md.j2"), **{"remark": ""} | report | names)


Row = dict[str, Any]

_SIZES = (128_000, 1_000_000, 5_000_000)
_QUICK_SIZES = (32_000, 128_000)
_QUICK_SHAPE: dict[str, int] = {"num_identifiers": 50_000, "vectors": 64, "set_tokens": 1500, "topics": 256}
_SETS, _BEAMS, _K, _TOP = 5, 256, 10, 10
_WINDOW, _TAKEN = 64, 3000  # SVD-softmax: leading directions, tokens per position


def run(request: Request, *, sizes: tuple[int, ...] = (), num_queries: int | None = None) -> Report:
    """Write generation.{md,json}, after checking that every answer to `num_queries` queries is in the catalogue.

    `num_queries`: by default 100,000, and 5,000 when quick. Raises: ValueError if MiniLM's weights are not installed.
    """
    began = time.perf_counter()
    rates = measure_rates()
    wanted = num_queries or (5_000 if request.quick else 100_000)
    proof = prove_catalogue(num_queries=wanted, seed=request.seed, say=request.say)
    chosen = sizes or (_QUICK_SIZES if request.quick else _SIZES)
    found = rows(sizes=chosen, quick=request.quick, seed=request.seed, rates=rates, say=request.say)
    report = report_of("generation", request, found, began)
    report |= {"proof": proof.plain(), "rates": asdict(rates)}
    return written(request, report, page)


@dataclass(frozen=True, slots=True)
class _Method:
    """A way to choose the tokens to score.

    tokens(x) returns the chosen tokens for a query x (1 + s, D), ascending, with [PAD]. bytes_read: the bytes that the
    choice reads, without the chosen tokens' rows. nbytes: memory in addition to the output layer's.
    """

    name: str
    setting: str
    tokens: Callable[[Floats], Tokens]
    bytes_read: float = 0.0
    nbytes: int = 0


def rows(*, sizes: tuple[int, ...], quick: bool, seed: int, rates: Rates, say: Say = lambda line: None) -> list[Row]:
    """Return a row per size and method; milliseconds are of single queries."""
    found: list[Row] = []
    for size in sizes:
        shape = WorldShape(num_tokens=size, **(_QUICK_SHAPE if quick else {}))
        world = make_world(shape, seed, say=say)
        found += list(_of_world(world, quick=quick, seed=seed, rates=rates, say=say))
    for row in found:
        base = [other for other in found if (other["phrases"], other["method"]) == (row["phrases"], FULL)]
        row["speedup"] = round(base[0]["scores cpu ms"] / row["cpu ms"], 2)
    return found


def _of_world(world: PhraseWorld, *, quick: bool, seed: int, rates: Rates, say: Say) -> Iterator[Row]:
    size = world.shape.num_tokens
    judged, timed = (8, 20) if quick else (20, 60)
    x, wanted = world.queries(timed, seed + 1)
    every = np.arange(size, dtype=np.int32)
    say(f"{size:,} phrases: full softmax")
    truths = []
    for one in x[:judged]:
        scores = world.layer.scores(one[1:])
        best = np.argpartition(-scores, _TOP, axis=1)[:, :_TOP]
        exact = decode(scores, every, world.trie, beams=_BEAMS, results=_K)
        truths.append((best, exact.identifiers.tolist()))
        del scores
    for method in _methods(world, every):
        say(f"{size:,} phrases: {method.name}")
        yield _row(method, world, x, wanted, truths, judged if method.name == FULL else timed, rates)


def _row(
    method: _Method,
    world: PhraseWorld,
    x: Floats,
    wanted: npt.NDArray[np.int64],
    truths: list[tuple[npt.NDArray[np.int64], list[int]]],
    timed: int,
    rates: Rates,
) -> Row:
    whole, scoring = Times(), Times()

    def score(one: Floats) -> tuple[Tokens, Floats]:
        tokens = method.tokens(one)
        return tokens, (world.layer.scores(one[1:]) if method.name == FULL else world.layer.scores(one[1:], tokens))

    def answer(one: Floats) -> tuple[Tokens, list[int]]:
        tokens, scores = scoring.call(score, one)
        found = decode(scores, tokens, world.trie, beams=_BEAMS, results=_K)
        return tokens, found.identifiers.tolist()

    tokens, scores = score(x[-1])  # warm
    decode(scores, tokens, world.trie, beams=_BEAMS, results=_K)
    kept, answers = zip(*(whole.call(answer, one) for one in x[:timed]), strict=True)
    lengths = np.diff(world.offsets)
    recalls = []
    for number, (best, _) in enumerate(truths):
        positions = int(lengths[wanted[number]])  # the remaining positions have padding and noise
        recalls.append(np.isin(best[:positions], kept[number]).mean())
    union = float(np.mean([len(tokens) for tokens in kept]))
    least = (method.bytes_read + union * (world.layer.width + 4)) / rates.bytes_read
    return {
        "phrases": world.shape.num_tokens,
        "method": method.name,
        "setting": method.setting,
        "union": round(union),
        "ms": round(whole.median_ms, 3),
        "p95 ms": round(whole.quantile_ms(0.95), 3),
        "cpu ms": round(whole.cpu_ms, 3),
        "scores cpu ms": round(scoring.cpu_ms, 3),
        "floor ms": round(1e3 * least, 3),
        "top 10 tokens": round(float(np.mean(recalls)), 4),
        "top 10 identifiers": round(recall(answers[: len(truths)], [exact for _, exact in truths]), 4),
        "found its own": round(float(np.mean([int(one) in got for one, got in zip(wanted, answers, strict=False)])), 4),
        "extra MB": round(method.nbytes / 1e6, 1),
    }


def _methods(world: PhraseWorld, every: Tokens) -> Iterator[_Method]:
    size, width, shortlist = world.shape.num_tokens, world.layer.width, world.shortlist
    m, r = shortlist.sets.shape
    yield _Method(FULL, "every phrase", lambda x: every)
    yield _Method(
        SHORTLIST,
        f"m {m}, r {r}, k {_SETS}",
        lambda x: shortlist.tokens(x[0], _SETS),
        4 * m * width + 4 * _SETS * r + size / 8,
        shortlist.nbytes,
    )
    low = SvdSoftmax(world.layer, window=_WINDOW, taken=_TAKEN)
    setting = f"window {_WINDOW}, {_TAKEN} per position"
    yield _Method("low rank (SVD-softmax)", setting, low.tokens, size * (_WINDOW + 4), low.nbytes)

"""`freshet bench generation`: the cost of identifiers as the vocabulary grows, next to full softmax and approximations.

Letters: V vocabulary size, D width, s positions, U tokens scored, K results.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.generation.decoding import decode
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.report import Report, Request, Say, filled, report_of, written
from services.offline.evaluation.common.roofline import Rates, measure_rates
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.generation.proof import prove_catalogue
from services.offline.evaluation.generation.softmax_baselines import (
    Clustered,
    LowRank,
    ShortlistTokens,
    TokenSource,
    WholeVocabulary,
)
from services.offline.evaluation.generation.world import MAKING, PhraseWorld, WorldShape, make_world
from services.offline.training.codebooks.k_means import nearest, product_k_means

_STORED_ONLY = (500_000, 2_000_000)  # only in the stored report
FULL, SHORTLIST = "full softmax", "shortlist"


def page(report: dict[str, Any]) -> str:
    """Return generation.md of a report; a person may add a `remark` to the stored report."""
    names = {"making": MAKING, "stored_only": _STORED_ONLY, "full_softmax": FULL, "shortlist": SHORTLIST}
    return filled(Path(__file__).with_name("page.md.j2"), **{"remark": ""} | report | names)


Row = dict[str, Any]
Floats = npt.NDArray[np.float32]

_SIZES = (128_000, 500_000, 1_000_000, 2_000_000, 5_000_000)
_QUICK_SIZES = (32_000, 128_000)
_QUICK_SHAPE: dict[str, int] = {"num_identifiers": 50_000, "vectors": 64, "set_tokens": 1500, "topics": 256}
_SETS, _BEAMS, _K, _TOP = 5, 256, 10, 10
_TAKEN = 3000  # per position, by the position-wise methods

_CLUSTERED_UP_TO = 2_000_000  # phrases: more take minutes


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
    report |= {"growth": growth(found), "proof": proof.plain(), "rates": asdict(rates)}
    return written(request, report, page)


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    setting: str
    source: TokenSource
    bytes_read: float  # to find the tokens, without their own rows


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


def growth(found: list[Row]) -> Row | None:
    """Return the shortlist's latency at the largest vocabulary over the smallest."""
    mine = [row for row in found if row["method"] == SHORTLIST]
    if len(mine) < 2:
        return None
    small, large = mine[0], mine[-1]
    return {
        "from": small["phrases"],
        "to": large["phrases"],
        "cpu ms from": small["cpu ms"],
        "cpu ms to": large["cpu ms"],
        "ratio": round(large["cpu ms"] / small["cpu ms"], 2),
    }


def _of_world(world: PhraseWorld, *, quick: bool, seed: int, rates: Rates, say: Say) -> Iterator[Row]:
    size = world.shape.num_tokens
    judged, timed = (8, 20) if quick else (20, 60)
    x, wanted = world.queries(timed, seed + 1)
    full = WholeVocabulary(world.layer)
    every = full.tokens(x[0])
    say(f"{size:,} phrases: full softmax")
    truths = []
    for one in x[:judged]:
        scores = world.layer.scores(one[1:])
        best = np.argpartition(-scores, _TOP, axis=1)[:, :_TOP]
        exact = decode(scores, every, world.trie, beams=_BEAMS, results=_K)
        truths.append((best, exact.identifiers.tolist()))
        del scores
    for method in _methods(world, full, seed, say):
        say(f"{size:,} phrases: {method.name}")
        yield _row(method, world, x, wanted, truths, judged if method.source is full else timed, rates)


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

    def score(one: Floats) -> tuple[npt.NDArray[np.int32], Floats]:
        tokens = method.source.tokens(one)
        return tokens, (world.layer.scores(one[1:]) if method.name == FULL else world.layer.scores(one[1:], tokens))

    def answer(one: Floats) -> tuple[npt.NDArray[np.int32], list[int]]:
        tokens, scores = scoring.call(score, one)
        found = decode(scores, tokens, world.trie, beams=_BEAMS, results=_K)
        return tokens, found.identifiers.tolist()

    tokens, scores = score(x[-1])  # warm
    decode(scores, tokens, world.trie, beams=_BEAMS, results=_K)
    kept, answers = zip(*(whole.call(answer, one) for one in x[:timed]), strict=True)
    lengths = np.diff(world.offsets)
    recalls, firsts = [], []
    for number, (best, exact) in enumerate(truths):
        positions = int(lengths[wanted[number]])  # then padding and noise
        recalls.append(np.isin(best[:positions], kept[number]).mean())
        firsts.append(exact[:1] == answers[number][:1])
    union = float(np.mean([len(tokens) for tokens in kept]))
    least = (method.bytes_read + union * (world.layer.width + 4)) / rates.bytes_read
    return {
        "phrases": world.shape.num_tokens,
        "weights": "synthetic, int8",
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
        "first identifier": round(float(np.mean(firsts)), 4),
        "found its own": round(float(np.mean([int(one) in got for one, got in zip(wanted, answers, strict=False)])), 4),
        "extra MB": round(method.source.nbytes / 1e6, 1),
    }


def _methods(world: PhraseWorld, full: WholeVocabulary, seed: int, say: Say) -> Iterator[_Method]:
    layer, size, width = world.layer, world.shape.num_tokens, world.layer.width
    yield _Method(FULL, "every phrase", full, 0)
    shortlist = world.shortlist
    m, r = shortlist.sets.shape
    for sets in (_SETS, 2 * _SETS) if size <= 500_000 else (_SETS,):
        read = 4 * m * width + 4 * sets * r + size / 8
        name = SHORTLIST if sets == _SETS else f"{SHORTLIST}, twice the sets"
        yield _Method(name, f"m {m}, r {r}, k {sets}", ShortlistTokens(shortlist, sets), read)
    for window in (64, 128) if size <= 500_000 else (64,):
        say(f"{size:,} phrases: building low rank")
        low = LowRank(layer, window=window, taken=_TAKEN)
        yield _Method("low rank (SVD-softmax)", f"window {window}, {_TAKEN} per position", low, size * (window + 4))
        del low
    if size <= _CLUSTERED_UP_TO:
        say(f"{size:,} phrases: building clusters")
        centres, owners = _cells(world, max(64, min(1024, size // 500)), seed)
        probes = max(1, round(_TAKEN * len(centres) / size))
        read = 4 * len(centres) * width * (len(world.queries(1, 0)[0][0]) - 1)
        yield _Method(
            "clustered weights",
            f"{len(centres)} cells, {probes} per position",
            Clustered(layer, centres, owners, probes=probes),
            read,
        )


def _cells(world: PhraseWorld, count: int, seed: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    layer, size = world.layer, world.shape.num_tokens
    chosen = np.sort(np.random.default_rng(seed).integers(0, size, size=min(size, 30 * count)))
    sample = torch.from_numpy(layer.decoded(chosen))
    centres = product_k_means(sample, 1, count, torch.Generator().manual_seed(seed))
    parts = (torch.from_numpy(layer.decoded(slice(begin, begin + (1 << 16)))) for begin in range(0, size, 1 << 16))
    return centres[0].numpy(), torch.cat([nearest(part[None], centres)[0] for part in parts]).numpy()

"""`freshet bench quantization`: this library's score-aware codes next to FAISS's at the same number of bits.

Rows are as in figures 3 and 4a and table 1 of arXiv:1908.10396, on real embeddings with held-out queries: the
score-aware loss, recall 1@N, and the relative error of the best inner product. Scores are exact inner products with
decoded vectors.

Letters: X items, B queries, d width, m subspaces.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import FloatArray
from services.offline.evaluation.common.embeddings import EmbeddingSet, EmbeddingSource, minilm_queries, sift
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.quantization import search
from services.offline.training.codebooks.product_quantizer import DEFAULT_THRESHOLD, train_product_quantizer
from services.offline.training.codebooks.score_aware import score_aware_loss

Row = dict[str, Any]
Encoder = Callable[[FloatArray], npt.NDArray[np.floating]]

_TEMPLATE = Path(__file__).with_name("page.md.j2")
RECALL_DEPTHS = (1, 10, 100)
OURS, UNROTATED = "freshet", "freshet without rotation"
FAISS_PQ, FAISS_OPQ, FAISS_LSQ = "faiss pq", "faiss opq", "faiss lsq"
METHODS = (OURS, UNROTATED, FAISS_PQ, FAISS_OPQ, FAISS_LSQ)
_SWEEP = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
_OPQ_TRAINING_ITEMS = 8_192


class Rate(NamedTuple):
    """A bit rate: m codes of 4 or 8 bits."""

    num_subspaces: int
    code_bits: int

    @property
    def bits(self) -> int:
        return self.num_subspaces * self.code_bits


_SIFT_RATE = Rate(32, 4)


def run(request: Request) -> Report:
    """Compare codes at equal numbers of bits, and search end to end; writes quantization.{md,json}.

    Raises: ValueError naming a missing data set, with what to do.
    """
    began = perf_counter()
    found = rows(request)
    request.say("search end to end")
    searched = search.rows(request.quick, request.seed)
    report = report_of("quantization", request, [*found, *searched], began)
    return written(request, report, lambda report: filled(_TEMPLATE, **report | {"rows": [*summary(found), *searched]}))


def compare(
    embeddings: EmbeddingSet,
    rate: Rate,
    *,
    methods: Iterable[str] = (OURS, UNROTATED, FAISS_PQ, FAISS_OPQ),
    threshold: float = DEFAULT_THRESHOLD,
    seed: int = 0,
) -> list[Row]:
    """Return one row per method at one bit rate.

    This library trains and encodes with `threshold`. Every method's loss uses the default threshold, and is
    divided by the loss of decoding every item to zero. LSQ has 8-bit codes only; its m is the rate's bits / 8.
    Raises: ValueError for an unknown method.
    """
    items = embeddings.items
    unit = float(np.sqrt(np.mean(np.sum(items.astype(np.float64) ** 2, axis=1))))
    nothing = float(score_aware_loss(items, np.zeros_like(items), DEFAULT_THRESHOLD * unit).sum())
    truth = _Truth(embeddings)
    found = []
    for method in methods:
        started = perf_counter()
        encode = _trained(method, items, rate, threshold, seed)
        trained = perf_counter()
        decoded = np.asarray(encode(items), dtype=np.float32)
        encoded = perf_counter()
        found.append(
            {
                "set": embeddings.name,
                "items": len(items),
                "width": items.shape[1],
                "queries": len(embeddings.queries),
                "algorithm": method,
                "bits": rate.bits,
                "code_bits": 8 if method == FAISS_LSQ else rate.code_bits,
                "threshold": threshold if method in (OURS, UNROTATED) else None,
                "seed": seed,
                "score_aware_loss": float(score_aware_loss(items, decoded, DEFAULT_THRESHOLD * unit).sum()) / nothing,
                **truth.measured(decoded),
                "train_seconds": trained - started,
                "encode_seconds": encoded - trained,
            }
        )
    return found


def rows(request: Request) -> list[Row]:
    """Return rows of `kind` "rate" (one bit rate per set), and on sift-5k also "lsq" and "threshold" (a sweep of T).

    quick: one seed and at most 10,000 items; else three seeds and up to 20,000 items. LSQ takes about m^2 times as many
    steps per point as product quantization, so it has only 64 bits and one seed.
    Raises: ValueError if a set's file or the embedding model is missing.
    """
    source, quick, seed, say = EmbeddingSource(), request.quick, request.seed, request.say
    found: list[Row] = []
    # FAISS's rotation needs 50 iterations, which take longer than all the rest.
    methods = (OURS, UNROTATED, FAISS_PQ) if quick else (OURS, UNROTATED, FAISS_PQ, FAISS_OPQ)
    for run in range(seed, seed + (1 if quick else 3)):
        questions = minilm_queries(source, seed=run, num_items=10_000 if quick else 20_000)
        for embeddings, rate in ((sift(source, seed=run), _SIFT_RATE), (questions, Rate(48, 4))):
            say(f"{embeddings.name}, {rate.bits} bits, seed {run}")
            found += [{"kind": "rate", **row} for row in compare(embeddings, rate, methods=methods, seed=run)]
    descriptors, rate = sift(source, seed=seed), Rate(8, 8)
    say(f"{descriptors.name}, LSQ at {rate.bits} bits")
    methods = (OURS, FAISS_PQ, FAISS_LSQ)
    found += [{"kind": "lsq", **row} for row in compare(descriptors, rate, methods=methods, seed=seed)]
    for threshold in _SWEEP[:: 3 if quick else 1]:
        say(f"{descriptors.name}, T = {threshold}")
        swept = compare(descriptors, _SIFT_RATE, methods=(OURS,), threshold=threshold, seed=seed)
        found += [{"kind": "threshold", **row} for row in swept]
    return found


def summary(found: Iterable[Row]) -> list[Row]:
    """Join rows that differ only in the seed: means, and spreads (largest minus smallest)."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        key = tuple(row[name] for name in ("kind", "set", "items", "bits", "code_bits", "algorithm", "threshold"))
        groups.setdefault(key, []).append(row)
    joined = []
    for group in groups.values():
        first = {name: value for name, value in group[0].items() if name != "seed"}
        for name, value in group[0].items():
            if isinstance(value, float) and name != "threshold":
                values = [row[name] for row in group]
                first[name] = float(np.mean(values))
                first[f"{name}_spread"] = max(values) - min(values)
        joined.append({**first, "seeds": len(group)})
    return joined


class _Truth:
    def __init__(self, embeddings: EmbeddingSet) -> None:
        self._queries = np.ascontiguousarray(embeddings.queries)
        exact = self._queries @ embeddings.items.T
        self._best = exact.argmax(axis=1)
        self._score = np.take_along_axis(exact, self._best[:, None], axis=1)[:, 0]

    def measured(self, decoded: FloatArray) -> dict[str, float]:
        # Score each distinct vector once: a matrix product may give equal rows different scores.
        vectors, places = np.unique(decoded, axis=0, return_inverse=True)
        scores = (self._queries @ vectors.T)[:, places.ravel()]
        of_best = np.take_along_axis(scores, self._best[:, None], axis=1)
        # Equal codes have equal scores; half of the tied items count as above, a random order's mean.
        above = (scores > of_best).sum(axis=1) + ((scores == of_best).sum(axis=1) - 1) / 2
        recall = {f"recall_1_at_{depth}": float((above < depth).mean()) for depth in RECALL_DEPTHS}
        errors = np.abs(self._score - of_best[:, 0]) / np.abs(self._score)
        return {**recall, "relative_error": float(errors.mean())}


def _trained(method: str, items: FloatArray, rate: Rate, threshold: float, seed: int) -> Encoder:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {METHODS}")
    if method in (OURS, UNROTATED):
        ours = train_product_quantizer(
            items,
            num_subspaces=rate.num_subspaces,
            code_bits=rate.code_bits,
            threshold=threshold,
            seed=seed,
            rotate=method == OURS,
        )
        return lambda vectors: ours.coded(vectors).decoded()
    import faiss

    if method == FAISS_LSQ:
        local_search: Any = faiss.LocalSearchQuantizer(items.shape[1], rate.bits // 8, 8)
        local_search.random_seed = seed + 1
        local_search.train(items)
        return lambda vectors: local_search.decode(local_search.compute_codes(vectors))
    product: Any = faiss.ProductQuantizer(items.shape[1], rate.num_subspaces, rate.code_bits)
    product.cp.seed = seed + 1
    # Suppress the warning about fewer than 39 points per codeword: the row has `items`.
    product.cp.min_points_per_centroid = 1
    if method == FAISS_PQ:
        product.train(items)
        return lambda vectors: product.decode(product.compute_codes(vectors))
    # This library trains 4-bit codes on as many items. FAISS's 65,536 take many minutes for wide vectors.
    sample = items[np.random.default_rng(seed).permutation(len(items))[:_OPQ_TRAINING_ITEMS]]
    turn: Any = faiss.OPQMatrix(items.shape[1], rate.num_subspaces)
    turn.pq = product
    turn.train(sample)
    product.train(turn.apply(items))
    return lambda vectors: turn.reverse_transform(product.decode(product.compute_codes(turn.apply(vectors))))

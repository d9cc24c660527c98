"""Check exact answers and certificates against float64 scores of every item.

Catalogues are many small ones, drawn to be difficult (copies, near ties, zero components, gates from none to huge,
filters), and one of full size.

Letters: B queries, X items, K results.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.exact.two_pass import ExactLowPrecision
from services.algorithms.indexes.protocol import Index, TopK, take_queries
from services.algorithms.indexes.quantized.tangents import QuantizedTangents
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import SHAPES
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.retrieval.algorithms import EXACT

Rng = np.random.Generator
Doubles = npt.NDArray[np.float64]

# The float64 formula's own error.
_SAME = 1e-10
_SHAPES = ((1, 1, 12), (2, 2, 8), (4, 2, 8), (3, 3, 5), (2, 5, 6))
_SMALL_POOL = 50  # so that bounds can drop items in a catalogue of a few hundred
_LARGEST_REFERENCE = 4_000_000  # elements of (B, X, P) at a time


@dataclass(kw_only=True, slots=True)
class Proof:
    """Per algorithm: wrong answers, certificates by kind, and the mean share of items scored in full."""

    seed: int
    catalogues: int = 0
    queries: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    certificates: dict[str, dict[str, int]] = field(default_factory=dict)
    scored_share: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.queries > 0 and not any(self.wrong.values())

    def add(self, index: Index, answer: TopK, exact: Doubles, k: int, *, must_be_exact: bool) -> None:
        """Check and count the answers to B queries. exact (B, X): the scores of all items."""
        kinds = self.certificates.setdefault(index.name, {})
        before, asked = sum(kinds.values()), len(answer.certificates)
        for certificate in answer.certificates:
            kinds[certificate.kind] = kinds.get(certificate.kind, 0) + 1
        wrong = wrong_answers(answer, exact, k, must_be_exact=must_be_exact)
        self.wrong[index.name] = self.wrong.get(index.name, 0) + wrong
        full = [done.touched for done in answer.passes if done.name in ("full", "threshold")]
        share = float(np.sum(full, axis=0).sum() / exact.shape[1])
        self.scored_share[index.name] = (self.scored_share.get(index.name, 0.0) * before + share) / (before + asked)


def prove(request: Request, *, at_scale: bool) -> dict[str, Any]:
    """Check 100,000 random queries (2,000 when quick) on small catalogues; return results, and whether they hold.

    at_scale: also check 100 queries at the Books shape, unless quick.
    """
    wanted = 2_000 if request.quick else 100_000

    def said(done: int) -> None:
        request.say(f"answers against float64: {done:,} of {wanted:,} queries")

    small = prove_on_small_catalogues(num_queries=wanted, seed=request.seed, report=said)
    found: dict[str, Any] = {"seed": request.seed, "small": asdict(small), "holds": small.holds}
    if at_scale and not request.quick:
        request.say("answers against float64 at the Books shape")
        scene = generate(SHAPES["books"], num_queries=100, seed=request.seed)
        scorer = MolScorer(scene.items, scene.pair_gate)
        strategies = [kind(scorer) for kind in (BruteForce, ExactLowPrecision, Exact)]
        books = prove_at_scale(scorer, scene.queries, strategies, seed=request.seed)
        found |= {"books": asdict(books), "holds": small.holds and books.holds}
    return found


def prove_on_small_catalogues(
    *, num_queries: int = 100_000, largest: int = 5_000, seed: int, report: Callable[[int], None] | None = None
) -> Proof:
    """Check all exact strategies and the heuristics over catalogues of up to `largest` items.

    A catalogue gets 500 queries; half of the searches are filtered.
    """
    started = time.perf_counter()
    rng = np.random.default_rng(seed)
    proof = Proof(seed=seed)
    while proof.queries < num_queries:
        count = int(np.exp(rng.uniform(np.log(20), np.log(largest)))) + 1
        batch = min(500, num_queries - proof.queries)
        queries, items, gate = _awkward(rng, count, batch)
        k = int(rng.choice([1, 10, 100]))
        allowed = rng.random(count) < 0.5 if rng.random() < 0.5 else None
        exact = _reference(queries, items, gate)
        if allowed is not None:
            exact[:, ~allowed] = -np.inf
        scorer = MolScorer(items, gate)
        one, two = {"pool_size": _SMALL_POOL}, {"pair_pool_size": _SMALL_POOL, "average_pool_size": _SMALL_POOL}
        strategies: list[tuple[Any, dict[str, int]]] = [
            (BruteForce, {}),
            *((kind, one) for kind in (*EXACT, TopKAvg, TopKPerEmbedding)),
            *((CombinedTopK, two), (QuantizedTangents, one)),
        ]
        for kind, sizes in strategies:
            index = kind(scorer, **sizes)
            answer = index.search(queries, k, allowed)
            proof.add(index, answer, exact, k, must_be_exact=kind in (BruteForce, *EXACT))
        proof.catalogues += 1
        proof.queries += batch
        if report is not None:
            report(proof.queries)
    proof.seconds = time.perf_counter() - started
    return proof


def prove_at_scale(
    scorer: MolScorer, queries: QueryStates, indexes: Sequence[Index], *, k: int = 100, seed: int
) -> Proof:
    """Check `indexes` over one large catalogue, four queries at a time."""
    started = time.perf_counter()
    proof = Proof(seed=seed, catalogues=1)
    everything = np.arange(scorer.num_items)
    for start in range(0, len(queries), 4):
        group = take_queries(queries, start, start + 4)
        exact = np.stack(scorer.scores_float64_at(group, [everything] * len(group)))
        for index in indexes:
            proof.add(index, index.search(group, k), exact, k, must_be_exact=True)
        proof.queries += len(group)
    proof.seconds = time.perf_counter() - started
    return proof


def wrong_answers(answer: TopK, exact: Doubles, k: int, *, must_be_exact: bool) -> int:
    """Return the number of answers that contradict `exact`: scores (B, X), -inf for items that are not allowed.

    An exact answer must be the top `k`; a gap must hold for every omitted item; an estimate claims nothing.
    """
    wrong = 0
    for query, row in enumerate(exact):
        found = answer.item_indices[query][answer.item_indices[query] >= 0]
        size = min(k, int((row > -np.inf).sum()))
        certificate = answer.certificates[query]
        right = (
            len(found) == size == len(np.unique(found))
            and bool((np.abs(answer.scores[query][:size] - row[found]) <= _SAME).all())
            and (certificate.kind == "exact" or not must_be_exact)
        )
        if right and certificate.kind == "exact":
            best = np.sort(np.partition(row, len(row) - size)[len(row) - size :])[::-1] if size else np.zeros(0)
            right = bool((np.abs(row[found] - best) <= _SAME).all())
        elif right and certificate.gap is not None:
            left_out = np.delete(row, found)
            right = bool(left_out.max(initial=-np.inf) <= row[found[-1]] + certificate.gap + _SAME)
        wrong += not right
    return wrong


def _awkward(rng: Rng, count: int, batch: int) -> tuple[QueryStates, ItemStates, PairGate | None]:
    p_q, p_x, d = _SHAPES[rng.integers(len(_SHAPES))]
    pairs = p_q * p_x
    components = _unit(rng.normal(size=(count, 1, d)) + rng.choice([0.01, 0.3, 2.0]) * rng.normal(size=(count, p_x, d)))
    copies = rng.integers(count, size=count // 5)
    components[copies] = components[rng.integers(count, size=len(copies))]
    near = rng.integers(count, size=count // 10)
    components[near] = components[0] + rng.normal(size=(len(near), p_x, d)) * 1e-7
    components[rng.integers(count)] = 0
    query_components = _unit(rng.normal(size=(batch, p_q, d)))
    query_components[: batch // 10] = components[rng.integers(count, size=batch // 10)][:, rng.integers(p_x, size=p_q)]
    query_components[rng.integers(batch), 0] = 0
    if pairs == 1:
        return QueryStates(components=query_components), ItemStates(components=components), None
    scale, network = rng.choice([0.1, 1.0, 30.0]), rng.choice([0.02, 0.2, 2.0])
    hidden = int(rng.integers(1, 12))
    gate = PairGate(
        hidden_weight=_floats(rng.normal(size=(hidden, pairs))),
        hidden_bias=_floats(rng.normal(size=hidden)),
        out_weight=_floats(network * rng.normal(size=(pairs, hidden))),
        out_bias=_floats(network * rng.normal(size=pairs)),
    )
    # Half of the gates are around SiLU's minimum, where its slope changes sign.
    shift = rng.choice([0.0, -1.2785])
    item_gate = _floats(shift + scale * rng.normal(size=(count, pairs)))
    query_gate = _floats(1 + 0.5 * rng.normal(size=(batch, pairs)))
    return (
        QueryStates(components=query_components, gate=query_gate),
        ItemStates(components=components, gate=item_gate),
        gate,
    )


def _reference(queries: QueryStates, items: ItemStates, gate: PairGate | None) -> Doubles:
    pairs = queries.components.shape[1] * items.components.shape[1]
    step = max(1, _LARGEST_REFERENCE // (len(items) * pairs))
    groups = (take_queries(queries, start, start + step) for start in range(0, len(queries), step))
    return np.concatenate([mol_scores_reference(group, items, gate).numpy() for group in groups])


def _unit(array: Doubles) -> npt.NDArray[np.float32]:
    return _floats(array / np.maximum(np.linalg.norm(array, axis=-1, keepdims=True), 1e-30))


def _floats(array: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    return np.asarray(array, dtype=np.float32)

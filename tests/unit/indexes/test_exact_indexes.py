"""The exact strategies equal BruteForce to the last bit, drop what they claim to drop, and choose by measurement."""

from itertools import count, cycle
from statistics import median
from typing import Any

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.exact.cheapest import Exact, carry_over
from services.algorithms.indexes.exact.two_pass import ExactAlgorithm1, ExactLowPrecision
from services.algorithms.indexes.mutable.index import only
from services.algorithms.indexes.protocol import EXACT, Certificate, TopK
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.evaluation.retrieval.proof import prove_at_scale, prove_on_small_catalogues, wrong_answers

STRATEGIES = [ExactAlgorithm1, ExactLowPrecision, Exact]


def scene(seed: int, count: int) -> tuple[QueryStates, ItemStates, PairGate]:
    rng = np.random.default_rng(seed)
    items, queries = make_items(rng, count, 4, 2, 16, spread=0.3), make_queries(rng, 5, 4, 2, 16)
    queries.components[...] = (queries.components + queries.components[:, :1]) / 2
    return queries, items, make_pair_gate(rng, 8, 12, scale=0.1)


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("filtered", [False, True])
def test_answers_equal_brute_force_to_the_last_bit(kind: type, filtered: bool) -> None:
    queries, items, gate = scene(0, 4000)
    items.components[100:140] = items.components[100]  # forty ties
    items.gate[100:140] = items.gate[100]
    queries.components[0] = items.components[100, 0]
    allowed = np.random.default_rng(2).random((5, 4000)) < 0.3 if filtered else None
    wanted = BruteForce(MolScorer(items, gate)).search(queries, 20, allowed)
    index = kind(MolScorer(items, gate), pool_size=30)
    for _ in range(2 if kind is Exact else 1):  # `Exact` takes a turn with every strategy
        answer = index.search(queries, 20, allowed)
        assert np.array_equal(answer.item_indices, wanted.item_indices)
        assert np.array_equal(answer.scores, wanted.scores)
        assert set(answer.certificates) == {EXACT}


def test_gate_bounds_score_few_items_in_full_and_say_so() -> None:
    queries, items, gate = scene(3, 4000)
    answer = ExactLowPrecision(MolScorer(items, gate), pool_size=100).search(queries, 10)
    touched = {done.name: done.touched for done in answer.passes}
    assert touched["first_stage"].tolist() == touched["bounds"].tolist() == [4000] * 5
    assert touched["threshold"].tolist() == [100] * 5
    assert (touched["gate_intervals"] <= 4000).all()
    assert (touched["full"] <= touched["gate_intervals"]).all()
    assert touched["full"].mean() < 400
    assert (touched["full"] >= 10).all()


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("max_gap", [1e-9, 0.05, 3.0])
def test_what_a_gap_leaves_out_scores_at_most_that_much_above_the_last(
    kind: type, filtered: bool, max_gap: float
) -> None:
    queries, items, gate = scene(0, 4000)
    items.components[100:140] = items.components[100]
    items.gate[100:140] = items.gate[100]
    allowed = np.random.default_rng(2).random((5, 4000)) < 0.3 if filtered else None
    every = BruteForce(MolScorer(items, gate)).search(queries, 4000, allowed)
    index = kind(MolScorer(items, gate), pool_size=30)
    for _ in range(2 if kind is Exact else 1):
        answer = index.search(queries, 20, allowed, max_gap)
        for query in range(5):
            truth = dict(zip(every.item_indices[query].tolist(), every.scores[query].tolist(), strict=True))
            rows, proof = answer.item_indices[query].tolist(), answer.certificates[query]
            assert [truth[row] for row in rows] == answer.scores[query].tolist()
            assert proof.proves(max_gap)
            assert proof.gap is not None
            left_out = max(score for row, score in truth.items() if row not in rows)
            assert left_out <= answer.scores[query, -1] + proof.gap
            if proof == EXACT:
                assert rows == every.item_indices[query, :20].tolist()


def test_plain_algorithm_1_lets_more_through_than_the_gate_bounds() -> None:
    queries, items, gate = scene(4, 4000)
    scorer = MolScorer(items, gate)
    scored = [
        next(done.touched for done in kind(scorer, pool_size=100).search(queries, 10).passes if done.name == "full")
        for kind in (ExactAlgorithm1, ExactLowPrecision)
    ]
    assert scored[0].mean() > 3 * scored[1].mean()


def test_the_choice_is_the_strategy_that_was_measured_to_be_cheapest() -> None:
    queries, items, gate = scene(6, 3000)
    index = Exact(MolScorer(items, gate), pool_size=50)
    assert index.chosen(batch=5, k=10) is None
    said = [index.search(queries, 10).passes[0].name for _ in range(10)]
    names = [f"strategy:{strategy.name}" for strategy in index.strategies]
    assert said[:6] == names * 3
    chosen = index.chosen(batch=5, k=10)
    assert said[6:] == [f"strategy:{chosen}"] * 4
    assert index.chosen(batch=5, k=2000) is None  # another kind of request is measured by itself
    assert index.chosen(batch=100, k=10) is None


def test_a_build_goes_on_from_what_the_one_before_the_merge_had_measured() -> None:
    queries, items, gate = scene(6, 3000)
    build, scorer = carry_over(only(Exact)), MolScorer(items, gate)

    def built() -> Exact:
        index = build(scorer)["exact"]
        assert isinstance(index, Exact)
        return index

    first = built()
    for _ in range(6):
        first.search(queries, 10)
    second = built()
    assert second.chosen(batch=5, k=10) == first.chosen(batch=5, k=10) is not None
    assert built().chosen(batch=5, k=10) == second.chosen(batch=5, k=10)


def test_a_build_over_a_block_of_the_delta_neither_inherits_nor_leaves_timings() -> None:
    queries, items, gate = scene(6, 3000)
    build, scorer, small = carry_over(only(Exact)), MolScorer(items, gate), MolScorer(items.take(slice(0, 300)), gate)
    main = build(scorer)["exact"]
    for _ in range(6):
        main.search(queries, 10)
    block = build(small)["exact"]
    assert isinstance(main, Exact)
    assert isinstance(block, Exact)
    assert block.chosen(batch=5, k=10) is None
    for _ in range(6):
        block.search(queries, 10)
    merged = build(scorer)["exact"]
    assert isinstance(merged, Exact)
    assert merged._measured == main._measured


def test_the_proof_holds_on_awkward_catalogues() -> None:
    proof = prove_on_small_catalogues(num_queries=600, largest=800, seed=11)
    assert proof.holds, proof
    assert proof.queries == 600
    heuristics = {"top_k_avg", "top_k_per_embedding", "combined_top_k", "quantized_tangents"}
    assert set(proof.wrong) == {"brute_force", *(kind.name for kind in STRATEGIES), *heuristics}
    for name, kinds in proof.certificates.items():
        assert sum(kinds.values()) == 600
        assert name in heuristics or set(kinds) == {"exact"}


def test_the_proof_at_scale_compares_with_every_item() -> None:
    queries, items, gate = scene(9, 3000)
    scorer = MolScorer(items, gate)
    proof = prove_at_scale(scorer, queries, [ExactLowPrecision(scorer, pool_size=50)], k=10, seed=9)
    assert proof.holds
    assert proof.queries == 5
    assert proof.scored_share["exact_low_precision"] < 0.5


def test_the_proof_notices_a_wrong_row_a_wrong_score_and_a_missing_claim() -> None:
    queries, items, gate = scene(10, 500)
    scorer = MolScorer(items, gate)
    answer = BruteForce(scorer).search(queries, 5)
    exact = np.stack(scorer.scores_float64_at(queries, [np.arange(500)] * 5))
    assert wrong_answers(answer, exact, 5, must_be_exact=True) == 0
    left_out = int(np.argmin(exact[2]))
    rows, scores = answer.item_indices.copy(), answer.scores.copy()
    rows[2, 4] = left_out
    scores[0, 0] += 1e-6

    def changed(**fields: object) -> TopK:
        whole = {name: getattr(answer, name) for name in ("item_indices", "scores", "certificates", "passes")}
        return TopK(**{**whole, **fields})

    assert wrong_answers(changed(item_indices=rows), exact, 5, must_be_exact=True) == 1
    assert wrong_answers(changed(scores=scores), exact, 5, must_be_exact=True) == 1
    assert wrong_answers(changed(item_indices=answer.item_indices[:, :4]), exact, 5, must_be_exact=True) == 5


def test_the_proof_notices_a_gap_too_narrow() -> None:
    queries, items, gate = scene(10, 500)
    scorer = MolScorer(items, gate)
    answer = BruteForce(scorer).search(queries, 5)
    exact = np.stack(scorer.scores_float64_at(queries, [np.arange(500)] * 5))
    # The best item of query 1 is missing from its answer, and a worse one is in its place.
    rows, scores = answer.item_indices.copy(), answer.scores.copy()
    order = np.argsort(-exact[1])
    rows[1], scores[1] = order[1:6], exact[1][order[1:6]]
    gap = float(exact[1][order[0]] - exact[1][order[5]])
    for claimed, wrong in ((gap + 1e-6, 0), (gap - 1e-6, 1), (None, 0)):
        certificates = (answer.certificates[0], Certificate(claimed), *answer.certificates[2:])
        changed = TopK(item_indices=rows, scores=scores, certificates=certificates, passes=answer.passes)
        assert wrong_answers(changed, exact, 5, must_be_exact=False) == wrong
        assert wrong_answers(changed, exact, 5, must_be_exact=True) == 1


def test_a_strategy_that_is_cheap_for_some_queries_alone_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first strategy needs 1 or 9 s, the second always 3."""
    clock, costs = [0.0], cycle([1.0, 9.0, 9.0])
    monkeypatch.setattr("services.algorithms.indexes.exact.cheapest.time.thread_time", lambda: clock[0])
    queries, items, gate = scene(6, 300)
    index = Exact(MolScorer(items, gate), pool_size=50)
    cheap_for_some, steady = index.strategies
    for strategy, cost in ((cheap_for_some, lambda: next(costs)), (steady, lambda: 3.0)):

        def search(*args: Any, inner: Any = strategy.search, cost: Any = cost) -> TopK:
            clock[0] += cost()
            return inner(*args)

        monkeypatch.setattr(strategy, "search", search)
    names = [index.search(queries, 10).passes[0].name for _ in range(1_000)]
    assert names[6:].count(f"strategy:{steady.name}") > 900


def test_a_strategy_that_had_bad_moments_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr("services.algorithms.indexes.exact.cheapest.time.thread_time", lambda: float(next(seconds)))
    queries, items, gate = scene(6, 300)
    index = Exact(MolScorer(items, gate), pool_size=50)
    for _ in range(6):
        index.search(queries, 10)
    (measured,) = index._measured.values()
    assert {tuple(turns) for turns in measured} == {(0.2, 0.2, 0.2)}  # a second for five queries
    measured[0][:] = [0.6] * 3
    for _ in range(200 * len(index.strategies)):
        index.search(queries, 10)
    assert median(measured[0]) == 0.2
    assert [len(turns) for turns in measured] == [5] * 2

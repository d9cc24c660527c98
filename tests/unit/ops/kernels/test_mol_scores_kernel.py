"""The fused kernel against float64, at odd shapes: what it says of a score holds, and is not far from it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.ops.mol_scores.device import DeviceScorer, Precision
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import shape_named

# (B, X, P_q, P_x, d, G): the papers' component counts, then sizes that nothing divides, one row and one query.
SHAPES = [
    (3, 130, 8, 4, 64, 128),
    (2, 65, 8, 8, 32, 128),
    (2, 70, 8, 4, 128, 128),
    (3, 75, 4, 4, 768, 128),
    (1, 1, 2, 2, 4, 3),
    (4, 129, 3, 5, 7, 19),
    (2, 63, 1, 4, 16, 8),
    (2, 66, 9, 2, 17, 33),
]
# Scores here have a standard deviation of about 0.15: a wrong pair, weight or mask moves them by far more than this.
CLOSE: dict[Precision, float] = {"float16": 1e-3, "bfloat16": 8e-3}


def scene(
    shape: tuple[int, ...], seed: int, *, scale: float = 0.1
) -> tuple[QueryStates, ItemStates, PairGate, np.ndarray]:
    num_queries, count, p_q, p_x, d, hidden = shape
    rng = np.random.default_rng(seed)
    queries, items = make_queries(rng, num_queries, p_q, p_x, d), make_items(rng, count, p_q, p_x, d)
    gate = make_pair_gate(rng, p_q * p_x, hidden, scale=scale)
    return queries, items, gate, mol_scores_reference(queries, items, gate).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_bounds_enclose_the_exact_score_and_their_middle_is_close_to_it(
    shape: tuple[int, ...], precision: Precision, kernel_device: torch.device
) -> None:
    queries, items, gate, exact = scene(shape, 1)
    scorer = DeviceScorer(items, gate, device=kernel_device, precision=precision, kernels=True)
    prepared = scorer.prepare(queries)
    assert prepared.fused
    upper, lower = (found.cpu().double().numpy() for found in scorer.bounds(prepared))
    assert upper.shape == lower.shape == exact.shape
    assert (lower <= exact).all()
    assert (exact <= upper).all()
    assert np.abs((upper + lower) / 2 - exact).max() < CLOSE[precision]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p_q=st.integers(1, 9),
    p_x=st.integers(1, 5),
    d=st.integers(1, 40),
    count=st.integers(1, 150),
    hidden=st.integers(1, 40),
    scale=st.sampled_from([0.0, 0.1, 1.0, 20.0]),
    gates=st.sampled_from(["both", "states", "network"]),
    precision=st.sampled_from(["float16", "bfloat16"]),
    norm=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_bounds_hold_whatever_the_gates(
    seed: int,
    p_q: int,
    p_x: int,
    d: int,
    count: int,
    hidden: int,
    scale: float,
    gates: str,
    precision: Precision,
    norm: float,
    kernel_device: torch.device,
) -> None:
    queries, items, gate, _ = scene((2, count, p_q, p_x + (p_q == 1), d, hidden), seed, scale=scale)
    queries.components[0, 0] = 0
    items = ItemStates(components=norm * items.components, gate=items.gate)
    pair_gate = None if gates == "states" else gate
    if gates == "network":
        queries, items = QueryStates(components=queries.components), ItemStates(components=items.components)
    exact = mol_scores_reference(queries, items, pair_gate).numpy()
    scorer = DeviceScorer(items, pair_gate, device=kernel_device, precision=precision, kernels=True)
    upper, lower = (found.cpu().double().numpy() for found in scorer.bounds(scorer.prepare(queries)))
    assert (lower <= exact).all()
    assert (exact <= upper).all()


@pytest.mark.parametrize("shape", [(3, 200, 4, 2, 8, 16), (2, 150, 4, 4, 768, 16)])
def test_rows_are_scored_as_in_the_whole_catalogue_and_no_row_is_no_item(
    shape: tuple[int, ...], kernel_device: torch.device
) -> None:
    queries, items, gate, _ = scene(shape, 2)
    scorer = DeviceScorer(items, gate, device=kernel_device, kernels=True)
    prepared = scorer.prepare(queries)
    upper, lower = scorer.bounds(prepared)
    rows = torch.randint(shape[1], (shape[0], 70), generator=torch.Generator().manual_seed(2)).to(kernel_device)
    rows[:, 5] = -1
    rows[0, 60:] = -1
    # A slice of a wider matrix: its rows do not lie one after the other.
    wider = torch.nn.functional.pad(rows, (0, 9))
    upper_of_rows, lower_of_rows = scorer.bounds(prepared, rows=wider[:, :70])
    for found, whole in ((upper_of_rows, upper), (lower_of_rows, lower)):
        wanted = torch.where(rows >= 0, whole.gather(1, rows.clamp_min(0)), -torch.inf)
        assert torch.equal(found, wanted) or torch.allclose(found, wanted, rtol=0, atol=1e-6)
    # Cosines of wide components go through memory a chunk at a time: the chunks meet where they should.
    assert torch.isfinite(upper).all()


@pytest.mark.parametrize("per_query", [False, True])
def test_what_is_not_allowed_scores_nothing_and_a_group_has_its_best(
    per_query: bool, kernel_device: torch.device
) -> None:
    queries, items, gate, _ = scene((3, 200, 4, 2, 8, 16), 3)
    scorer = DeviceScorer(items, gate, device=kernel_device, kernels=True)
    prepared = scorer.prepare(queries)
    allowed = (torch.rand(3 if per_query else 1, 200, generator=torch.Generator().manual_seed(3)) < 0.3).byte()
    allowed[:, 64:128] = 0
    allowed = allowed.to(kernel_device)
    everything, below = scorer.bounds(prepared)
    upper, best = scorer.bounds(prepared, allowed=allowed, grouped=True)
    mask = allowed.bool().expand(3, -1)
    assert torch.equal(upper, torch.where(mask, everything, -torch.inf))
    below = torch.nn.functional.pad(torch.where(mask, below, -torch.inf), (0, 56), value=-torch.inf)
    assert torch.equal(best, below.view(3, 4, 64).amax(dim=2))
    assert (best[:, 1] == -torch.inf).all()


def test_wide_components_in_small_chunks_score_as_in_one(kernel_device: torch.device) -> None:
    queries, items, gate, exact = scene((2, 200, 4, 4, 768, 16), 4)
    scorer = DeviceScorer(items, gate, device=kernel_device, kernels=True, chunk_bytes=64 * 2 * 32 * 4)
    prepared = scorer.prepare(queries)
    upper, lower = (found.cpu().double().numpy() for found in scorer.bounds(prepared))
    assert (lower <= exact).all()
    assert (exact <= upper).all()
    assert np.abs((upper + lower) / 2 - exact).max() < CLOSE["float16"]


def test_on_fitted_states_the_certified_error_leaves_few_items_in_doubt(kernel_device: torch.device) -> None:
    fitted = generate(shape_named("ml-1m"), num_items=1500, num_queries=2, seed=0)
    scorer = DeviceScorer(fitted.items, fitted.pair_gate, device=kernel_device, kernels=True)
    upper, lower = scorer.bounds(scorer.prepare(fitted.queries))
    assert float((upper - lower).mean()) / 2 < 0.01
    threshold = torch.topk(lower, 20, dim=1).values[:, -1:]
    assert int((upper >= threshold).sum(dim=1).max()) <= 40


def test_no_queries_make_no_bounds(kernel_device: torch.device) -> None:
    queries, items, gate, _ = scene((1, 9, 4, 2, 8, 16), 5)
    scorer = DeviceScorer(items, gate, device=kernel_device, kernels=True)
    none = QueryStates(components=queries.components[:0], gate=None if queries.gate is None else queries.gate[:0])
    assert scorer.bounds(scorer.prepare(none))[0].shape == (0, 9)


def test_values_that_half_precision_cannot_hold_take_the_plain_pass(kernel_device: torch.device) -> None:
    queries, items, gate, _ = scene((2, 40, 4, 2, 8, 16), 6)
    items = ItemStates(components=1e5 * items.components, gate=items.gate)
    exact = mol_scores_reference(queries, items, gate).numpy()
    scorer = DeviceScorer(items, gate, device=kernel_device, kernels=True)
    prepared = scorer.prepare(queries)
    assert not prepared.fused
    upper, lower = (found.cpu().double().numpy() for found in scorer.bounds(prepared))
    assert (lower <= exact).all()
    assert (exact <= upper).all()
    assert scorer.bounds(scorer.prepare(queries))[0].isfinite().all()


def test_an_unknown_precision_is_refused() -> None:
    _, items, gate, _ = scene((1, 9, 4, 2, 8, 16), 7)
    with pytest.raises(ValueError, match="precision='float8'; allowed: float16, bfloat16"):
        DeviceScorer(items, gate, device=torch.device("cpu"), precision="float8")  # type: ignore[arg-type]

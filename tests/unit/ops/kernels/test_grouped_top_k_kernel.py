"""Grouped top-N on a device, kernels and plain path, against the formula: which items, in which order, what is next."""

import numpy as np
import pytest
import torch
from grouped_top_k_reference import grouped_top_k_reference

from services.algorithms.ops.grouped_top_k.device import DeviceBest, at_least, best_of_groups

# (B, Q, X, S, d, N): sizes that nothing divides; the last two leave tiles of 16 and 32 items.
SHAPES = [(1, 1, 130, 1, 3, 1), (3, 2, 700, 3, 20, 5), (2, 1, 1000, 1, 70, 7), (2, 3, 1300, 2, 16, 9)]


def run(
    shape: tuple[int, ...], seed: int, device: torch.device, *, share: float | None = None, plain: bool = False
) -> tuple[DeviceBest, tuple[torch.Tensor, ...]]:
    """Small integers as vectors: dot products are exact in half precision, and many of them tie."""
    num_queries, vectors, count, groups, width, size = shape
    rng = np.random.default_rng(seed)
    queries = torch.from_numpy(rng.integers(-3, 4, (num_queries, vectors, width)).astype(np.float32))
    items = torch.from_numpy(rng.integers(-3, 4, (count, groups, width)).astype(np.float32))
    allowed = None
    if share is not None:
        allowed = torch.from_numpy((rng.random((num_queries, count)) < share).astype(np.uint8))
    everything = torch.ones(num_queries, count, dtype=torch.bool) if allowed is None else allowed.bool()
    wanted = grouped_top_k_reference(queries, items, size, everything)
    found = best_of_groups(
        items.half().to(device),
        queries.half().to(device),
        size,
        None if allowed is None else allowed.to(device),
        fused=True,
        plain=plain,
    )
    return found, wanted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [None, 0.5, 0.001, 0.0])
@pytest.mark.parametrize("plain", [False, True])
def test_the_best_come_in_order_and_ties_by_row(
    shape: tuple[int, ...], share: float | None, plain: bool, kernel_device: torch.device
) -> None:
    found, (rows, scores, following) = run(shape, 1, kernel_device, share=share, plain=plain)
    assert not bool(found.overflowed)
    assert torch.equal(found.rows.cpu(), rows)
    assert torch.equal(found.scores.cpu(), scores)
    assert torch.equal(found.following.cpu(), following)


def test_more_results_than_items_are_all_items(kernel_device: torch.device) -> None:
    found, (rows, scores, following) = run((2, 2, 20, 1, 4, 30), 2, kernel_device)
    assert torch.equal(found.rows.cpu(), rows)
    assert torch.equal(found.scores.cpu(), scores)
    assert torch.equal(found.following.cpu(), following)


def test_items_so_alike_that_a_list_overflows_are_reported(kernel_device: torch.device) -> None:
    items = torch.ones(2000, 1, 16, dtype=torch.float16, device=kernel_device)
    queries = torch.ones(1, 1, 16, dtype=torch.float16, device=kernel_device)
    found = best_of_groups(items, queries, 3, None, fused=True)
    assert bool(found.overflowed)
    again = best_of_groups(items, queries, 3, None, fused=True, plain=True)
    assert again.rows.flatten().tolist() == [0, 1, 2]
    assert not bool(again.overflowed)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [1, 100, 2500])
def test_values_at_or_above_the_threshold_are_collected(fused: bool, count: int, kernel_device: torch.device) -> None:
    values = torch.from_numpy(np.random.default_rng(count).integers(0, 50, (3, count)).astype(np.float32))
    values[1] = -torch.inf
    thresholds = torch.tensor([40.0, -torch.inf, 49.5])
    places, counts = at_least(values.to(kernel_device), thresholds.to(kernel_device), 1000, fused=fused)
    for row in range(3):
        wanted = torch.nonzero((values[row] >= thresholds[row]) & (values[row] > -torch.inf)).flatten().tolist()
        assert sorted(place for place in places[row].tolist() if place >= 0) == wanted
        assert counts[row] == len(wanted)


@pytest.mark.parametrize("fused", [False, True])
def test_values_beyond_the_capacity_are_counted(fused: bool, kernel_device: torch.device) -> None:
    values = torch.ones(2, 300, device=kernel_device)
    places, counts = at_least(values, torch.tensor([0.5, 2.0], device=kernel_device), 40, fused=fused)
    assert counts.tolist() == [300, 0]
    assert len(set(places[0].tolist()) - {-1}) == 40
    assert set(places[1].tolist()) == {-1}

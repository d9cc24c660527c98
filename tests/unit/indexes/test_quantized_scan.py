"""The scan of coded cells: every instruction set against the NumPy reference, and both against float64."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds
from quantized_scan_in_numpy import ScanInNumpy

from services.algorithms.ops.quantized_scan import CellAnswer, Cells, CellScan, Visit
from services.algorithms.ops.quantized_scan.cells import assign, encode, nearest, principal_directions, train_centres

BUILDS = native_builds("quantized_scan")
every_kernel = pytest.mark.parametrize("kernel", BUILDS)


def clustered(seed: int, count: int, width: int) -> npt.NDArray[np.float32]:
    """Vectors of different norms in a few clumps, some of them equal."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(6, width))
    vectors = centres[rng.integers(6, size=count)] + 0.6 * rng.normal(size=(count, width))
    vectors[rng.integers(count, size=count // 8)] = vectors[0]
    return (vectors * rng.uniform(0.2, 2.0, size=(count, 1))).astype(np.float32)


def search(kernel: str | None, vectors: np.ndarray, cells: Cells, queries: np.ndarray, **wanted: object) -> CellAnswer:
    """A search by one kernel, or in NumPy for None."""
    codes = cells.coded(vectors, seed=0)
    scan = ScanInNumpy(codes, vectors) if kernel is None else CellScan(codes, vectors=vectors, kernels=BUILDS[kernel])
    how = str(wanted.pop("how"))
    answer: CellAnswer = getattr(scan, how)(queries, **wanted)
    return answer


@every_kernel
@pytest.mark.parametrize(
    "cells",
    [
        Cells(num_cells=9, bits=8),
        Cells(num_cells=9, bits=4),
        Cells(num_cells=5, bits=8, coded_width=7),
        Cells(num_cells=40, bits=4, coded_width=9),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [9, 16, 32, 64, 83])
def test_every_instruction_set_gives_the_scores_of_the_reference(kernel: str, cells: Cells, width: int) -> None:
    vectors, queries = clustered(1, 700, width), clustered(2, 11, width)
    everything = Visit(probes=cells.num_cells)
    wanted = search(None, vectors, cells, queries, how="pool", size=700, visit=everything)
    for chosen in (queries, queries[:1]):  # grouped by cell, and one at a time
        found = search(kernel, vectors, cells, chosen, how="pool", size=700, visit=everything)
        scale = np.abs(wanted.scores).max()
        by_row = np.take_along_axis(wanted.scores, np.argsort(wanted.rows, axis=1), axis=1)[: len(chosen)]
        same = np.take_along_axis(found.scores, np.argsort(found.rows, axis=1), axis=1)
        assert np.abs(same - by_row).max() < 1e-5 * scale
        assert (found.bounds == -np.inf).all()


@every_kernel
def test_the_best_by_code_are_those_of_the_reference_with_its_bound(kernel: str) -> None:
    vectors, queries = clustered(3, 900, 24), clustered(4, 12, 24)
    cells = Cells(num_cells=12, bits=8)
    for visit in (Visit(probes=3), Visit(probes=12), Visit(probes=12, reach=0.5)):
        wanted = search(None, vectors, cells, queries, how="pool", size=40, visit=visit)
        found = search(kernel, vectors, cells, queries, how="pool", size=40, visit=visit)
        if visit.reach == 0:
            assert np.abs(found.scores - wanted.scores).max() < 1e-5 * np.abs(wanted.scores).max()
            assert np.abs(found.bounds - wanted.bounds).max() < 1e-4 * np.abs(wanted.bounds).max()
        exact = queries.astype(np.float64) @ vectors.T.astype(np.float64)
        for query in range(len(queries)):
            for answer in (wanted, found):
                left_out = np.delete(exact[query], answer.rows[query])
                assert left_out.max() <= answer.bounds[query]


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.sampled_from([None, *BUILDS]),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 300),
    width=st.integers(1, 40),
    bits=st.sampled_from([4, 8]),
    num_cells=st.integers(1, 30),
    probes=st.integers(1, 30),
    reach=st.sampled_from([0.0, 0.5, 2.0]),
    k=st.integers(1, 20),
    pool=st.integers(1, 60),
    share=st.sampled_from([None, 0.0, 0.03, 0.5, 1.0]),
    num_queries=st.sampled_from([1, 3, 9]),
)
def test_answers_are_sound_and_bounds_hold(
    kernel: str | None,
    seed: int,
    count: int,
    width: int,
    bits: int,
    num_cells: int,
    probes: int,
    reach: float,
    k: int,
    pool: int,
    share: float | None,
    num_queries: int,
) -> None:
    rng = np.random.default_rng(seed)
    vectors, queries = clustered(seed, count, width), clustered(seed + 1, num_queries, width)
    queries[-1] = 0
    allowed = None if share is None else rng.random((num_queries, count)) < share
    mask = np.ones((num_queries, count), dtype=bool) if allowed is None else allowed
    exact = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    tolerances = 1e-13 * np.linalg.norm(queries, axis=1) * np.linalg.norm(vectors, axis=1).max()
    cells = Cells(num_cells=num_cells, bits=bits, coded_width=max(1, width - 1) if seed % 2 else None)
    options = {"allowed": allowed, "tolerances": tolerances}
    visit = Visit(probes=probes, reach=reach)
    best = search(kernel, vectors, cells, queries, how="best", k=k, pool=pool, visit=visit, **options)
    proven = search(kernel, vectors, cells, queries, how="proven", k=k, **options)
    for query in range(num_queries):
        ordered = np.sort(exact[query][mask[query]])[::-1][:k]
        for answer in (best, proven):
            rows = answer.rows[query][answer.rows[query] >= 0]
            assert len(set(rows.tolist())) == len(rows) == len(ordered)
            assert mask[query][rows].all()
            assert np.abs(answer.scores[query][: len(rows)] - exact[query][rows]).max(initial=0) <= 1e-9
        assert np.abs(proven.scores[query][: len(ordered)] - ordered).max(initial=0) <= 1e-9
        left_out = mask[query].copy()
        left_out[best.rows[query][best.rows[query] >= 0]] = False
        if left_out.any():
            worst = best.scores[query][len(ordered) - 1]
            assert exact[query][left_out].max() <= max(best.bounds[query], worst) + 1e-12


@pytest.mark.parametrize("kernel", [None, *BUILDS])
def test_ties_go_to_the_smaller_row_even_when_everything_ties(kernel: str | None) -> None:
    vectors = np.tile(np.array([[0.6, 0.8]], dtype=np.float32), (3_000, 1))
    answer = search(
        kernel, vectors, Cells(num_cells=4, bits=8), vectors[:1], how="proven", k=5, tolerances=np.full(1, 1e-12)
    )
    assert answer.rows[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("coded_width", [None, 5])
def test_what_is_stored_about_a_cell_bounds_all_that_it_holds(bits: int, coded_width: int | None) -> None:
    vectors = clustered(6, 400, 13)
    centres = train_centres(vectors, 10, seed=0)
    owner = assign(vectors, centres)
    directions = principal_directions(vectors, centres, owner, width=coded_width, seed=0) if coded_width else None
    codes = encode(vectors, centres, owner, bits=bits, projection=directions)
    slots = np.flatnonzero(codes.rows >= 0)
    assert sorted(codes.rows[slots].tolist()) == list(range(400))
    cell = codes.cell_of_slots()[slots]
    residuals = vectors[codes.rows[slots]].astype(np.float64) - codes.centres[cell]
    decoded = codes.integers()[slots] * codes.scales[cell, None].astype(np.float64)
    whole = decoded if codes.projection is None else decoded @ codes.projection.T.astype(np.float64)
    assert (np.linalg.norm(residuals - whole, axis=1) <= codes.errors[cell]).all()
    assert (np.linalg.norm(residuals, axis=1) <= codes.radii[cell]).all()
    assert (np.linalg.norm(decoded, axis=1) <= codes.code_norms[cell]).all()
    if bits == 8 and coded_width is None:
        assert np.linalg.norm(residuals - whole, axis=1).max() < 0.02 * np.linalg.norm(residuals, axis=1).max()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cells(num_cells=0, bits=8), "num_cells=0 allowed: at least 1"),
        (lambda: Cells(num_cells=1, bits=5), "bits=5 allowed: 4, 8"),
        (lambda: Cells(num_cells=1, bits=8, coded_width=0), "coded_width=0 allowed"),
        (lambda: Visit(probes=0), "probes=0 allowed: at least 1"),
        (lambda: Visit(probes=1, reach=-1.0), r"reach=-1\.0 allowed"),
        (lambda: Cells(num_cells=1, bits=8).coded(np.zeros((0, 4), np.float32), seed=0), "index is empty"),
        (
            lambda: Cells(num_cells=1, bits=8, coded_width=5).coded(np.ones((3, 4), np.float32), seed=0),
            "coded_width=5 allowed: 1 to 4",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_the_nearest_centres_of_many_vectors_are_found_in_parts() -> None:
    rng = np.random.default_rng(3)
    vectors, centres = (rng.normal(size=(count, 3)).astype(np.float32) for count in (2_500, 4_096))
    found = nearest(vectors, centres)
    for start in range(0, 2_500, 500):
        part = slice(start, start + 500)
        squares = ((vectors[part, None] - centres) ** 2).sum(axis=2)
        chosen = np.take_along_axis(squares, found[part, None], axis=1)[:, 0]
        np.testing.assert_allclose(chosen, squares.min(axis=1), atol=1e-5)

"""Buckets of absence and their rows: exact at every boundary, still below the floor, and checked in a bundle."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_scene import DOT, content, dot_content
from retrieval_scene import unit

from services.algorithms.bundles.model_bundle import BundleError, load_bundle
from services.algorithms.bundles.model_manifest import AbsenceShape
from services.algorithms.encoding.absence import AbsenceRows, bucket_of, buckets_of
from services.algorithms.scoring.states import QueryStates
from services.offline.bundles.model import BundleContent, write_bundle

SHAPE = AbsenceShape(floor_seconds=1024, num_buckets=18)
DAY = 86_400


def rows_of(num_components: int = 4, width: int = 50, pairs: int | None = 8) -> AbsenceRows:
    rng = np.random.default_rng(0)
    components = rng.normal(0, 0.1, (18, num_components, width)).astype(np.float32)
    gate = None if pairs is None else rng.normal(0, 0.1, (18, pairs)).astype(np.float32)
    components[0] = 0
    if gate is not None:
        gate[0] = 0
    return AbsenceRows(floor_seconds=1024, components=components, gate=gate)


def states_of(n: int, num_components: int = 4, width: int = 50, pairs: int | None = 8) -> QueryStates:
    rng = np.random.default_rng(1)
    return QueryStates(
        components=unit(rng.normal(size=(n, num_components, width))).astype(np.float16).astype(np.float32),
        gate=None if pairs is None else rng.normal(size=(n, pairs)).astype(np.float16).astype(np.float32),
    )


def test_buckets_double_from_the_floor_on() -> None:
    wanted = {-5 * DAY: 0, -1: 0, 0: 0, 1023: 0, 1024: 1, 2047: 1, 2048: 2, DAY: 7, 7 * DAY: 10, 365 * DAY: 15}
    assert {seconds: bucket_of(seconds, SHAPE) for seconds in wanted} == wanted
    assert bucket_of(1024 * 2**16 - 1, SHAPE) == 16
    assert [bucket_of(1024 * 2**power, SHAPE) for power in (16, 17, 40)] == [17, 17, 17]


@pytest.mark.parametrize("shape", [SHAPE, AbsenceShape(floor_seconds=1, num_buckets=2),
                                   AbsenceShape(floor_seconds=1000, num_buckets=32)])  # fmt: skip
def test_one_time_and_many_fall_into_the_same_buckets_beside_every_boundary(shape: AbsenceShape) -> None:
    edges = shape.floor_seconds * 2 ** np.arange(34, dtype=np.int64)
    seconds = np.concatenate([edges - 1, edges, edges + 1, -edges, [0]])
    assert buckets_of(seconds, shape).tolist() == [bucket_of(one, shape) for one in seconds.tolist()]


def test_a_state_below_the_floor_is_returned_as_it_is() -> None:
    states = states_of(1)
    assert rows_of().apply(states, 0) is states
    assert rows_of().apply(states, np.zeros(1, np.int64)) is states


def test_a_row_is_added_and_the_sum_normalised_in_half_precision() -> None:
    rows, states = rows_of(), states_of(1)
    moved = rows.apply(states, 7)
    sums = states.components.astype(np.float64) + rows.components[7]
    wanted = sums / np.linalg.norm(sums, axis=-1, keepdims=True)
    np.testing.assert_array_equal(moved.components, wanted.astype(np.float16).astype(np.float32))
    assert moved.gate is not None
    assert states.gate is not None
    assert rows.gate is not None
    np.testing.assert_array_equal(moved.gate, (states.gate + rows.gate[7]).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("pairs", [8, None])
def test_a_batch_gives_every_state_what_it_gets_alone(pairs: int | None) -> None:
    rows, states = rows_of(pairs=pairs), states_of(30, pairs=pairs)
    buckets = np.arange(30) % 18
    together = rows.apply(states, buckets)
    for row, bucket in enumerate(buckets.tolist()):
        alone = rows.apply(states.take([row]), bucket)
        np.testing.assert_array_equal(together.components[row], alone.components[0])
        if pairs is not None:
            assert together.gate is not None
            assert alone.gate is not None
            np.testing.assert_array_equal(together.gate[row], alone.gate[0])


def test_an_absent_component_stays_absent_and_a_sum_of_zero_is_no_division() -> None:
    rows, states = rows_of(), states_of(2)
    states.components[0, 3] = 0
    rows.components[7, 1] = -states.components[1, 1]
    moved = rows.apply(states, 7).components
    assert not moved[0, 3].any()
    assert not moved[1, 1].any()
    np.testing.assert_allclose(np.linalg.norm(moved[0, :3], axis=-1), 1, atol=1e-3)


def with_rows(base: BundleContent) -> BundleContent:
    head = base.head
    rows = rows_of(head.num_query_components, head.component_width, head.num_pairs if head.is_mixture else None)
    weights = dict(base.weights) | {"absence_components": rows.components}
    if rows.gate is not None:
        weights["absence_gate"] = rows.gate
    return replace(base, weights=weights, absence=SHAPE)


@pytest.mark.parametrize("base", [content(), dot_content()])
def test_a_bundle_brings_its_rows_and_their_buckets(tmp_path: Path, base: BundleContent) -> None:
    wanted = with_rows(base)
    found = write_bundle(tmp_path / "bundle", wanted).absence
    assert found is not None
    assert found.shape == SHAPE
    np.testing.assert_array_equal(found.components, wanted.weights["absence_components"])
    assert (found.gate is None) == (base.head == DOT)
    if found.gate is not None:
        np.testing.assert_array_equal(found.gate, wanted.weights["absence_gate"])


def test_where_buckets_begin_is_part_of_the_version(tmp_path: Path) -> None:
    told = with_rows(content())
    other = replace(told, absence=replace(SHAPE, floor_seconds=2048))
    versions = [write_bundle(tmp_path / name, one).model_version for name, one in (("a", told), ("b", other))]
    assert versions[0] != versions[1]
    assert load_bundle(tmp_path / "b").absence.shape.floor_seconds == 2048  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"absence_components": np.zeros((17, 2, 4), np.float32)}, r"\(17, 2, 4\).*says.*\(18, 2, 4\)"),
        ({"absence_gate": np.zeros((18, 4))}, "of float32"),
        ({"absence_gate": np.ones((18, 4), np.float32)}, r"absence\.gate.*row 0 zero"),
        ({"absence_components": np.full((18, 2, 4), np.nan, np.float32)}, r"absence\.components.*allowed: finite"),
    ],
)
def test_rows_that_are_not_allowed_are_refused(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    told = with_rows(content())
    with pytest.raises(BundleError, match=message):
        write_bundle(tmp_path / "bundle", replace(told, weights=dict(told.weights) | change))


def test_rows_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"holds \{\}; manifest.json says .*absence_components"):
        write_bundle(tmp_path / "bundle", replace(content(), absence=SHAPE))


@pytest.mark.parametrize(("field", "value"), [("floor_seconds", 0), ("num_buckets", 1), ("num_buckets", 33)])
def test_a_shape_out_of_range_is_refused(field: str, value: int) -> None:
    with pytest.raises(BundleError, match=rf"absence\.{field}={value}; allowed: "):
        replace(SHAPE, **{field: value})

"""The generator's scenes are what they claim: the fitted model's statistics, equal for equal seeds, right in shape."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from services.offline.evaluation.catalogues.fitted import QUICK
from services.offline.evaluation.catalogues.generator import average_items, generate
from services.offline.evaluation.catalogues.scene import SHAPES, Shape, shape_named
from tests.unit.offline.evaluation.catalogues.moments import measure

# The shape of the model that QUICK was fitted to.
FITTED_SHAPE = Shape(
    name="quick",
    num_items=3_706,
    num_query_components=4,
    num_item_components=2,
    component_width=32,
    gate_hidden=64,
)


@pytest.fixture(scope="module")
def moments() -> list[Mapping[str, Any]]:
    return [measure(generate(FITTED_SHAPE, num_queries=16, seed=seed, fitted=QUICK)) for seed in range(3)]


# Measured on the model that QUICK was fitted to.
@pytest.mark.parametrize(
    ("name", "trained", "tolerance"),
    [
        ("cosine_mean", -0.030, 0.03),
        ("cosine_sd", 0.211, 0.03),
        ("pair_correlation", 0.171, 0.08),
        ("average_sd", 0.108, 0.025),
        ("popularity_share", 0.292, 0.12),
        ("score_mean", -0.035, 0.04),
        ("score_sd", 0.121, 0.03),
        ("score_heights", (3.34, 2.93, 2.12), 0.35),
        ("average_correlation", 0.927, 0.05),
        ("spread", 0.149, 0.02),
        ("entropy", 0.943, 0.03),
        ("largest_weight", 0.253, 0.05),
        ("average_recall", (0.979, 0.992, 0.996), 0.035),
    ],
)
def test_generated_statistics_are_the_fitted_ones(
    moments: list[Mapping[str, Any]], name: str, trained: Any, tolerance: float
) -> None:
    found = np.mean([each[name] for each in moments], axis=0)
    assert np.abs(found - trained).max() <= tolerance, f"{name}: generated {found}, trained {trained}"


def test_equal_seeds_make_equal_scenes_and_others_do_not() -> None:
    first, again, other = (generate(SHAPES["books"], num_items=500, num_queries=3, seed=seed) for seed in (7, 7, 8))
    assert np.array_equal(first.items.components, again.items.components)
    assert np.array_equal(first.queries.components, again.queries.components)
    assert not np.array_equal(first.items.components, other.items.components)


def test_items_do_not_depend_on_how_many_queries_are_asked_for() -> None:
    few, many = (generate(SHAPES["ml-1m"], num_items=300, num_queries=count, seed=1) for count in (2, 9))
    assert np.array_equal(few.items.components, many.items.components)
    # A product's last bits depend on how many rows it has, by the machine.
    np.testing.assert_allclose(few.queries.components, many.queries.components[:2], atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_has_unit_components_and_its_gates(shape: Shape) -> None:
    scene = generate(shape, num_items=400, num_queries=5, seed=3)
    assert scene.items.components.shape == (400, shape.num_item_components, shape.component_width)
    assert scene.queries.components.shape == (5, shape.num_query_components, shape.component_width)
    for components in (scene.items.components, scene.queries.components):
        assert components.dtype == np.float32
        assert np.allclose(np.linalg.norm(components, axis=-1), 1, atol=1e-5)
    assert (scene.items.gate is not None) == (scene.queries.gate is not None) == shape.gated
    assert scene.pair_gate is not None
    assert scene.pair_gate.hidden_weight.shape == (128, shape.num_pairs)
    assert scene.label_draws.shape == (5, 0)


@pytest.mark.parametrize(("name", "value"), [("num_items", 0), ("num_queries", -1)])
def test_sizes_below_one_are_refused_by_name(name: str, value: int) -> None:
    sizes = {"num_items": 10, "num_queries": 2, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        generate(SHAPES["ml-1m"], seed=0, fitted=QUICK, **sizes)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"shape='netflix'.*books"):
        shape_named("netflix")


def test_averages_are_those_of_the_generated_items() -> None:
    shape = SHAPES["books"]
    items = generate(shape, num_items=300, num_queries=1, seed=4).items
    assert np.allclose(average_items(shape, 300, seed=4), items.components.mean(axis=1), atol=1e-6)

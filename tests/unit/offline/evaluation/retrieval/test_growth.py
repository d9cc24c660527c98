"""Growth: averages without the items, and sizes that don't fit are said to be left out."""

import numpy as np

from services.offline.evaluation.catalogues.generator import average_items, generate
from services.offline.evaluation.catalogues.scene import SHAPES


def test_averages_are_those_of_the_generated_items() -> None:
    shape = SHAPES["books"]
    items = generate(shape, num_items=300, num_queries=1, seed=4).items
    assert np.allclose(average_items(shape, 300, seed=4), items.components.mean(axis=1), atol=1e-6)

"""A synthetic item is as near to the trained one that it was made of, whatever the components' width."""

from pathlib import Path

import numpy as np
import pytest
from retrieval_scene import make_bundle

from services.offline.evaluation.large.catalogue import enlarged


@pytest.mark.parametrize("width", [32, 50, 128])
def test_a_copys_cosine_with_its_original_does_not_depend_on_the_width(tmp_path: Path, width: int) -> None:
    trained = make_bundle(tmp_path / "trained", d=width)
    items = enlarged(trained, 500, tmp_path / "enlarged", seed=1).item_states.components
    # Originals are far apart: the nearest one is an item's own.
    cosines = np.einsum("xpd,ypd->xyp", items, trained.item_states.components)
    nearest = cosines.mean(axis=2).max(axis=1)
    assert nearest.mean() == pytest.approx(0.87, abs=0.01)

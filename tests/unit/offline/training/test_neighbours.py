"""Item neighbours as training learns them: the formula on a case done by hand, and a share that validation chooses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from training_scene import CONFIG, cyclic_interactions

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.bundles.model_bundle import load_bundle
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.ranked_events import rank_events
from services.offline.training import PRESETS, neighbours
from services.offline.training.neighbours import (
    WithNeighbours,
    choosing_rows,
    learn_neighbours,
    ranks_by_share,
    shares_tried,
    with_share,
)
from services.offline.training.run import run_training
from services.offline.training.sequences import Histories, IntArray


def two_people() -> Interactions:
    """One had items 0, 1, 2 in this order, the other 0, 2."""
    items = np.array([0, 1, 2, 0, 2], np.int32)
    return replace(
        cyclic_interactions(2, 5, events=5),
        users=np.array([0, 0, 0, 1, 1], np.int32),
        items=items,
        timestamps=np.arange(5),
    )


class Constant:
    """A model to which one item is as good as another, or `best` the best of all."""

    def __init__(self, num_items: int, best: int | None = None) -> None:
        self.row = np.zeros(num_items)
        if best is not None:
            self.row[best] = 1

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        return np.repeat(self.row[None], len(events), axis=0)


@pytest.mark.parametrize("pairs", [1, 1 << 23], ids=["an item at a time", "at once"])
def test_weights_are_those_of_the_formula(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_BLOCK_PAIRS", pairs)
    learnt = learn_neighbours(two_people())
    assert learnt.items.shape == learnt.weights.shape == (5, 5)
    dense = np.zeros((5, 5))
    np.add.at(dense, (np.arange(5)[:, None], learnt.items), learnt.weights)
    expected = np.zeros((5, 5))
    expected[0, 1], expected[1, 2], expected[0, 2] = 1, 1, 2**-0.5 + 1
    expected += 0.5 * expected.T
    counts = np.array([2, 1, 2, 1, 1])
    np.testing.assert_allclose(dense, expected / (counts[:, None] * counts) ** 0.25, rtol=1e-6)


def test_scores_are_the_models_with_the_votes_of_what_was_before() -> None:
    data = two_people()
    learnt = with_share(learn_neighbours(data), 0.25)
    histories = Histories.of(data)
    scores = WithNeighbours(model=Constant(5, best=3), neighbours=learnt).scores(
        histories, np.array([2, 4]), np.array([0, 1])
    )
    # Both times item 2 is the only voted one that was not seen, so its vote is 1 (and 1 is voted for after 0 alone).
    np.testing.assert_allclose(scores[0], [0, 0, 0.75, 0.25, 0])
    assert scores[1].argmax() == 2
    assert 0 < scores[1, 1] < 0.75


def test_the_share_that_ranks_the_kept_events_best_is_found_in_both_directions() -> None:
    data = cyclic_interactions(events=1_000, num_items=100)
    rows, offsets = data.by_user()
    kept = rows[offsets[1:] - 1]
    learnt = learn_neighbours(data.select(np.setdiff1d(np.arange(len(data)), kept)))
    found = shares_tried(Constant(100), learnt, data, kept)
    assert found[0.5] > found[1.0] + 0.2
    by_share = ranks_by_share(Constant(100, best=7), learnt, data, kept)
    for share in (1.0, 0.35):
        served = WithNeighbours(model=Constant(100, best=7), neighbours=with_share(learnt, share))
        np.testing.assert_array_equal(by_share[share], rank_events(served, data, kept).ranks)
    nothing = replace(learnt, weights=np.zeros_like(learnt.weights))
    assert len(set(shares_tried(Constant(100, best=7), nothing, data, kept).values())) == 1


def test_a_hundredth_of_the_events_chooses_and_few_choose_nothing() -> None:
    data = cyclic_interactions(num_users=200, events=15_000)
    rows = choosing_rows(data, default_schema())
    assert len(rows) == 150
    histories, offsets = data.by_user()
    assert set(rows.tolist()) <= set(histories[offsets[1:] - 1].tolist())
    assert len(choosing_rows(cyclic_interactions(), default_schema())) == 0


def test_an_items_only_events_choose_nothing() -> None:
    data = cyclic_interactions(num_users=200, events=15_000)
    lonely = choosing_rows(data, default_schema())[::2]
    items = data.items.copy()
    items[lonely] = 30
    items[lonely[-2:]] = 31
    data = replace(data, items=items, item_ids=[*data.item_ids, "30", "31"], titles=[""] * 32, categories=[()] * 32)
    rows = choosing_rows(data, default_schema())
    assert set(rows.tolist()).isdisjoint(lonely.tolist())
    learnt = data.select(np.setdiff1d(np.arange(len(data)), rows))
    np.testing.assert_array_equal(learnt.item_counts() > 0, data.item_counts() > 0)


@pytest.mark.parametrize("head", ["mol", "dot"])
def test_training_writes_the_neighbours_that_win_and_says_so(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "quick", CONFIG)
    monkeypatch.setattr(neighbours, "_MIN_EVENTS", 10)
    data = cyclic_interactions(num_items=120, events=3_000)
    report = run_training(out=tmp_path / "bundle", interactions=data, epochs=1, split="time", head=head, export=False)
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.neighbours is not None
    assert bundle.neighbours.shape.model_share == report["model_share"] < 1
    metrics = bundle.manifest.metrics
    assert metrics["with_neighbours"]["ndcg@10"] > metrics["model"]["ndcg@10"]
    # The neighbours are of every event, those that chose the share too.
    assert bundle.counts.sum() == bundle.manifest.data["events"]

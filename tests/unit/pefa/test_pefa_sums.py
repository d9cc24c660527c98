"""Sums: any order of adding, removing and forgetting leaves the bits of the batch computation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pefa_scene import Scene, make_scene

from services.algorithms.pefa.contribution import SCALE
from services.algorithms.pefa.sums import MAX_TOTAL_WEIGHT, ItemSums


def empty(scene: Scene) -> ItemSums:
    return ItemSums(num_components=scene.contributions.shape[1], width=scene.contributions.shape[2])


class Fold:
    """The scene's interactions as a fold sees them."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.weights, self.contributions = scene, scene.weights, scene.contributions

    def columns(self, rows: list[int]) -> tuple[list[str], np.ndarray, np.ndarray]:
        item_ids = [self.scene.item_ids[row] for row in rows]
        return item_ids, self.contributions[rows], self.weights[rows]

    def batch(self, rows: list[int]) -> ItemSums:
        """All of them at once, in order."""
        sums = empty(self.scene)
        if rows:
            sums.add(*self.columns(sorted(rows)))
        return sums


def random_batches(rng: np.random.Generator, rows: list[int]) -> list[list[int]]:
    order = list(rng.permutation(rows)) if rows else []
    cuts = sorted(rng.integers(0, len(order) + 1, 4))
    return [[int(row) for row in part] for part in np.split(np.array(order, dtype=int), cuts)]


@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_order_with_undone_interactions_has_the_bits_of_the_survivors_batch(
    seed: int, count: int, mixture: bool
) -> None:
    p_q, p_x = (3, 2) if mixture else (1, 1)
    fold = Fold(make_scene(seed, count, p_q=p_q, p_x=p_x))
    rng = np.random.default_rng(seed)
    undone = [row for row in range(count) if rng.random() < 0.4]
    sums = empty(fold.scene)
    added: list[int] = []
    for batch in random_batches(rng, list(range(count))):
        sums.add(*fold.columns(batch))
        added += batch
        due = [row for row in undone if row in added]  # undone some time after they were added
        leave = [row for row in due if rng.random() < 0.5]
        sums.remove(*fold.columns(leave))
        undone = [row for row in undone if row not in leave]
        if rng.random() < 0.3:  # what was hashed so far is no part of the content
            sums.digest()
        sums.hash_some(1)
        added = [row for row in added if row not in leave]
    sums.remove(*fold.columns(undone))
    survivors = [row for row in added if row not in undone]
    wanted = fold.batch(survivors)
    assert sums.digest() == wanted.digest()
    assert sorted(sums) == sorted(wanted)
    ids = [f"item-{number}" for number in range(6)]
    got, expected = sums.of(ids), wanted.of(ids)
    for name in ("sums", "evidence", "coherence", "counts"):
        assert getattr(got, name).tobytes() == getattr(expected, name).tobytes()


@given(st.integers(0, 2**32 - 1), st.integers(0, 30))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_checkpoint_restores_the_same_state_and_goes_on_the_same(seed: int, count: int) -> None:
    fold = Fold(make_scene(seed, count + 10))
    sums = fold.batch(list(range(count)))
    item_ids = sorted(sums)
    restored = empty(fold.scene)
    restored.put(item_ids, sums.pick(item_ids))
    assert restored.digest() == sums.digest()
    more = fold.columns(list(range(count, count + 10)))
    restored.add(*more)
    sums.add(*more)
    assert restored.digest() == sums.digest()


def test_a_digest_can_be_prepared_in_slices_and_costs_what_changed_since() -> None:
    fold = Fold(make_scene(3, 40))
    sums = fold.batch(list(range(40)))
    slices = 1
    while not sums.hash_some(1):
        slices += 1
    assert slices == len(sums)
    assert sums.digest() == fold.batch(list(range(40))).digest()
    sums.remove(*fold.columns([7]))
    assert sums.hash_some(1)
    assert sums.digest() == fold.batch([row for row in range(40) if row != 7]).digest()


def test_what_is_read_is_the_weighted_sum() -> None:
    scene = make_scene(1, 300)
    sums = Fold(scene).batch(list(range(300)))
    read = sums.of(["item-1", "unknown"])
    rows = [row for row in range(300) if scene.item_ids[row] == "item-1"]
    assert np.array_equal(read.sums[0], scene.contributions[rows].sum(axis=0) / SCALE)
    assert read.evidence[0] == pytest.approx(np.abs(scene.weights[rows]).sum(), abs=1e-7)
    length = np.linalg.norm(read.sums[0], axis=1).sum()
    assert read.coherence[0] == pytest.approx(length / read.evidence[0])
    assert read.counts.tolist() == [len(rows), 0]
    assert (read.evidence[1], read.coherence[1]) == (0, 0)
    assert not read.sums[1].any()


def test_more_items_than_first_rows_keep_their_sums() -> None:
    num = 1000
    sums = ItemSums(num_components=1, width=1)
    ids = [f"i{number}" for number in range(num)]
    values = np.arange(num, dtype=np.int64)[:, None, None] * SCALE
    sums.add(ids, values, np.ones(num))
    assert sums.of(ids).sums[:, 0, 0].tolist() == list(range(num))
    sums.remove(ids[:500], values[:500], np.ones(500))
    assert len(sums) == 500
    assert "i0" not in sums
    assert "i999" in sums
    sums.add(ids[:500], values[:500], np.ones(500))  # rows are used again
    assert sums.of(ids).sums[:, 0, 0].tolist() == list(range(num))
    assert sum(sums.counts(list(sums))) == num
    assert sums.nbytes >= num * sums.bytes_per_item


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((["a"], np.zeros((1, 2, 9), np.int64), np.ones(1)), "contributions has shape"),
        ((["a"], np.zeros((1, 2, 8)), np.ones(1)), "float64"),
        ((["a"], np.zeros((1, 2, 8), np.int64), np.ones(2)), r"weights \(2,\)"),
        ((["a"], np.zeros((1, 2, 8), np.int64), np.full(1, np.inf)), "NaN or infinite"),
    ],
)
def test_what_does_not_fit_changes_nothing(columns: tuple[object, ...], message: str) -> None:
    sums = ItemSums(num_components=2, width=8)
    before = sums.digest()
    with pytest.raises(ValueError, match=message):
        sums.add(*columns)
    assert sums.digest() == before


def test_removing_what_is_not_there_changes_nothing() -> None:
    fold = Fold(make_scene(14, 20))
    sums = fold.batch(list(range(10)))
    before = sums.digest()
    _, contributions, weights = fold.columns([0])
    with pytest.raises(ValueError, match="no \\(further\\) interaction"):
        sums.remove(*fold.columns([row for row in range(10) if fold.scene.item_ids[row] == fold.scene.item_ids[0]] * 2))
    with pytest.raises(ValueError, match="no \\(further\\) interaction"):
        sums.remove(["unknown"], contributions, weights)
    assert sums.digest() == before


def test_removing_something_else_than_was_added_is_noticed_when_the_item_would_end() -> None:
    fold = Fold(make_scene(15, 1))
    sums = fold.batch([0])
    before = sums.digest()
    item_ids, contributions, weights = fold.columns([0])
    with pytest.raises(ValueError, match="not what had been added"):
        sums.remove(item_ids, contributions + 1, weights)
    with pytest.raises(ValueError, match="not what had been added"):
        sums.remove(item_ids, contributions, weights / 2)
    assert sums.digest() == before


@pytest.mark.parametrize(
    ("count", "weight"), [(4, 2.0**31), (8, 2.0**31), (5, 1.9e9), (1, 2.0**33), (1, 2.0**34), (1, 1e300)]
)
def test_a_batch_whose_own_sum_passes_64_bits_is_refused(count: int, weight: float) -> None:
    sums = ItemSums(num_components=1, width=1)
    sums.add(["a"], np.full((1, 1, 1), SCALE), np.ones(1))
    before = sums.digest()
    for item_id in ("a", "b"):
        with pytest.raises(ValueError, match=f"item '{item_id}': weights add up to more than {MAX_TOTAL_WEIGHT}"):
            sums.add(
                ["c", *[item_id] * count],
                np.zeros((1 + count, 1, 1), np.int64),
                np.array([1.0] + [weight] * count),
            )
        assert sums.digest() == before
        assert list(sums) == ["a"]


def test_sums_refuse_to_overflow() -> None:
    sums = ItemSums(num_components=1, width=1)
    big = np.array([[[2**60]]], dtype=np.int64)
    sums.add(["a"], big, np.array([float(MAX_TOTAL_WEIGHT - 1)]))
    before = sums.digest()
    with pytest.raises(ValueError, match="item 'a': weights add up to more than"):
        sums.add(["b", "a"], np.concatenate([big, big]), np.array([1.0, 2.0]))
    assert sums.digest() == before
    assert "b" not in sums


@pytest.mark.parametrize("name", ["sums", "weights", "counts"])
def test_torn_parts_of_a_checkpoint_are_refused(name: str) -> None:
    scene = make_scene(16, 20)
    sums = Fold(scene).batch(list(range(20)))
    arrays = sums.pick(sorted(sums))
    with pytest.raises(ValueError, match="disagree"):
        empty(scene).put(sorted(sums), {**arrays, name: arrays[name][:-1]})


def test_shapes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="width=0 allowed: at least 1"):
        ItemSums(num_components=1, width=0)

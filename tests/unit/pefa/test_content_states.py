"""The ridge from content to item states: judged by leaving each item out, exact where content says all."""

import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from services.algorithms.pefa.content import ContentMap, TextStates, _Decomposition, _unit, fit_content_map
from services.algorithms.scoring.states import ItemStates


def once(num_items: int) -> np.ndarray:
    """Counts of items that were each seen once."""
    return np.ones(num_items, dtype=np.int64)


def known_items(
    *, num_items: int, told: float, seed: int, num_components: int = 2
) -> tuple[np.ndarray, ItemStates, np.ndarray]:
    """Contents (X, 5), states whose components follow them by the share `told`, and the true map (5, P_x, 4)."""
    rng = np.random.default_rng(seed)
    contents = rng.normal(size=(num_items, 5)).astype(np.float32)
    truth = rng.normal(size=(5, num_components, 4))
    components = told * np.einsum("xc,cpd->xpd", contents, truth)
    components = components + (1 - told) * rng.normal(size=components.shape)
    components /= np.linalg.norm(components, axis=-1, keepdims=True)
    gate = rng.normal(size=(num_items, 3 * num_components)).astype(np.float32)
    return contents, ItemStates(components=components.astype(np.float32), gate=gate), truth


def refit_without(
    contents: np.ndarray, targets: np.ndarray, counts: np.ndarray, row: int, penalty: float
) -> tuple[np.ndarray, np.ndarray]:
    """One row's deviation from the mean of the others, and the prediction of it by a fit that never saw it, solved
    plainly; every row as often as it counts."""
    others = np.repeat(np.delete(np.arange(len(contents)), row), np.delete(counts, row))
    content_mean, target_mean = contents[others].mean(axis=0), targets[others].mean(axis=0)
    centred = contents[others] - content_mean
    gram = centred.T @ centred + penalty * np.eye(centred.shape[1])
    weight = np.linalg.solve(gram, centred.T @ (targets[others] - target_mean))
    return targets[row] - target_mean, (contents[row] - content_mean) @ weight


@pytest.mark.parametrize("ridge", [1e-2, 1.0, 1e2])
def test_the_left_out_cosine_is_that_of_refitting_without_each_item(ridge: float) -> None:
    contents, items, _ = known_items(num_items=23, told=0.5, seed=1)
    targets = items.components.reshape(23, -1).astype(np.float64)
    exact, counts = contents.astype(np.float64), np.random.default_rng(0).integers(1, 9, 23)
    seen = np.repeat(exact, counts, axis=0)
    penalty = ridge * float(np.linalg.eigvalsh((seen - seen.mean(0)).T @ (seen - seen.mean(0))).mean())
    cosines = []
    for row in range(23):
        actual, predicted = (_unit(one.reshape(2, 4)) for one in refit_without(exact, targets, counts, row, penalty))
        cosines.append((predicted * actual).sum(axis=-1).mean())
    mean, error = _Decomposition(contents, items.components.reshape(23, -1), counts).left_out_cosine(ridge, 2)
    assert mean == pytest.approx(np.average(cosines, weights=counts), abs=1e-6)
    shares = counts / counts.sum()
    assert error == pytest.approx(np.sqrt(np.sum((shares * (np.array(cosines) - mean)) ** 2)), abs=1e-6)


def test_blocks_of_items_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    contents, items, _ = known_items(num_items=40, told=0.7, seed=2)
    whole = fit_content_map(contents, items, np.arange(40))
    monkeypatch.setattr("services.algorithms.pefa.content._BLOCK", 7)
    parts = fit_content_map(contents, items, np.arange(40))
    assert parts.ridge == whole.ridge
    np.testing.assert_allclose(parts.weight, whole.weight, atol=1e-6)
    np.testing.assert_allclose(parts.distance, whole.distance, atol=1e-6)
    assert parts.left_out_cosine == pytest.approx(whole.left_out_cosine, abs=1e-9)
    assert parts.standard_error == pytest.approx(whole.standard_error, abs=1e-9)


def test_content_that_says_much_predicts_new_items_far_better_than_the_mean() -> None:
    contents, items, truth = known_items(num_items=400, told=0.95, seed=3)
    fitted = fit_content_map(contents, items, once(400))
    new = np.random.default_rng(4).normal(size=(200, 5)).astype(np.float32)
    wanted = _unit(np.einsum("xc,cpd->xpd", new, truth))
    cosines = (fitted.states(new).components * wanted).sum(axis=-1)
    assert cosines.mean() > 0.95
    # The judgement speaks of items that the fit did not see.
    assert cosines.mean() == pytest.approx(fitted.left_out_cosine, abs=0.05)


def test_new_items_lie_as_far_from_the_mean_as_known_ones_however_little_is_told() -> None:
    """A regression alone would put them near the mean, where nobody looks."""
    contents, items, _ = known_items(num_items=400, told=0.3, seed=15)
    items = ItemStates(components=_unit(items.components + 0.8).astype(np.float32))
    fitted = fit_content_map(contents, items, once(400))
    new = fitted.states(np.random.default_rng(4).normal(size=(200, 5)).astype(np.float32)).components
    known = np.linalg.norm(items.components - fitted.mean, axis=-1).mean(axis=0)
    np.testing.assert_allclose(fitted.distance, known, rtol=1e-5)
    # On the sphere again: near, if not exactly, as far.
    np.testing.assert_allclose(np.linalg.norm(new - fitted.mean, axis=-1).mean(axis=0), known, rtol=0.15)


def test_content_that_says_nothing_leaves_the_mean_state() -> None:
    rng = np.random.default_rng(5)
    components = _unit(1.0 + rng.normal(size=(60, 2, 4))).astype(np.float32)  # about one direction, by chance alone
    fitted = fit_content_map(rng.normal(size=(60, 5)).astype(np.float32), ItemStates(components=components), once(60))
    assert fitted.left_out_cosine < 3 * fitted.standard_error
    mean = _unit(components.mean(axis=0, dtype=np.float64))
    np.testing.assert_allclose(fitted.states(np.ones((1, 5), np.float32)).components[0], mean, atol=1e-6)


def test_equal_contents_give_every_item_the_mean_state() -> None:
    _, items, _ = known_items(num_items=30, told=0.5, seed=6)
    fitted = fit_content_map(np.ones((30, 5), dtype=np.float32), items, once(30))
    mean = _unit(items.components.mean(axis=0, dtype=np.float64))
    np.testing.assert_allclose(fitted.states(np.full((1, 5), 7, np.float32)).components[0], mean, atol=1e-6)


def test_a_trained_width_is_required_of_new_contents() -> None:
    contents, items, _ = known_items(num_items=20, told=0.5, seed=9)
    fitted: ContentMap = fit_content_map(contents, items, once(20))
    with pytest.raises(ValueError, match=r"contents has shape \(2, 4\); expected \(B, 5\)"):
        fitted.states(np.zeros((2, 4), dtype=np.float32))


def test_contents_that_do_not_fit_the_items_are_refused_by_name() -> None:
    contents, items, _ = known_items(num_items=20, told=0.5, seed=10)
    with pytest.raises(ValueError, match=r"contents has shape \(19, 5\); expected \(20, D\)"):
        fit_content_map(contents[:-1], items, once(20))
    with pytest.raises(ValueError, match="num_items=2; allowed: at least 3"):
        fit_content_map(contents[:2], ItemStates(components=items.components[:2]), once(2))
    broken = contents.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="contents holds NaN"):
        fit_content_map(broken, items, once(20))
    with pytest.raises(ValueError, match=r"counts has shape \(19,\); expected \(20,\), one per item"):
        fit_content_map(contents, items, once(19))


class WordCounts:
    """A text encoder of words: each is a fixed random direction."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        words = [text.replace(".", "").replace(",", "").split() for text in texts]
        return np.array(
            [
                sum(np.random.default_rng(zlib.crc32(word.encode())).normal(size=16) for word in found)
                for found in words
            ],
            dtype=np.float32,
        )


def test_a_new_item_begins_near_the_items_that_share_its_categories() -> None:
    rng = np.random.default_rng(12)
    centres = {"Comedy": rng.normal(size=(2, 4)), "Horror": rng.normal(size=(2, 4))}
    names = [("Comedy", "Horror")[row % 2] for row in range(200)]
    components = _unit(np.stack([centres[name] for name in names]) + 0.3 * rng.normal(size=(200, 2, 4)))
    items = ItemStates(components=components.astype(np.float32))
    titles = [f"title{row}" for row in range(200)]
    texts = TextStates(
        WordCounts(), titles=titles, categories=[[name] for name in names], items=items, counts=once(200)
    )
    found = texts.of(["unheard", "unseen"], [["Horror"], ["Comedy"]]).components
    for state, own, other in ((found[0], "Horror", "Comedy"), (found[1], "Comedy", "Horror")):
        assert (state * _unit(centres[own])).sum(axis=-1).min() > 0.9
        assert (state * _unit(centres[own])).sum() > (state * _unit(centres[other])).sum()


def test_an_item_without_categories_is_described_by_its_title_alone() -> None:
    contents, items, _ = known_items(num_items=20, told=0.5, seed=13)
    del contents
    titles = [f"word{row}" for row in range(20)]
    with_none = TextStates(WordCounts(), titles=titles, categories=[[]] * 20, items=items, counts=once(20))
    np.testing.assert_array_equal(
        with_none.of(["word3"], [[]]).components, with_none.map.states(WordCounts().encode(["word3"])).components
    )

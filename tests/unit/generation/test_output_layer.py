"""Output layer, shortlist and identifier table: what they answer and refuse."""

import numpy as np
import pytest

from services.algorithms.generation.identifiers import IdentifierTable
from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("precision", "error", "size"), [("int8", 0.02, 100), ("float16", 0.002, 192)])
def test_scores_are_the_products_within_the_precision(precision: str, error: float, size: int) -> None:
    weights, x = normal(50, 96), normal(3, 96, seed=1)
    layer = OutputLayer.from_weights(weights, precision=precision)
    exact = x @ weights.T
    assert np.abs(layer.scores(x) - exact).max() < error * np.abs(exact).max()
    chosen = np.array([0, 7, 49], dtype=np.int32)
    assert layer.scores(x, chosen).tobytes() == np.ascontiguousarray(layer.scores(x)[:, chosen]).tobytes()
    assert (len(layer), layer.width, layer.nbytes) == (50, 96, 50 * size)
    assert np.abs(layer.decoded(slice(3, 9)) - weights[3:9]).max() < error
    loaded = OutputLayer.from_arrays(**layer.arrays)
    assert loaded.nbytes == layer.nbytes
    assert loaded.scores(x).tobytes() == layer.scores(x).tobytes()


def test_scores_follow_the_reference() -> None:
    weights, x = normal(50, 96), normal(3, 96, seed=1)
    for precision in ("int8", "float16"):
        layer = OutputLayer.from_weights(weights, precision=precision)
        off = 0.2 if precision == "int8" else 0.02
        np.testing.assert_allclose(layer.scores(x), x @ layer.decoded(slice(None)).T, atol=off)


@pytest.mark.parametrize(
    ("x", "tokens", "message"),
    [
        (normal(3, 5), [0], r"x has shape \(3, 5\); allowed: \(s, 4\)"),
        (np.full((1, 4), np.inf), [0], "x holds a value that is not finite"),
        (normal(1, 4), [0, 9], "tokens 0 to 9; allowed: 0 to 8"),
        (normal(1, 4), [-1], "tokens -1 to -1; allowed: 0 to 8"),
    ],
)
def test_wrong_questions_to_the_output_layer_are_refused(x: np.ndarray, tokens: list[int], message: str) -> None:
    layer = OutputLayer.from_weights(normal(9, 4))
    with pytest.raises(ValueError, match=message):
        layer.scores(x, np.array(tokens, dtype=np.int32))


@pytest.mark.parametrize(
    ("weights", "precision", "message"),
    [
        (np.zeros((0, 4)), "int8", r"weights have shape \(0, 4\)"),
        (np.full((2, 4), np.nan), "int8", "not finite"),
        (np.full((2, 4), 1e6), "float16", "float16 ends at 65504"),
        (np.zeros((2, 4)), "int4", "precision='int4' allowed: int8, float16"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(weights: np.ndarray, precision: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutputLayer.from_weights(weights.astype(np.float32), precision=precision)


def test_the_shortlist_is_the_union_of_the_nearest_sets_with_padding() -> None:
    shortlist = Shortlist(
        np.eye(4, dtype=np.float32), np.array([[3, 9], [9, 4], [7, 7], [1, 2]], dtype=np.int32), num_tokens=10
    )
    x0 = np.array([2.0, 3.0, -1.0, 1.0], dtype=np.float32)
    assert shortlist.tokens(x0, 1).tolist() == [0, 4, 9]
    assert shortlist.tokens(x0, 2).tolist() == [0, 3, 4, 9]
    assert shortlist.tokens(x0, 99).tolist() == [0, 1, 2, 3, 4, 7, 9]
    assert shortlist.tokens(np.zeros(4, dtype=np.float32), 1).tolist() == [0, 3, 9]


@pytest.mark.parametrize(
    ("centers", "sets", "message"),
    [
        (normal(2, 4), [[1, 2]], r"centers \(2, 4\) and sets \(1, 2\)"),
        (normal(1, 4), [[1, 10]], "sets hold tokens 1 to 10; allowed: 0 to 9"),
        (normal(1, 4), [[-1, 1]], "sets hold tokens -1 to 1"),
        (np.full((1, 4), np.nan), [[1, 1]], "centers hold a value that is not finite"),
    ],
)
def test_a_shortlist_that_does_not_fit_is_refused(centers: np.ndarray, sets: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shortlist(centers, np.array(sets, dtype=np.int32), num_tokens=10)


def test_identifiers_keep_text_of_any_script_and_their_items() -> None:
    texts = ["", "Amélie", "千と千尋の神隠し", "🎬 film", "a\x00b"]
    table = IdentifierTable.build(texts, [[0], [1, 4], [2], [3], [5]])
    for each in (table, IdentifierTable(*table.arrays.values())):
        assert [each.text(number) for number in range(5)] == texts
        assert [each.items().of(number).tolist() for number in range(5)] == [[0], [1, 4], [2], [3], [5]]


def test_added_identifiers_follow_and_a_reader_keeps_what_it_has() -> None:
    table = IdentifierTable.build(["a"], [[0]])
    seen = []
    for number in range(1, 200):
        assert table.add(f"text {number}", [number, number + 1]) == number
        seen.append(table.items())
    assert len(table) == 200
    assert table.text(150) == "text 150"
    for number, items in enumerate(seen, start=1):
        assert len(items.added_offsets) == number + 1
        assert items.of(number).tolist() == [number, number + 1]
        assert items.of(0).tolist() == [0]
